"""Write a snapshot to storage and publish it as a checkpoint; runs in the background of the step loop."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from tasks.artifacts.format import (
    FORMAT,
    MANIFEST,
    Artifact,
    DamagedArtifact,
    FileRecord,
    canonical_json,
    hash_file,
)
from tasks.distributed.peers import Peers
from tasks.errors import UserError
from tasks.storage import Storage, StorageUnavailable, cannot_write
from tasks.train.checkpoint.layout import ATTEMPTS, LATEST, Name, Retention, newest_attempt
from tasks.train.checkpoint.shards import FileWriter, ShardWriter
from tasks.train.checkpoint.state_json import merge

KIND = "checkpoint"
#: Version of what a checkpoint holds; a newer one is refused.
CONTENT = 1
STATE = "state.json"

T = TypeVar("T")


class Superseded(RuntimeError):
    """A later attempt has started in the same home, so this process must stop."""


@dataclass(frozen=True)
class Snapshot:
    """One rank's part of a checkpoint; copies, so that the step loop cannot change them."""

    step: int
    best: bool
    tensors: Mapping[str, Tensor]
    #: The contents of ``state.json``, written by rank 0. Equal on all ranks, unless these hold different ``parts`` of
    #: the model; then those of all ranks are merged.
    state: Any
    #: The contents of ``rank-<rank>.json``: this rank's random generators and other state of this rank only.
    own: Any
    parts: bool = False


def run_and_gather(peers: Peers, work: Callable[[], T]) -> list[T]:
    """Run ``work`` on every rank and return the results of all ranks, in rank order.

    If it fails on some ranks, those raise their own error and the others the error of the lowest failed rank.
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
        raise mine[1] or failed
    return [value for value, _ in results]


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def ranks_of(made_by: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of the ranks that wrote the checkpoint: :meth:`.ResumePolicy.ranks`."""
    return {key: made_by[key] for key in ("world", "layout") if key in made_by}


