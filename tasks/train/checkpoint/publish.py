"""From a snapshot to a checkpoint that every rank has confirmed: the part that runs beside the step loop."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tasks.artifacts.format import FORMAT, MANIFEST, Artifact, FileRecord, canonical_json
from tasks.distributed.peers import Peers
from tasks.errors import UserError
from tasks.storage import Storage, StorageUnavailable, cannot_write
from tasks.train.checkpoint.layout import ATTEMPTS, LATEST, Keep, Name, newest_attempt
from tasks.train.checkpoint.shards import FileWriter, ShardWriter

KIND = "checkpoint"
#: Version of what a checkpoint holds; a newer one is refused.
CONTENT = 1
STATE = "state.json"

T = TypeVar("T")


class Superseded(RuntimeError):
    """A later attempt has begun to work in this home: this process is a leftover and must stop."""


@dataclass(frozen=True)
class Snapshot:
    """What one rank contributes to a checkpoint, copied out of the step loop's reach."""

    step: int
    best: bool
    tensors: Mapping[str, Tensor]
    #: What becomes ``state.json``; the same on all ranks, written by rank 0.
    state: Any
    #: What becomes ``rank-<rank>.json``: this rank's random generators and what else is this rank's alone.
    own: Any


def together(peers: Peers, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank; what each returned, or on all ranks the error of the first that failed."""
    mine: tuple[T | None, Exception | None]
    try:
        mine = (work(), None)
    except (UserError, StorageUnavailable, Superseded) as error:
        mine = (None, error)
    except Exception as error:
        # Others may not be able to unpickle it; what it says is what matters.
        spoken = RuntimeError(f"rank {peers.rank}: {type(error).__name__}: {error}")
        spoken.__cause__ = error
        mine = (None, spoken)
    answers = peers.gather(mine)
    failed = next((error for _, error in answers if error is not None), None)
    if failed is not None:
        raise mine[1] or failed
    return [value for value, _ in answers]


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


@dataclass
class Publisher:
    """Writes checkpoints of one attempt into one home. All ranks call :meth:`publish` side by side."""

    storage: Storage
    peers: Peers
    attempt: int
    #: What the manifest says of the run: its identity, its id.
    made_by: Mapping[str, Any]
    keep: Keep
    #: The whole checkpoints in the home; only rank 0's list is used.
    present: list[Name] = field(default_factory=list)

    @property
    def workplace(self) -> Path:
        """This rank's directory for files that are not stored yet."""
        return self.storage.scratch() / f"{workplace_prefix(self.storage, self.peers.rank)}{self.attempt:04d}"

    def publish(self, snapshot: Snapshot) -> Name:
        """Store one checkpoint and announce it once every rank's bytes are confirmed.

        Raises the same on all ranks: ``UserError``, ``StorageUnavailable``, ``Superseded``.
        """
        name = Name(self.attempt, snapshot.step, snapshot.best)
        directory = self.workplace / str(name)
        try:
            files = FileWriter(directory, {})
            self.write_tensors(files, snapshot)
            stored = together(self.peers, lambda: self.store(name, files, snapshot))
            records = {file: record for of_rank in stored for file, record in of_rank.items()}
            self.announce(name, self.peers.world, records)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return name

    def adopt(self, artifact: Artifact) -> Name:
        """Publish a checkpoint of another home here, as it is. Raises as :meth:`publish` does."""
        name = Name(self.attempt, artifact.made_by["step"])
        directory = self.workplace / str(name)
        try:
            together(self.peers, lambda: self.copy(name, artifact, directory))
            self.announce(name, artifact.made_by["world"], artifact.files)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return name

    def copy(self, name: Name, artifact: Artifact, directory: Path) -> None:
        """Store this rank's share of the files."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for file in sorted(artifact.files)[self.peers.rank :: self.peers.world]:
                taken = Path(shutil.copyfile(artifact.path(file), directory / file))
                sync(taken)
                self.storage.put(f"{name}/{file}", taken)
        except OSError as error:
            raise cannot_write(directory, error) from None

    def write_tensors(self, files: FileWriter, snapshot: Snapshot) -> None:
        try:
            with suppress(FileExistsError):
                files.directory.mkdir(parents=True)
            dcp.save(
                dict(snapshot.tensors),
                storage_writer=ShardWriter(files, self.peers.rank),
                planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=self.peers.group,
                no_dist=self.peers.group is None,
            )
        except CheckpointException as failure:
            error = next(iter(failure.failures.values()))[0]
            raise cannot_write(files.directory, error) if isinstance(error, OSError) else error from failure

    def store(self, name: Name, files: FileWriter, snapshot: Snapshot) -> dict[str, FileRecord]:
        try:
            files.write(rank_file(self.peers.rank), [canonical_json(snapshot.own)])
            if self.peers.rank == 0:
                files.write(STATE, [canonical_json(snapshot.state)])
        except OSError as error:
            raise cannot_write(files.directory, error) from None
        for file in files.records:
            self.storage.put(f"{name}/{file}", files.directory / file)
        return files.records

    def announce(self, name: Name, world: int, records: Mapping[str, FileRecord]) -> None:
        """Publish what all ranks have stored: the manifest makes it whole, ``latest.json`` points to it."""
        made_by = {**self.made_by, "content": CONTENT, "step": name.step, "attempt": name.attempt, "world": world}
        files = {file: vars(record) for file, record in sorted(records.items())}
        manifest = canonical_json({"format": FORMAT, "kind": KIND, "made_by": made_by, "files": files})
        together(self.peers, lambda: self.write_manifest(name, manifest) if self.peers.rank == 0 else None)
        self.present.append(name)
        if self.peers.rank == 0:
            self.retire()

    def write_manifest(self, name: Name, manifest: bytes) -> None:
        self.check_fence()
        self.storage.put(f"{name}/{MANIFEST}", manifest)
        # Once more: a later attempt may have begun meanwhile, and then its checkpoint is the latest.
        self.check_fence()
        digest = hashlib.sha256(manifest).hexdigest()
        pointer = {"checkpoint": str(name), "attempt": name.attempt, "step": name.step, "manifest_sha256": digest}
        self.storage.put(LATEST, canonical_json(pointer))

    def check_fence(self) -> None:
        newest = newest_attempt(self.storage.list(ATTEMPTS))
        if newest > self.attempt:
            raise Superseded(f"{self.storage.base}: attempt {newest} works here now; attempt {self.attempt} stops")

    def retire(self) -> None:
        """Remove what need not stay. A store that is away for a moment is no reason to fail: the next save tries."""
        for name in self.keep.dropped(self.present):
            with suppress(UserError, StorageUnavailable):
                remove(self.storage, name)
                self.present.remove(name)


def remove(storage: Storage, name: Name) -> None:
    """The manifest first: what is half removed must not look whole."""
    storage.delete([f"{name}/{MANIFEST}"])
    storage.delete(storage.list(f"{name}/"))


def sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def workplace_prefix(storage: Storage, rank: int) -> str:
    home = hashlib.sha256(storage.base.encode()).hexdigest()[:12]
    return f"checkpoint-{home}-r{rank:05d}-a"
