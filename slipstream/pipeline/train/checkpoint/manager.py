"""Checkpoints of a training: saving and restoring.

::

    state = AppState(ddp, optimizer, parts={"scaler": scaler})
    checkpoints = Checkpoints(home, state, ResumePolicy(identity={"seed": 0}))
    restored = checkpoints.restore()              # None: there is no checkpoint to resume from
    checkpoints.prepare(progress)                 # before the first step: assigns writers, allocates buffers
    ...
    checkpoints.save(step, progress)              # returns as soon as the snapshot is taken
    ...
    checkpoints.finish()                          # waits until the last one is published

All ranks call all methods at the same point. ``progress`` is any nesting of dictionaries, lists, numbers, text and
tensors that are equal on all ranks, such as the step, the history of metrics and the best weights. A checkpoint also
holds the application's state (:class:`~slipstream.pipeline.train.checkpoint.state.AppState`) and the random generators
of every rank. This module never draws random numbers.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from slipstream.pipeline.train.checkpoint.background import BRIEF_WAIT_S, BackgroundSave
from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory, CheckpointName, Retention
from slipstream.pipeline.train.checkpoint.lease import Lease, wait_for_announced
from slipstream.pipeline.train.checkpoint.publish import (
    STATE,
    CheckpointSnapshot,
    Publisher,
    RankState,
    rank_file,
    rank_section,
    run_and_gather,
)
from slipstream.pipeline.train.checkpoint.restore import (
    Candidate,
    OpenCheckpoint,
    ResumePolicy,
    SkippedCheckpoint,
    TensorForm,
    check_tensors,
    open_checkpoint,
    restorable_tensors,
    tensor_form,
)
from slipstream.pipeline.train.checkpoint.shards import ShardReader, check_index, load_planner, pieces_read, read_index
from slipstream.pipeline.train.checkpoint.staging import (
    SnapshotBuffers,
    TensorKey,
    assign_writers,
    changed_later,
    tensor_keys,
)
from slipstream.pipeline.train.checkpoint.state import (
    AppState,
    capture_random_state,
    join_tensors,
    restore_random_state,
    split_tensors,
)
from slipstream.pipeline.train.device_clock import DeviceClock
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher
from slipstream.shared.artifacts.format import Artifact, DamagedArtifact
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.distributed.process_group import Peers
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.storage import MissingObject, storage_for

#: Name prefixes of tensors that may be copied in the background, because their owners call
#: :meth:`BackgroundSave.wait_for_copy` before a change: optimiser state, averaged weights, and tensors of the progress.
UNCHANGED = ("optimizer/", "parts/ema/", "progress/")

#: Longest wait, in seconds, for a save that is still in progress when the next is due. After a wait in vain, training
#: does not wait again until a save is done.
PATIENCE_S = 2.0

LOG = logger("checkpoint")
T = TypeVar("T")


@dataclass(frozen=True)
class RestoredCheckpoint:
    """Restored checkpoint.

    If the number and layout of the ranks are unchanged (``same_world``), the random generators were restored and the
    run continues bit for bit; otherwise only the samples and their order are the same.
    """

    step: int
    progress: Any
    #: Argument ``rank_state`` of :meth:`Checkpoints.save` of every writing rank, in rank order.
    rank_states: tuple[Any, ...]
    #: URI of the checkpoint.
    source: str
    same_world: bool
    #: Descriptions of damaged checkpoints that were skipped.
    refused: tuple[str, ...]
    #: Code versions that trained so far; empty in checkpoints of older releases.
    trained_by: tuple[str, ...] = ()
    #: Digests of the modules that wrote the checkpoint; empty in checkpoints of older releases.
    modules: Mapping[str, str] = field(default_factory=dict)


class Checkpoints:
    """Checkpoints of one attempt at a training.

    ``home`` is a directory or a prefix of a store that all ranks can access. This attempt claims it and waits for a
    save that earlier attempts have announced; they start no other. The ``watcher`` is notified if a later attempt
    claims ``home``. ``clock`` measures the device's idle time during saves. Raises ``UserError`` if ``home`` cannot be
    written.
    """

    def __init__(
        self,
        home: str,
        state: AppState,
        policy: ResumePolicy,
        *,
        retention: Retention | None = None,
        clock: DeviceClock | None = None,
        watcher: NoticeWatcher | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self._state = state
        #: Process group for exchanges between two steps.
        self.peers = Peers.connect(timeout)
        self.home = CheckpointDirectory(storage_for(home))
        self._watcher = watcher or NoticeWatcher([], grace_s=None)
        self._lease: Lease | None = None
        # Writes the claim: an unwritable directory fails here rather than at the first save.
        self.attempt, present = self._on_rank_0(lambda: self._take_home(policy))
        self._policy = replace(policy, attempt=self.attempt)
        self._publisher = Publisher(
            self.home,
            # Another group, because publishing overlaps with the exchanges between steps.
            Peers.connect(timeout),
            self.attempt,
            self._lease,
            policy.made_by(()),
            policy.ranks(self.peers.world),
            retention or Retention(),
            present,
        )
        self._tensor_keys: list[TensorKey] = []
        self._parts_differ = False
        self._buffers: SnapshotBuffers | None = None
        #: Save in progress, and results of earlier saves.
        self.background = BackgroundSave(self._publisher, clock or DeviceClock())
        state.optimizer.register_step_pre_hook(lambda *_: self.background.delay_step())

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def _take_home(self, policy: ResumePolicy) -> tuple[int, list[CheckpointName]]:
        """Claim the directory, on rank 0; return the number of this attempt and the checkpoints it may restore."""
        self._lease = Lease.take(self.home, policy.holder, self._watcher.has_notice, self._watcher.lose_home)
        try:
            if not self._lease.alone:
                wait_for_announced(self.home, self._lease.attempt, policy.grace_s)
            return self._lease.attempt, self.home.inherit(self._lease.attempt)
        except BaseException:
            self._lease.end()  # otherwise others would wait for it
            raise

    def _on_rank_0(self, work: Callable[[], T]) -> T:
        """Run ``work`` on rank 0 only; return its result, or raise its error, on all ranks."""
        result = run_and_gather(self.peers, lambda: work() if self.peers.rank == 0 else None)[0]
        return cast(T, result)

    @property
    def policy(self) -> ResumePolicy:
        """Resume policy, which also describes this attempt in its checkpoints."""
        return self._policy

    @property
    def trained_by(self) -> list[str]:
        """Code versions that have trained so far, the current version last."""
        return list(self._publisher.made_by["trained_by"])

    def _tree(self, progress: object) -> tuple[object, dict[str, Tensor]]:
        return split_tensors(self._state.state_dict() | {"progress": progress})

    # Saving

    def prepare(self, progress: object) -> None:
        """Assign writers and allocate buffers, so that the first save stalls no longer than later ones."""
        forget = self._state.initialize()
        self._plan(self._tree(progress)[1])
        forget()
        self.background.prepare()

    def _plan(self, tensors: Mapping[str, Tensor]) -> SnapshotBuffers:
        self._tensor_keys = tensor_keys(tensors)
        gathered = self.peers.gather(self._tensor_keys)
        names = [{name for name, *_ in keys} for keys in gathered]
        self._parts_differ = any(of_rank - names[0] for of_rank in names)
        chosen = assign_writers(gathered)
        self._buffers = SnapshotBuffers(tensors, chosen, self.peers.rank)
        return self._buffers

    def save(self, step: int, progress: object, *, rank_state: object = None) -> float:
        """Take a snapshot after step ``step``, publish it in the background and return the seconds of stall.

        Tensors that only the optimiser changes are copied in the background, too. The next optimiser step waits for
        these copies (:meth:`BackgroundSave.pop_step_wait`); nothing else may change the weights meanwhile. Tensors of
        ``progress`` are also copied in the background: call :meth:`BackgroundSave.wait_for_copy` before they change.
        ``rank_state`` is state that differs between ranks: numbers and text.

        The call waits briefly for an unfinished previous save. If the store does not accept it, the new snapshot waits
        while training continues (:meth:`BackgroundSave.resume`). Two refused saves in a row are logged; the third
        raises ``UserError``. ``Superseded`` is always raised.
        """
        started = time.perf_counter()
        busy = self.background.busy()
        tree, tensors = self._tree(progress)
        fits = tensor_keys(tensors) == self._tensor_keys
        ask = self.peers.any(not fits, busy, self.background.failing())
        # Overlaps with the exchange.
        own = RankState(capture_random_state(), rank_state)
        parameters = (parameter for group in self._state.optimizer.param_groups for parameter in group["params"])
        later = changed_later(tensors, parameters, UNCHANGED)
        self.background.wait_for_copy()
        complete = self._buffers.stage(tensors, later) if self._buffers and fits and not busy else None
        to_plan, anyone_busy, failing = ask()
        late = anyone_busy and (failing or self._still_busy())
        if to_plan or complete is None:
            self.background.wait_for_buffers()
            buffers = self._plan(tensors) if to_plan or self._buffers is None else self._buffers
            complete = buffers.stage(tensors, later)
        self.background.begin(
            step, lambda: CheckpointSnapshot(step, complete(), tree, own, self._parts_differ), late=late
        )
        return time.perf_counter() - started

    def _still_busy(self) -> bool:
        """Wait briefly for the previous save; return True if it is still in progress on any rank.

        The wait ends early if any rank is :meth:`~BackgroundSave.failing`.
        """
        for _ in range(round(PATIENCE_S / BRIEF_WAIT_S)):
            self.background.wait_briefly()
            busy, failing = self.peers.any(self.background.busy(), self.background.failing())()
            if failing or not busy:
                return busy
        return True

    def finish(self) -> CheckpointName | None:
        """Wait until the last save is published; return its name, or raise its error."""
        self.background.finish()
        return self.background.published

    def end(self) -> None:
        """Shut down: this attempt writes nothing any more, so a successor need not wait."""
        if self._lease is not None:
            self._lease.end()

    def hand_over(self) -> None:
        """Leave the lease of a finished training to another process of this attempt."""
        if self._lease is not None:
            self._lease.hand_over()

    def close(self) -> None:
        """Release the process groups and the staging directory, without waiting for a save.

        The lease on the checkpoint directory is held until :meth:`kill_child`.
        """
        shutil.rmtree(self._publisher.staging_directory, ignore_errors=True)
        self.background.close()
        idle = [self.peers] if self.background.busy() else [self.peers, self._publisher.peers]
        for peers in idle:
            if peers.group is not None:
                dist.destroy_process_group(peers.group)

    # Restoring

    def restore(
        self, accept: Callable[[CheckpointName], bool] = lambda name: True, into: object = None
    ) -> RestoredCheckpoint | None:
        """Restore the newest checkpoint for which ``accept`` is True and whose files are intact; None if there is none.

        ``into`` is a progress as in :meth:`save_model`: its tensors are overwritten and returned in the result. All
        ranks skip damaged checkpoints, which are logged and listed in the result. Raises ``UserError`` with the first
        difference if the newest checkpoint has another identity, and ``StorageUnavailable``.
        """
        self.background.finish(tolerate=True)
        refused: list[str] = []
        for name in self._on_rank_0(self.home.checkpoints):
            if not accept(name):
                continue
            candidate = Candidate(self.home.storage, name)
            try:
                with open_checkpoint(candidate, self.peers, self._policy) as checkpoint:
                    forget = self._state.initialize()
                    try:
                        return self._load(candidate, checkpoint, into, tuple(refused))
                    except BaseException:
                        forget()
                        raise
            except SkippedCheckpoint:
                continue
            except (DamagedArtifact, MissingObject) as error:
                refused.append(f"{candidate.uri} is damaged ({error.message})")
                if self.peers.rank == 0:
                    LOG.warning("%s; training looks for an older checkpoint", refused[-1])
        return None

    def _load(
        self, candidate: Candidate, checkpoint: OpenCheckpoint, into: object, refused: tuple[str, ...]
    ) -> RestoredCheckpoint:
        artifact = checkpoint.artifact
        index = read_index(artifact.directory)
        check_index(index, artifact.files, candidate.uri)
        stored, ranks = read_states(artifact, candidate.uri)
        if stored["parts"].keys() != self._state.parts.keys():
            there, here = (", ".join(sorted(parts)) or "nothing" for parts in (stored["parts"], self._state.parts))
            raise UserError(
                f"{candidate.uri}: holds the state of {there} besides the model's, this code has {here}; resume with "
                "the same settings and code, or start afresh with training.resume=never"
            )
        live = restorable_tensors(self._tree(into)[1], index)
        forms: dict[str, TensorForm] = {}
        for of_rank in self.peers.gather({name: tensor_form(tensor) for name, tensor in live.items()}):
            forms |= of_rank
        check_tensors(candidate, index, forms)
        # This rank skips tensors that only other ranks hold, or that no rank holds. Without ``into``, all ranks read
        # the tensors of the progress.
        unknown = {name for name in index.keys() - forms.keys() if into is None and name.startswith("progress/")}
        tensors = {
            name: live[name] if name in live else torch.empty(entry.size, dtype=getattr(torch, entry.dtype))
            for name, entry in index.items()
            if name in live or name in unknown
        }
        checkpoint.bring(pieces_read(tensors, index))
        # All digests are checked: from here on no damage can be found.
        dcp.load(
            tensors,
            storage_reader=ShardReader(artifact.directory, index),
            planner=load_planner(),
            process_group=self.peers.group,
            no_dist=self.peers.group is None,
        )
        # Tensors were filled in place; this loads the numbers.
        tree = join_tensors(stored, tensors)
        self._state.load_state_dict(tree)
        same = rank_section(artifact.made_by) == self._policy.ranks(self.peers.world)
        if same:
            restore_random_state(ranks[self.peers.rank].random)
        rank_states = tuple(rank.own for rank in ranks)
        trained_by, modules = (artifact.made_by.get(name) for name in ("trained_by", "code"))
        trained = tuple(map(str, trained_by)) if isinstance(trained_by, list) else ()
        self._publisher.made_by = self._policy.made_by(trained)
        return RestoredCheckpoint(
            artifact.made_by["step"],
            tree["progress"],
            rank_states,
            candidate.uri,
            same,
            refused,
            trained,
            modules if isinstance(modules, dict) else {},
        )


def read_states(artifact: Artifact, uri: str) -> tuple[dict[str, Any], list[RankState]]:
    """Return the shared state, and the state of every rank, from the checkpoint at ``uri``.

    Raises ``DamagedArtifact``.
    """
    shared: dict[str, Any] = from_json(artifact.read_bytes(STATE), dict[str, Any], f"{uri}/{STATE}")
    files = map(rank_file, range(artifact.made_by["world"]))
    return shared, [from_json(artifact.read_bytes(file), RankState, f"{uri}/{file}") for file in files]
