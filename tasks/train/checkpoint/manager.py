"""The one place that writes and reads checkpoints.

::

    checkpoints = Checkpoints(home, model=ddp, optimizer=optimizer, parts={"scaler": scaler}, identity={"seed": 0})
    restored = checkpoints.restore()              # None: start afresh
    checkpoints.prepare(progress)                 # before the first step: plans who writes what, touches the buffers
    ...
    checkpoints.save(step, progress)              # returns as soon as the snapshot is taken
    ...
    checkpoints.finish()                          # waits until the last one is published

All ranks call every method side by side. ``progress`` is any nesting of dictionaries, lists, numbers, text and tensors
that are the same on all ranks: stream position, metrics history, ledger, best weights. The model, the optimiser and the
``parts`` (scheduler, scaler, EMA: anything with ``state_dict`` and ``load_state_dict``) are read when a snapshot is
taken and set when one is restored; the random generators of every rank too. Nothing here draws a random number.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tasks.artifacts.format import Artifact, DamagedArtifact, canonical_json
from tasks.distributed.peers import Peers
from tasks.errors import UserError
from tasks.storage import AlreadyThere, MissingObject, Storage, StorageUnavailable, storage_for
from tasks.train.checkpoint.layout import ATTEMPTS, Keep, Name, attempt_key, newest_attempt, unfinished, whole
from tasks.train.checkpoint.publish import (
    STATE,
    Publisher,
    Snapshot,
    rank_file,
    together,
    workplace_prefix,
)
from tasks.train.checkpoint.random_state import capture, put_back
from tasks.train.checkpoint.restore import Candidate, OtherRun, Wanted, candidates, refusal, verified
from tasks.train.checkpoint.shards import ShardReader, read_index
from tasks.train.checkpoint.staging import Buffers, Shape, owners, shapes_of, stepped
from tasks.train.checkpoint.state_json import join, split

#: So many saves in a row may fail before training stops: a disk may be cleared, a store come back.
FAILURES_BORNE = 2


class Stateful(Protocol):
    """A part of the training state that keeps itself in a dictionary."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True)
class Restored:
    """What a run goes on from. ``source`` is the checkpoint's URI; ``refused`` says what was damaged, and how.

    ``owns`` holds what each of the ranks that wrote it gave as its own, in their order. With as many ranks now the run
    goes on bit for bit (``same_world``); otherwise the random generators are this run's own, and only the samples and
    their order are the same.
    """

    step: int
    progress: Any
    owns: tuple[Any, ...]
    source: str
    same_world: bool
    refused: tuple[str, ...]


