"""Publication of a snapshot as a checkpoint, while training continues."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from slipstream.pipeline.train.checkpoint.home import LATEST, CheckpointDirectory, CheckpointName, Retention, Superseded
from slipstream.pipeline.train.checkpoint.lease import Lease
from slipstream.pipeline.train.checkpoint.shards import FileWriter, ShardWriter
from slipstream.pipeline.train.checkpoint.state import merge_trees
from slipstream.shared.artifacts.format import FORMAT, MANIFEST, FileRecord, canonical_json
from slipstream.shared.artifacts.records import to_json
from slipstream.shared.distributed.process_group import Peers
from slipstream.shared.distributed.user_errors import AgreedUserError
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.storage import Storage, StorageUnavailable, writing_to
from slipstream.shared.storage.names import number_in_name

KIND = "checkpoint"
#: Version of the checkpoint format; a checkpoint with a higher version is refused.
CONTENT = 1
STATE = "state.json"

LOG = logger("checkpoint")

T = TypeVar("T")


@dataclass(frozen=True)
class RankState:
    """Contents of ``rank-<rank>.json``: the random generators and other state of one rank."""

    random: dict[str, Any]
    own: Any


@dataclass(frozen=True)
class CheckpointSnapshot:
    """One rank's part of a checkpoint, copied so that training cannot change it."""

    step: int
    tensors: Mapping[str, Tensor]
    #: Contents of ``state.json``, written by rank 0. If ``parts`` is True, the states of all ranks are merged first;
    #: otherwise they are equal.
    state: object
    rank_state: RankState
    #: True if ranks hold different parts of the model.
    parts: bool = False


