"""Write and read checkpoints.

::

    checkpoints = Checkpoints(home, model=ddp, optimizer=optimizer, parts={"scaler": scaler}, identity={"seed": 0})
    restored = checkpoints.restore()              # None: there is no checkpoint to resume from
    checkpoints.prepare(progress)                 # before the first step: assigns writers, allocates buffers
    ...
    checkpoints.save(step, progress)              # returns as soon as the snapshot is taken
    ...
    checkpoints.finish()                          # waits until the last one is published

All ranks call every method at the same point. ``progress`` is any nesting of dictionaries, lists, numbers, text and
tensors that are equal on all ranks, such as the step, the history of metrics and the best weights. A checkpoint also
holds the model, the optimiser, the ``parts`` (scheduler, scaler, EMA: anything with ``state_dict`` and
``load_state_dict``) and the random generators of every rank. Nothing here draws random numbers.
"""

from __future__ import annotations

import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from tasks.artifacts.format import DamagedArtifact, canonical_json
from tasks.distributed.peers import Peers
from tasks.logs import logger
from tasks.storage import AlreadyThere, MissingObject, Storage, storage_for
from tasks.train.checkpoint.background import BackgroundSave, StepWait
from tasks.train.checkpoint.layout import ATTEMPTS, Name, Retention, attempt_key, complete, newest_attempt, unfinished
from tasks.train.checkpoint.publish import (
    STATE,
    Publisher,
    Snapshot,
    rank_file,
    remove_stale_staging,
    run_and_gather,
)
from tasks.train.checkpoint.random_state import capture_random_state, restore_random_state
from tasks.train.checkpoint.restore import (
    Candidate,
    OpenCheckpoint,
    ResumePolicy,
    SkippedCheckpoint,
    candidates,
    check_tensors,
    damage,
    opened,
)
from tasks.train.checkpoint.shards import ShardReader, load_planner, pieces_read, read_index
from tasks.train.checkpoint.staging import Buffers, TensorKey, assign_writers, changed_later, tensor_keys
from tasks.train.checkpoint.state_dicts import initialize, model_state, optimizer_state
from tasks.train.checkpoint.state_json import join, split
from tasks.train.device_clock import DeviceClock

#: The beginnings of the names of tensors that do not change before :meth:`Checkpoints.wait_for_copy`: the optimiser's
#: state and the averaged weights, which its step changes, and those of the progress.
UNCHANGED = ("optimizer/", "parts/ema/", "progress/")

LOG = logger("checkpoint")
T = TypeVar("T")