class Checkpoints:
    """The checkpoints of one attempt of one run.

    ``home`` and ``previous`` are directories or ``s3://`` prefixes that all ranks see: new checkpoints go to ``home``;
    those of ``previous`` (Flyte's prefix of the attempt before; may be empty, or not exist) are only read.
    ``identity`` is what has to be equal for a checkpoint to be continued (model, data, seed, …), as nested mappings of
    JSON values. With ``resume="never"`` only checkpoints of the same ``run`` (an execution's id) are taken up, so that
    its retries go on while everything older is left alone. Raises ``UserError`` if ``home`` cannot be written.
    """

    def __init__(
        self,
        home: str,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        parts: Mapping[str, Stateful] | None = None,
        identity: Mapping[str, Any],
        previous: str = "",
        run: str = "",
        resume: str = "auto",
        keep: Keep | None = None,
        timeout: timedelta = timedelta(minutes=10),
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._parts = dict(parts or {})
        self._wanted = Wanted(identity, run, resume)
        self._peers = Peers.meet(timeout)
        self.home = storage_for(home)
        other = previous and previous.rstrip("/") != home.rstrip("/")
        self.previous = storage_for(previous) if other else None
        self._sources = [self.home, self.previous] if self.previous else [self.home]
        # Once agreed, a home that cannot be written is found out here and not at the first save.
        attempt, present = self._peers_first(lambda: begin_attempt(self._sources))
        made_by = {"identity": identity, "run": run}
        self._publisher = Publisher(self.home, self._peers, attempt, made_by, keep or Keep(), present)
        sweep_workplaces(self._publisher)
        self._shapes: list[Shape] = []
        self._buffers: Buffers | None = None
        self._pending: Future[Name] | None = None
        self._copied = threading.Event()
        self._copied.set()
        self._waited = 0.0
        optimizer.register_step_pre_hook(self._hold_step)
        self._failures = 0
        #: Seconds from a snapshot to its publication, of the last one that succeeded; the same on all ranks.
        self.publish_seconds = 0.0
        #: The last checkpoint of this attempt that is published.
        self.published: Name | None = None

    @property
    def attempt(self) -> int:
        return self._publisher.attempt

    def _peers_first(self, work: Any) -> Any:
        return together(self._peers, lambda: work() if self._peers.rank == 0 else None)[0]

    def _tree(self, progress: Any) -> tuple[Any, dict[str, Tensor]]:
        return split(
            {
                "model": get_model_state_dict(self._model),
                "optimizer": get_optimizer_state_dict(self._model, self._optimizer),
                "parts": {name: part.state_dict() for name, part in self._parts.items()},
                "progress": progress,
            }
        )

    # Saving

    def prepare(self, progress: Any) -> None:
        """Plan who writes what and touch the buffers, so that the first save stalls no longer than the others."""
        fresh = not self._optimizer.state
        self._plan(self._tree(progress)[1])
        if fresh:
            # Looking at an optimiser's state makes torch create it, with its step counter at 1; the first real step
            # has to find what it would have found.
            self._optimizer.state.clear()

    def _plan(self, tensors: Mapping[str, Tensor]) -> Buffers:
        self._shapes = shapes_of(tensors)
        chosen = owners(self._peers.gather(self._shapes))
        self._buffers = Buffers(tensors, chosen, self._peers.rank)
        return self._buffers

    def save(self, step: int, progress: Any, *, own: Any = None, best: bool = False) -> float:
        """Take a snapshot after optimiser step ``step`` and publish it in the background; seconds of stall.

        What only the optimiser changes is copied in the background, too, and the optimiser's next step waits until that
        is done: :meth:`waited` says how long. Nothing else may change weights meanwhile.

        ``own`` is what this rank knows and the others do not (its share of a sum): numbers and text. ``best`` marks a
        checkpoint that stays until a better one is marked.

        Waits for the save before, if that is still under way. A save that fails is reported and borne twice; the third
        failure in a row raises it: ``StorageUnavailable`` or ``UserError``. ``Superseded`` is never borne.
        """
        started = time.perf_counter()
        self._collect(borne=FAILURES_BORNE)
        tree, tensors = self._tree(progress)
        if any(self._peers.gather(self._buffers is None or shapes_of(tensors) != self._shapes)):
            self._plan(tensors)
        assert self._buffers is not None
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        complete = self._buffers.stage(tensors, stepped(tensors, parameters, "optimizer/"))
        own = {"random": capture(), "own": own}
        self._copied.clear()
        self._pending = Future()

        def publish(outcome: Future[Name]) -> None:
            self._publish(lambda: Snapshot(step, best, complete(), tree, own), outcome)

        threading.Thread(target=publish, args=(self._pending,), name="checkpoint", daemon=True).start()
        return time.perf_counter() - started

    def _hold_step(self, *_: Any) -> None:
        """Let the optimiser's step begin when the snapshot under way no longer needs what it changes."""
        if not self._copied.is_set():
            started = time.perf_counter()
            self._copied.wait()
            self._waited += time.perf_counter() - started

    def waited(self) -> float:
        """For how many seconds optimiser steps waited for snapshots, since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _publish(self, take: Callable[[], Snapshot], outcome: Future[Name]) -> None:
        started = time.perf_counter()
        try:
            try:
                snapshot = take()
            finally:
                self._copied.set()
            name = self._publisher.publish(snapshot)
            self.publish_seconds = self._peers.from_first(time.perf_counter() - started)
        except BaseException as error:
            outcome.set_exception(error)
        else:
            outcome.set_result(name)

    def _collect(self, *, borne: int) -> None:
        """Wait for the save under way and take up how it went."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            self.published = pending.result()
            self._failures = 0
        except (UserError, StorageUnavailable) as error:
            self._failures += 1
            if self._failures > borne:
                raise
            if self._peers.rank == 0:
                print(f"checkpoint   not saved: {error}; going on, the next one tries again", file=sys.stderr)

    def busy(self) -> bool:
        """Whether a save is under way on this rank. Ranks may differ for a moment; decide together."""
        return self._pending is not None and not self._pending.done()

    def finish(self) -> Name | None:
        """Wait until the last save is published; its name. Raises what kept it from being so."""
        self._collect(borne=0)
        return self.published

    def close(self) -> None:
        """Let go of the process group and of scratch space. Does not wait for a save: :meth:`finish` does."""
        shutil.rmtree(self._publisher.workplace, ignore_errors=True)
        if self._peers.group is not None and not self.busy():
            dist.destroy_process_group(self._peers.group)

    # Restoring

    def restore(self) -> Restored | None:
        """Go on from the newest checkpoint that is whole for every rank; None if there is none to go on from.

        The home's come before those of ``previous``. Damaged ones are passed over by all ranks together and named, by
        rank 0 on stderr and in the result. One that came from ``previous`` is published in ``home`` before this
        returns: Flyte offers only the attempt before, and this one may die before its first save. Raises ``UserError``
        naming the first difference if the newest is of another kind of run, ``StorageUnavailable`` if it cannot be
        told.
        """
        refused: list[str] = []
        for index, name in self._peers_first(lambda: candidates(self._sources)):
            candidate = Candidate(self._sources[index], name)
            try:
                with verified(candidate, self._peers, self._wanted) as artifact:
                    restored = self._load(candidate, artifact, tuple(refused))
                    if index > 0:
                        self.published = self._publisher.adopt(artifact)
            except OtherRun:
                continue
            except (DamagedArtifact, MissingObject) as error:
                refused.append(refusal(candidate, error))
                if self._peers.rank == 0:
                    print(f"checkpoint   {refused[-1]}; looking for an older one", file=sys.stderr)
                continue
            return restored
        return None

    def _load(self, candidate: Candidate, artifact: Artifact, refused: tuple[str, ...]) -> Restored:
        index = read_index(artifact.directory)
        _, live = self._tree(None)
        together(self._peers, lambda: check_tensors(candidate, index, live))
        tensors = {
            name: live[name] if name in live else torch.empty(entry["size"], dtype=getattr(torch, entry["dtype"]))
            for name, entry in index.items()
        }
        dcp.load(
            tensors,
            storage_reader=ShardReader(artifact.directory, index),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=self._peers.group,
            no_dist=self._peers.group is None,
        )
        # The model's tensors were filled where they are; an optimiser also has to take its numbers.
        tree = join(json.loads(artifact.path(STATE).read_bytes()), tensors)
        set_optimizer_state_dict(self._model, self._optimizer, optim_state_dict=tree["optimizer"])
        for name, part in self._parts.items():
            part.load_state_dict(tree["parts"][name])
        ranks = [json.loads(artifact.path(rank_file(rank)).read_bytes()) for rank in range(artifact.made_by["world"])]
        same = len(ranks) == self._peers.world
        if same:
            put_back(ranks[self._peers.rank]["random"])
        owns = tuple(rank["own"] for rank in ranks)
        return Restored(artifact.made_by["step"], tree["progress"], owns, candidate.uri, same, refused)


def begin_attempt(sources: list[Storage]) -> tuple[int, list[Name]]:
    """Claim the next attempt number, and sweep what dead attempts left; with the whole checkpoints of the home.

    The home is the first of ``sources``; the numbers go on from those of the others.
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
    return attempt, whole(keys)


def sweep_workplaces(publisher: Publisher) -> None:
    """Remove what this rank's predecessors were writing on this machine when they died."""
    prefix = workplace_prefix(publisher.storage, publisher.peers.rank)
    for directory in publisher.storage.scratch().glob(f"{prefix}*"):
        number = directory.name.removeprefix(prefix)
        if number.isdigit() and int(number) < publisher.attempt:
            with contextlib.suppress(OSError):
                shutil.rmtree(directory)


def check_tensors(candidate: Candidate, index: Mapping[str, Any], live: Mapping[str, Tensor]) -> None:
    """Raise ``UserError`` unless the model's and the optimiser's tensors are the checkpoint's, in name and size."""
    then = {n: tuple(e["size"]) for n, e in index.items() if n.startswith(("model/", "optimizer/"))}
    now = {n: tuple(t.shape) for n, t in live.items() if n.startswith(("model/", "optimizer/"))}
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            raise UserError(
                f"{candidate.uri}: holds another model: {name} is {then.get(name, 'absent')} there and "
                f"{now.get(name, 'absent')} here; go on with the same model or start afresh with training.resume=never"
            )