def run_and_gather(peers: Peers, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return the results of all ranks, in rank order.

    If any rank fails, all ranks raise: a failed rank its own error, every other rank the error of the lowest failed
    rank. A plain ``UserError`` becomes an ``AgreedUserError``.
    """
    mine: tuple[T | None, Exception | None]
    try:
        mine = (work(), None)
    except (UserError, StorageUnavailable, Superseded) as error:
        mine = (None, error)
    except Exception as error:
        # Other ranks may not be able to unpickle the error itself.
        described = RuntimeError(f"rank {peers.rank}: {type(error).__name__}: {error}")
        described.__cause__ = error
        mine = (None, described)
    results = peers.gather(mine)
    failed = next((error for _, error in results if error is not None), None)
    if failed is not None:
        own = mine[1] or failed
        # Subclasses keep their type, for callers that catch them.
        raise AgreedUserError(own.message) if type(own) is UserError else own
    return [cast(T, value) for value, _ in results]


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def is_rank_file(name: str) -> bool:
    return name.startswith("rank-") and name.endswith(".json")


def rank_section(made_by: Mapping[str, object]) -> dict[str, object]:
    """Return the rank section of a manifest's ``made_by``; see :meth:`.ResumePolicy.ranks`."""
    return {key: made_by[key] for key in ("world", "layout") if key in made_by}


@dataclass
class Publisher:
    """Writer of one attempt's checkpoints; all ranks call its methods at the same point."""

    home: CheckpointDirectory
    peers: Peers
    attempt: int
    #: This attempt's lease; None except on rank 0.
    lease: Lease | None
    #: Run section of the manifests: identity, execution and code.
    made_by: Mapping[str, Any]
    #: Rank section of the manifests: number and layout of the ranks.
    ranks: Mapping[str, object]
    retention: Retention
    #: Complete checkpoints in the directory; only rank 0's list is used.
    present: list[CheckpointName] = field(default_factory=list)
    #: Local directory for files that are not stored yet, private to this rank.
    staging_directory: Path = field(init=False)
    #: Number of expired checkpoints when it was last logged that they cannot be deleted.
    warned: int = 0

    def __post_init__(self) -> None:
        """Create the staging directory.

        All ranks raise ``UserError`` if any rank cannot write its staging files.
        """
        self.staging_directory = run_and_gather(self.peers, self.make_staging)[self.peers.rank]

    def make_staging(self) -> Path:
        """Return a new staging directory; delete those of this rank's earlier attempts on this machine."""
        scratch, prefix = self.storage.scratch(), staging_prefix(self.storage, self.peers.rank)
        for directory in scratch.glob(f"{prefix}*"):
            number = number_in_name(directory.name.removeprefix(prefix).partition("-")[0], 4)
            if number is not None and number < self.attempt:
                with suppress(OSError):
                    shutil.rmtree(directory)
        with writing_to(scratch):
            return Path(tempfile.mkdtemp(prefix=f"{prefix}{self.attempt:04d}-", dir=scratch))

    @property
    def storage(self) -> Storage:
        return self.home.storage

    def publish(self, snapshot: CheckpointSnapshot, staged: Callable[[], object] = lambda: None) -> CheckpointName:
        """Store one checkpoint, and write its manifest once all ranks have stored their files.

        Calls ``staged`` once the snapshot's tensors are no longer needed, before any upload. If a rank fails, all ranks
        raise ``UserError``, ``StorageUnavailable`` or ``Superseded``.
        """
        name = CheckpointName(self.attempt, snapshot.step)
        directory = self.staging_directory / str(name)
        try:
            files = FileWriter(directory, {})
            self.write_tensors(files, snapshot)
            if snapshot.parts:
                snapshot = replace(snapshot, state=reduce(merge_trees, self.peers.gather(snapshot.state)))
            run_and_gather(self.peers, lambda: self.stage(name, files, snapshot, staged))
            stored = run_and_gather(self.peers, lambda: self.store(name, files))
            self.complete(name, {file: record for of_rank in stored for file, record in of_rank.items()})
        finally:
            if self.lease is not None:
                self.lease.withdraw()
            shutil.rmtree(directory, ignore_errors=True)
        return name

    def write_tensors(self, files: FileWriter, snapshot: CheckpointSnapshot) -> None:
        """Write this rank's tensors, and on rank 0 the index of all tensors, into the staging directory."""
        try:
            dcp.save(
                dict(snapshot.tensors),
                storage_writer=ShardWriter(files, self.peers.rank),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self.peers.group,
                no_dist=self.peers.group is None,
            )
        except CheckpointException as failure:  # torch raises it on all ranks
            error = next(iter(failure.failures.values()))[0]
            raise AgreedUserError(error.message) if type(error) is UserError else error from failure

    def stage(
        self, name: CheckpointName, files: FileWriter, snapshot: CheckpointSnapshot, staged: Callable[[], object]
    ) -> None:
        """Write the JSON files to the staging directory, call ``staged``, and announce the checkpoint on rank 0."""
        files.write(rank_file(self.peers.rank), [to_json(snapshot.rank_state)])
        if self.peers.rank == 0:
            files.write(STATE, [canonical_json(snapshot.state)])
        staged()
        if self.lease is not None:
            self.lease.announce(name)

    def store(self, name: CheckpointName, files: FileWriter) -> dict[str, FileRecord]:
        """Move all of this rank's staged files to the storage."""
        for file in files.records:
            self.storage.put(f"{name}/{file}", files.directory / file)
        return files.records

    def complete(self, name: CheckpointName, records: Mapping[str, FileRecord]) -> None:
        """Write the manifest once all ranks have stored their files, and delete expired checkpoints."""
        made_by = {**self.made_by, "content": CONTENT, "step": name.step, "attempt": name.attempt, **self.ranks}
        files = {file: vars(record) for file, record in sorted(records.items())}
        manifest = canonical_json({"format": FORMAT, "kind": KIND, "made_by": made_by, "files": files})
        run_and_gather(self.peers, lambda: self.write_manifest(name, manifest) if self.lease is not None else None)
        self.present.append(name)
        if self.lease is not None:
            self.lease.saved(name)
            self.point_to(name, manifest)

    def write_manifest(self, name: CheckpointName, manifest: bytes) -> None:
        """Write the manifest, which completes the checkpoint.

        Raises ``Superseded`` if a successor, which waits only for a limited time, listed the checkpoints to restore
        before this manifest was there.
        """
        if not self.home.is_inherited(self.attempt):
            self.storage.put(f"{name}/{MANIFEST}", manifest)
        if self.home.is_inherited(self.attempt) and name not in self.home.checkpoints():
            raise Superseded(
                f"{self.storage.base}: a later attempt has taken over this checkpoint directory; attempt "
                f"{self.attempt} stops"
            )

    def point_to(self, name: CheckpointName, manifest: bytes) -> None:
        """Write ``latest.json``, which points to the checkpoint, and delete expired checkpoints.

        If the store is unavailable, the next save repeats both. Does nothing if a successor has started, which then
        owns the directory.
        """
        digest = hashlib.sha256(manifest).hexdigest()
        pointer = {"checkpoint": str(name), "attempt": name.attempt, "step": name.step, "manifest_sha256": digest}
        with suppress(StorageUnavailable, Superseded):
            self.home.check_claim(self.attempt)
            try:
                self.storage.put(LATEST, canonical_json(pointer))
                for expired in self.retention.expired(self.present):
                    # The manifest first, so that a partly deleted checkpoint is not complete.
                    self.storage.delete([f"{expired}/{MANIFEST}"])
                    self.storage.delete(self.storage.list(f"{expired}/"))
                    self.present.remove(expired)
                self.warned = 0
            except UserError as error:
                self.warn(error)

    def warn(self, error: UserError) -> None:
        """Log a warning that expired checkpoints remain, repeated when their number has more than doubled."""
        left = len(self.retention.expired(self.present))
        if left > 2 * self.warned:
            self.warned = left
            stay = (
                "1 expired checkpoint could not be deleted"
                if left == 1
                else f"{left} expired checkpoints could not be deleted"
            )
            LOG.warning("%s: %s; training continues (%s)", self.storage.base, stay, error)


def staging_prefix(storage: Storage, rank: int) -> str:
    home = hashlib.sha256(storage.base.encode()).hexdigest()[:12]
    return f"checkpoint-{home}-r{rank:05d}-a"