@dataclass
class Publisher:
    """Writes the checkpoints of one attempt into one home. All ranks call the methods at the same point."""

    storage: Storage
    peers: Peers
    attempt: int
    #: What manifests say about the run: its identity and its id.
    made_by: Mapping[str, Any]
    #: What they say of the ranks: their number and their layout.
    ranks: Mapping[str, Any]
    retention: Retention
    #: The complete checkpoints in the home; only rank 0's list is used.
    present: list[Name] = field(default_factory=list)

    @property
    def staging_directory(self) -> Path:
        """This rank's local directory for files that are not stored yet."""
        return self.storage.scratch() / f"{staging_prefix(self.storage, self.peers.rank)}{self.attempt:04d}"

    def publish(self, snapshot: Snapshot) -> Name:
        """Store one checkpoint, and write its manifest once all ranks have stored their files.

        If a rank fails, all ranks raise: ``UserError``, ``StorageUnavailable``, ``Superseded``.
        """
        name = Name(self.attempt, snapshot.step, snapshot.best)
        directory = self.staging_directory / str(name)
        try:
            files = FileWriter(directory, {})
            self.write_tensors(files, snapshot)
            if snapshot.parts:
                snapshot = replace(snapshot, state=reduce(merge, self.peers.gather(snapshot.state)))
            stored = run_and_gather(self.peers, lambda: self.store(name, files, snapshot))
            records = {file: record for of_rank in stored for file, record in of_rank.items()}
            self.write_manifests(name, self.ranks, records)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return name

    def adopt(self, source: Storage, found: Name, artifact: Artifact) -> Name:
        """Copy the checkpoint ``found`` of another home into this one. ``artifact`` holds its manifest. Raises as
        :meth:`publish` does, and ``DamagedArtifact`` and ``MissingObject``."""
        name = Name(self.attempt, artifact.made_by["step"])
        directory = self.staging_directory / str(name)
        try:
            run_and_gather(self.peers, lambda: self.copy(source, found, artifact, name, directory))
            self.write_manifests(name, ranks_of(artifact.made_by), artifact.files)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        return name

    def copy(self, source: Storage, found: Name, artifact: Artifact, name: Name, directory: Path) -> None:
        """Copy this rank's share of the files, and verify them on the way."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for file in sorted(artifact.files)[self.peers.rank :: self.peers.world]:
                path = source.get(f"{found}/{file}", directory)
                # A local store gives the file itself.
                copied = path if path.is_relative_to(directory) else Path(shutil.copyfile(path, directory / file))
                if hash_file(copied).sha256 != artifact.files[file].sha256:
                    raise DamagedArtifact(f"{source.base}/{found}/{file}: its SHA-256 is not the manifest's")
                fsync(copied)
                self.storage.put(f"{name}/{file}", copied)
        except OSError as error:
            raise cannot_write(directory, error) from None

    def write_tensors(self, files: FileWriter, snapshot: Snapshot) -> None:
        """Write this rank's tensors, and on rank 0 the index of all tensors, into the staging directory."""
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
        """Write the JSON files and move all of this rank's files to the storage."""
        try:
            files.write(rank_file(self.peers.rank), [canonical_json(snapshot.own)])
            if self.peers.rank == 0:
                files.write(STATE, [canonical_json(snapshot.state)])
        except OSError as error:
            raise cannot_write(files.directory, error) from None
        for file in files.records:
            self.storage.put(f"{name}/{file}", files.directory / file)
        return files.records

    def write_manifests(self, name: Name, ranks: Mapping[str, Any], records: Mapping[str, FileRecord]) -> None:
        """Complete the checkpoint whose files all ranks have stored, written by these ``ranks``, and delete expired
        checkpoints."""
        made_by = {**self.made_by, "content": CONTENT, "step": name.step, "attempt": name.attempt, **ranks}
        files = {file: vars(record) for file, record in sorted(records.items())}
        manifest = canonical_json({"format": FORMAT, "kind": KIND, "made_by": made_by, "files": files})
        run_and_gather(self.peers, lambda: self.write_manifest(name, manifest) if self.peers.rank == 0 else None)
        self.present.append(name)
        if self.peers.rank == 0:
            self.delete_expired()

    def write_manifest(self, name: Name, manifest: bytes) -> None:
        """Write the manifest, which completes the checkpoint, and ``latest.json``, which points to it."""
        self.check_fence()
        self.storage.put(f"{name}/{MANIFEST}", manifest)
        # Again, because ``latest.json`` must not point back if a later attempt has started meanwhile.
        self.check_fence()
        digest = hashlib.sha256(manifest).hexdigest()
        pointer = {"checkpoint": str(name), "attempt": name.attempt, "step": name.step, "manifest_sha256": digest}
        self.storage.put(LATEST, canonical_json(pointer))

    def check_fence(self) -> None:
        """Raise ``Superseded`` if a later attempt has started."""
        newest = newest_attempt(self.storage.list(ATTEMPTS))
        if newest > self.attempt:
            raise Superseded(f"{self.storage.base}: attempt {newest} works here now; attempt {self.attempt} stops")

    def delete_expired(self) -> None:
        """Delete the checkpoints that are not retained. If the store is unavailable, the next save tries again."""
        for name in self.retention.expired(self.present):
            with suppress(UserError, StorageUnavailable):
                delete(self.storage, name)
                self.present.remove(name)


def delete(storage: Storage, name: Name) -> None:
    """Delete a checkpoint, the manifest first, so that a partly deleted one is not complete."""
    storage.delete([f"{name}/{MANIFEST}"])
    storage.delete(storage.list(f"{name}/"))


def fsync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def staging_prefix(storage: Storage, rank: int) -> str:
    home = hashlib.sha256(storage.base.encode()).hexdigest()[:12]
    return f"checkpoint-{home}-r{rank:05d}-a"


def remove_stale_staging(publisher: Publisher) -> None:
    """Remove the staging directories that earlier attempts of this rank left on this machine."""
    prefix = staging_prefix(publisher.storage, publisher.peers.rank)
    for directory in publisher.storage.scratch().glob(f"{prefix}*"):
        number = directory.name.removeprefix(prefix)
        if number.isdigit() and int(number) < publisher.attempt:
            with suppress(OSError):
                shutil.rmtree(directory)