class Stateful(Protocol):
    """A part of the training state."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Restored:
    """A restored checkpoint. ``source`` is its URI; ``refused`` describes the damaged checkpoints that were skipped.

    ``owns`` holds the ``own`` argument of :meth:`Checkpoints.save` of every rank that wrote it, in rank order. If the
    number and the layout of the ranks are the same now (``same_world``), the random generators were restored and the
    run continues bit for bit; otherwise only the samples and their order are the same.
    """

    step: int
    progress: Any
    owns: tuple[Any, ...]
    source: str
    same_world: bool
    refused: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one attempt of one run.

    ``home`` and ``previous`` are directories or prefixes of a store that all ranks can access. Checkpoints are written
    to ``home``; those of ``previous`` (Flyte's prefix of the attempt before; may be empty or not exist) are only read.
    ``identity`` holds what must equal the checkpoint's to resume it (model, data, seed, …), as nested mappings of JSON
    values; what one of them lacks counts as what ``defaults`` has. With ``resume="never"`` only checkpoints of the same
    ``run`` (an execution's id) are used, so that retries resume while older checkpoints are ignored. ``layout`` says
    how the ranks divide the work; numbers continue bit for bit under the same one only. Ranks may hold different parts
    of the model. ``clock`` is the device's, for :meth:`pop_step_wait`. Raises ``UserError`` if ``home`` cannot be
    written.
    """

    def __init__(
        self,
        home: str,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Stateful] | None = None,
        identity: Mapping[str, Any],
        defaults: Mapping[str, Any] | None = None,
        previous: str = "",
        run: str = "",
        resume: str = "auto",
        retention: Retention | None = None,
        clock: DeviceClock | None = None,
        layout: Sequence[int] = (),
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parts = dict(parts or {})
        self._peers = Peers.connect(timeout)
        self.home = storage_for(home)
        other = previous and previous.rstrip("/") != home.rstrip("/")
        self.previous = storage_for(previous) if other else None
        self._sources = [self.home, self.previous] if self.previous else [self.home]
        # Writes the mark of this attempt, which fails here rather than at the first save if ``home`` is not writable.
        attempt, present = self._on_rank_0(lambda: begin_attempt(self._sources))
        made_by = {"identity": identity, "run": run} | ({"layout": list(layout)} if layout else {})
        self._layout = list(layout)
        self._publisher = Publisher(self.home, self._peers, attempt, made_by, retention or Retention(), present)
        self._policy = ResumePolicy(identity, run, resume, attempt, defaults or {})
        remove_stale_staging(self._publisher)
        self._tensor_keys: list[TensorKey] = []
        self._parts_differ = False
        self._buffers: Buffers | None = None
        #: Whether the tensors of any rank are others than those that the buffers are for.
        self._to_plan: Callable[[], bool] = lambda: True
        self._background = BackgroundSave(self._publisher, clock or DeviceClock())
        optimizer.register_step_pre_hook(lambda *_: self._background.delay_step())

    @property
    def attempt(self) -> int:
        return self._publisher.attempt

    @property
    def published(self) -> Name | None:
        """The last published checkpoint of this attempt."""
        return self._background.published

    @property
    def publish_seconds(self) -> float:
        """Seconds from snapshot to publication that the last successful save needs when no steps run beside it; equal
        on all ranks."""
        return self._background.publish_seconds

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 only; all ranks get its result or its error."""
        result = run_and_gather(self._peers, lambda: work() if self._peers.rank == 0 else None)[0]
        return cast(T, result)

    def _tree(self, progress: Any) -> tuple[Any, dict[str, Tensor]]:
        return split(
            {
                "model": model_state(self._model),
                "optimizer": optimizer_state(self._model, self._optimizer),
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
                "progress": progress,
            }
        )

    # Saving

    def prepare(self, progress: Any) -> None:
        """Assign writers and allocate buffers, so that the first save stalls no longer than the others."""
        fresh = not self._optimizer.state
        initialize(self._model, self._optimizer)
        self._plan(self._tree(progress)[1])
        if fresh:
            self._optimizer.state.clear()
        self._background.prepare()

    def _plan(self, tensors: Mapping[str, Tensor]) -> Buffers:
        self._tensor_keys = tensor_keys(tensors)
        everyones = self._peers.gather(self._tensor_keys)
        self._parts_differ = len({tuple(name for name, *_ in keys) for keys in everyones}) > 1
        chosen = assign_writers(everyones)
        self._buffers = Buffers(tensors, chosen, self._peers.rank)
        return self._buffers

    def save(self, step: int, progress: Any, *, own: Any = None, best: bool = False) -> float:
        """Take a snapshot after optimiser step ``step`` and publish it in the background; return the seconds of stall.

        Tensors that only the optimiser changes are copied in the background, too. The optimiser's next step waits for
        these copies, see :meth:`pop_step_wait`; nothing else may change the weights meanwhile. Those of ``progress``
        are copied in the background as well: call :meth:`wait_for_copy` before they change.

        ``own`` is state that differs between ranks: numbers and text. A checkpoint marked ``best`` is retained until
        another one is marked.

        Waits for the previous save if that is not finished. Two failed saves in a row are logged; the third raises its
        error, ``StorageUnavailable`` or ``UserError``. ``Superseded`` is always raised.
        """
        started = time.perf_counter()
        self._background.wait()
        tree, tensors = self._tree(progress)
        fits = tensor_keys(tensors) == self._tensor_keys
        # Kept until the next save, as giving up a collective right after it has ended takes a millisecond.
        self._to_plan = self._peers.any(not fits)
        # While the ranks ask each other:
        own = {"random": capture_random_state(), "own": own}
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        later = changed_later(tensors, parameters, UNCHANGED)
        complete = self._buffers.stage(tensors, later) if self._buffers and fits else None
        if self._to_plan() or complete is None:
            complete = self._plan(tensors).stage(tensors, later)
        self._background.begin(lambda: Snapshot(step, best, complete(), tree, own, self._parts_differ))
        return time.perf_counter() - started

    def wait_for_copy(self) -> None:
        """Wait until the last snapshot holds copies of all tensors."""
        self._background.wait_for_copy()

    def pop_step_wait(self) -> StepWait | None:
        """The wait of the optimiser's last step for a snapshot, if it had to wait and this was not asked before."""
        return self._background.pop_step_wait()

    def busy(self) -> bool:
        """Whether a save is in progress on this rank. Ranks may differ for a moment."""
        return self._background.busy()

    def finish(self) -> Name | None:
        """Wait until the last save is published and return its name. Raises the error if it failed."""
        self._background.wait(tolerated=0)
        return self.published

    def close(self) -> None:
        """Release the process group and the staging directory, without waiting for a save as :meth:`finish` does."""
        shutil.rmtree(self._publisher.staging_directory, ignore_errors=True)
        self._background.close()
        if self._peers.group is not None and not self.busy():
            dist.destroy_process_group(self._peers.group)

    # Restoring

    def restore(self, accept: Callable[[Name], bool] = lambda name: True, into: Any = None) -> Restored | None:
        """Restore the newest checkpoint that ``accept`` takes and that is intact on every rank; None if there is none.

        The tensors of ``into``, a progress as :meth:`save` takes it, are overwritten and become those of the result's.

        Checkpoints of the home are tried before those of ``previous``. All ranks skip damaged ones, which are logged
        and listed in the result. One from ``previous`` is copied to ``home`` before this returns, because Flyte offers
        only the prefix of the attempt before and this attempt may die before its first save. Raises ``UserError`` with
        the first difference if the newest checkpoint has another identity, ``StorageUnavailable`` if the store is away.
        """
        self._background.wait()
        refused: list[str] = []
        fresh = not self._optimizer.state
        for index, name in self._on_rank_0(lambda: candidates(self._sources)):
            if not accept(name):
                continue
            candidate = Candidate(self._sources[index], name)
            try:
                with opened(candidate, self._peers, self._policy) as checkpoint:
                    restored = self._load(candidate, checkpoint, into, tuple(refused))
                    if index > 0:
                        self._background.published = self._publisher.adopt(
                            candidate.storage, candidate.name, checkpoint.artifact
                        )
            except SkippedCheckpoint:
                continue
            except (DamagedArtifact, MissingObject) as error:
                refused.append(damage(candidate, error))
                if fresh:
                    self._optimizer.state.clear()
                if self._peers.rank == 0:
                    LOG.warning("%s; looking for an older one", refused[-1])
                continue
            return restored
        return None

    def _load(self, candidate: Candidate, checkpoint: OpenCheckpoint, into: Any, refused: tuple[str, ...]) -> Restored:
        artifact = checkpoint.artifact
        index = read_index(artifact.directory)
        initialize(self._model, self._optimizer)
        _, live = self._tree(into)
        sizes: dict[str, tuple[int, ...]] = {}
        for of_rank in self._peers.gather({name: tuple(tensor.shape) for name, tensor in live.items()}):
            sizes |= of_rank
        check_tensors(candidate, index, sizes)
        # What only other ranks hold is theirs to read. What none holds is of no use, but for a progress that was not
        # given, which all read.
        unknown = {name for name in index.keys() - sizes.keys() if into is None and name.startswith("progress/")}
        tensors = {
            name: live[name] if name in live else torch.empty(entry["size"], dtype=getattr(torch, entry["dtype"]))
            for name, entry in index.items()
            if name in live or name in unknown
        }
        checkpoint.bring(pieces_read(tensors, index))
        dcp.load(
            tensors,
            storage_reader=ShardReader(artifact.directory, index),
            planner=load_planner(),
            process_group=self._peers.group,
            no_dist=self._peers.group is None,
        )
        # The model's tensors were filled in place; the optimiser has numbers besides tensors.
        tree = join(json.loads(artifact.path(STATE).read_bytes()), tensors)
        set_optimizer_state_dict(self._model, self._optimizer, optim_state_dict=tree["optimizer"])
        for name, part in self._parts.items():
            part.load_state_dict(tree["parts"][name])
        ranks = [json.loads(artifact.path(rank_file(rank)).read_bytes()) for rank in range(artifact.made_by["world"])]
        same = len(ranks) == self._peers.world and artifact.made_by.get("layout", []) == self._layout
        if same:
            restore_random_state(ranks[self._peers.rank]["random"])
        owns = tuple(rank["own"] for rank in ranks)
        return Restored(artifact.made_by["step"], tree["progress"], owns, candidate.uri, same, refused)


def begin_attempt(sources: list[Storage]) -> tuple[int, list[Name]]:
    """Claim the next attempt number in the home, the first of ``sources``, and delete incomplete checkpoints there.

    The number follows the highest one in all sources. Returns it and the complete checkpoints of the home.
    """
    home = sources[0]
    keys = home.list()
    attempt = max(newest_attempt(keys), *(newest_attempt(other.list(ATTEMPTS)) for other in sources)) + 1
    while True:
        try:
            home.put(attempt_key(attempt), canonical_json({"attempt": attempt, "claim": uuid.uuid4().hex}), fresh=True)
            break
        except AlreadyThere:
            attempt = max(attempt, newest_attempt(home.list(ATTEMPTS))) + 1
    home.delete(unfinished(keys, before=attempt))
    return attempt, complete(keys)
