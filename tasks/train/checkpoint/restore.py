"""Finding the newest checkpoint that is whole for every rank, and whether it is one of this run's kind."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.artifacts.format import FORMAT, MANIFEST, Artifact, DamagedArtifact
from tasks.distributed.peers import Peers
from tasks.errors import UserError
from tasks.storage import MissingObject, Storage
from tasks.train.checkpoint.layout import Name, whole
from tasks.train.checkpoint.publish import CONTENT, KIND, together


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that has a manifest; nothing else is known of it yet."""

    storage: Storage
    name: Name

    @property
    def uri(self) -> str:
        return f"{self.storage.base}/{self.name}"


class OtherRun(Exception):
    """A checkpoint that is to be left alone."""


@dataclass(frozen=True)
class Wanted:
    """What a checkpoint must be to be taken up."""

    identity: Mapping[str, Any]
    run: str
    resume: str

    def check(self, candidate: Candidate, manifest: Mapping[str, Any]) -> None:
        """Raise ``UserError`` if it is of another kind of run, ``OtherRun`` if it is not to be looked at."""
        made_by = manifest["made_by"]
        if self.resume == "never" and not (self.run and made_by.get("run") == self.run):
            raise OtherRun
        if manifest["format"] > FORMAT or made_by.get("content", 0) > CONTENT:
            raise UserError(
                f"{candidate.uri}: written by a newer version of this project (content {made_by.get('content')}, we "
                f"know {CONTENT}); update, or start afresh with training.resume=never"
            )
        difference = first_difference(made_by.get("identity", {}), self.identity)
        if difference:
            name, then, now = difference
            raise UserError(
                f"{candidate.uri}: was made with {name} {shown(then)}, this run has {shown(now)}; go on with the same "
                f"{name}, choose another checkpoint home, or start afresh with training.resume=never"
            )


def first_difference(then: Any, now: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """The dotted path of the first thing in which two nested mappings differ, with both values."""
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted({*then, *now}):
            found = first_difference(then.get(key), now.get(key), f"{path}.{key}" if path else str(key))
            if found:
                return found
        return None
    # A tuple comes back from JSON as a list.
    return None if json.dumps(then) == json.dumps(now) else (path, then, now)


def shown(value: Any) -> str:
    text = "unset" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def candidates(storages: list[Storage]) -> list[tuple[int, Name]]:
    """All checkpoints by number of the storage, the first storage's first, each newest first."""
    return [(index, name) for index, storage in enumerate(storages) for name in whole(storage.list("step-"))]


@contextmanager
def verified(candidate: Candidate, peers: Peers, wanted: Wanted) -> Iterator[Artifact]:
    """The checkpoint on this machine, checked to the last byte on every rank.

    Raises on all ranks alike: ``OtherRun``; ``DamagedArtifact`` or ``MissingObject`` if any rank found it damaged;
    ``UserError`` from :class:`Wanted`; ``StorageUnavailable``.
    """
    leader = peers.leader()
    with tempfile.TemporaryDirectory(prefix="checkpoint-", ignore_cleanup_errors=True) as temporary:
        places = together(peers, lambda: fetch(candidate, wanted, temporary) if peers.rank == leader else None)
        if places[leader] == "":
            raise OtherRun
        directory = Path(places[leader] or "")
        artifact = together_one(peers, directory)
        yield artifact
        # A leader's downloads must stay until all have read them.
        together(peers, lambda: None)


def fetch(candidate: Candidate, wanted: Wanted, temporary: str) -> str:
    """Bring the files here, once per machine; the directory they lie in, "" for a checkpoint to be left alone."""
    storage, target = candidate.storage, Path(temporary)
    path = storage.get(f"{candidate.name}/{MANIFEST}", target)
    try:
        manifest = json.loads(path.read_bytes())
        files = list(manifest["files"])
        wanted.check(candidate, manifest)
    except OtherRun:
        return ""
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, UserError):
            raise
        raise DamagedArtifact(f"{candidate.uri}/{MANIFEST}: not a manifest of this format") from None
    for file in files:
        storage.get(f"{candidate.name}/{file}", target)
    return str(path.parent)


def together_one(peers: Peers, directory: Path) -> Artifact:
    found: list[Artifact] = []
    together(peers, lambda: found.append(Artifact.open(directory, KIND).check_sha256()))
    return found[0]


def refusal(candidate: Candidate, error: DamagedArtifact | MissingObject) -> str:
    return f"{candidate.uri} is damaged ({error.message})"
