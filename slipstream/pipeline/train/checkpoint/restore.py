"""Selection and verified reading of the newest complete checkpoint that this run may resume from.

Each machine fetches and verifies only the byte ranges of the tensor files that its ranks read. The manifest has a
digest of every block. Blocks that several ranks of a machine read are fetched once, divided equally among them. Files
of a local store stay in place and are only verified.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory, CheckpointName
from slipstream.pipeline.train.checkpoint.publish import CONTENT, KIND, STATE, is_rank_file, rank_file, run_and_gather
from slipstream.pipeline.train.checkpoint.shards import ByteRange, Index, holds_tensors
from slipstream.pipeline.train.config import first_difference
from slipstream.shared.artifacts.format import FORMAT, MANIFEST, Artifact, DamagedArtifact, FileRecord, Manifest
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.distributed.process_group import Peers
from slipstream.shared.errors import UserError
from slipstream.shared.settings import with_defaults
from slipstream.shared.storage import (
    STORES,
    ObjectInfo,
    Storage,
    StorageUnavailable,
    read_range,
    stat_object,
    storage_for,
)

#: Maximum bytes of a request.
RUN_BYTES = 8 << 20
#: Concurrent requests of a rank; the product with :data:`RUN_BYTES` bounds its memory for file contents.
REQUESTS = 8

T = TypeVar("T")


class BlockRange(NamedTuple):
    """Consecutive blocks of a file, numbered from ``first`` to ``end`` (exclusive)."""

    file: str
    first: int
    end: int


def needed_blocks(pieces: Iterable[ByteRange], files: Mapping[str, FileRecord]) -> list[BlockRange]:
    """Return the sorted, unique blocks that contain the byte ranges ``pieces``."""
    blocks: set[tuple[str, int]] = set()
    for file, start, size in pieces:
        if size:
            step = files[file].block_bytes
            blocks |= {(file, block) for block in range(start // step, (start + size - 1) // step + 1)}
    return merge_blocks(sorted(blocks))


def merge_blocks(blocks: Iterable[tuple[str, int]]) -> list[BlockRange]:
    """Merge sorted (file, block number) pairs into runs."""
    merged: list[BlockRange] = []
    for file, block in blocks:
        if merged and merged[-1].file == file and merged[-1].end == block:
            merged[-1] = merged[-1]._replace(end=block + 1)
        else:
            merged.append(BlockRange(file, block, block + 1))
    return merged


def blocks_to_fetch(needed: Iterable[list[BlockRange]], index: int, count: int) -> list[BlockRange]:
    """Return the blocks that the machine's rank number ``index``, of ``count`` ranks, fetches.

    ``needed`` lists the blocks that each of these ranks reads.
    """
    blocks = sorted({(file, block) for of_rank in needed for file, *span in of_rank for block in range(*span)})
    return merge_blocks(blocks[index * len(blocks) // count : (index + 1) * len(blocks) // count])


def split_requests(mine: Iterable[BlockRange], files: Mapping[str, FileRecord]) -> Iterator[BlockRange]:
    """Split runs into requests of at most :data:`RUN_BYTES`, but at least one block."""
    for run in mine:
        step = max(1, RUN_BYTES // files[run.file].block_bytes)
        for first in range(run.first, run.end, step):
            yield run._replace(first=first, end=min(first + step, run.end))


def fetch_blocks(uri: str, artifact: Artifact, mine: Iterable[BlockRange]) -> None:
    """Verify the blocks ``mine``; from a remote store, also write them into the artifact's files.

    Raises ``DamagedArtifact``, ``MissingObject``, ``StorageUnavailable``.
    """
    work = list(split_requests(mine, artifact.files))
    objects: dict[str, ObjectInfo] = {}
    for file in sorted({run.file for run in work}) if uri.startswith(STORES) else ():
        objects[file] = stat_object(f"{uri}/{file}")
        if objects[file].size != artifact.files[file].size:
            wrong = f"{objects[file].size} bytes, the manifest says {artifact.files[file].size}"
            raise DamagedArtifact(f"{uri}/{file}: {wrong}")

    def check_local(run: BlockRange) -> None:
        with unreadable_is_damaged(artifact), artifact.open_file(run.file) as source:
            read_verified(artifact, run, lambda start, end: (source.seek(start), source.read(end - start))[1])

    def copy(run: BlockRange) -> None:
        read = partial(read_range, objects[run.file])
        try:
            data = read_verified(artifact, run, read)
        except DamagedArtifact:
            # Read again: the bytes may have changed in transit, and a store's checksum covers only whole objects.
            data = read_verified(artifact, run, read)
        with artifact.path(run.file).open("r+b") as target:
            target.seek(run.first * artifact.files[run.file].block_bytes)
            target.write(data)

    with ThreadPoolExecutor(REQUESTS) as pool:
        for _ in pool.map(copy if objects else check_local, work):
            pass


def read_verified(artifact: Artifact, run: BlockRange, read: Callable[[int, int], bytes]) -> bytes:
    """Return the bytes of the blocks in ``run``, read by ``read(start, end)``.

    Raises ``DamagedArtifact`` unless they match the manifest.
    """
    record = artifact.files[run.file]
    step = record.block_bytes
    data = read(run.first * step, min(run.end * step, record.size))
    view = memoryview(data)
    for block in range(run.first, run.end):
        start = (block - run.first) * step
        artifact.check_block(run.file, block, view[start : start + step])
    return data


#: Dtype and shape of a tensor.
TensorForm = tuple[str, tuple[int, ...]]
#: Name prefixes of the tensors that training changes.
TRAINED = ("model/", "optimizer/", "parts/ema/")


@dataclass(frozen=True)
class Candidate:
    """Checkpoint whose manifest is not verified yet."""

    storage: Storage
    name: CheckpointName

    @property
    def uri(self) -> str:
        return f"{self.storage.base}/{self.name}"


class SkippedCheckpoint(Exception):
    """Raised if the resume policy excludes a checkpoint; an older one may be used."""


@dataclass(frozen=True)
class ResumePolicy:
    """Run section of new manifests, and policy for resuming from existing checkpoints."""

    #: Values that must equal the checkpoint's (model, data, seed, …), as nested mappings of JSON values.
    identity: Mapping[str, object]
    #: Code version of this process.
    version: str = ""
    #: Digest of every module.
    modules: Mapping[str, str] = field(default_factory=dict)
    #: Execution and Flyte attempt of this process.
    holder: Holder = Holder()
    #: With "never", only checkpoints of the same execution are used: retries resume, other executions' checkpoints are
    #: ignored. With "same-code", only checkpoints that were trained by this code version alone are used.
    resume: str = "auto"
    #: Values to assume for settings that are absent from an identity, because an older release wrote it.
    defaults: Mapping[str, object] = field(default_factory=dict)
    #: Dotted paths in an identity that are not compared.
    ignored: Collection[str] = ()
    #: Sizes of the parallel dimensions, if ranks hold different parts of the model. A run continues bit for bit only
    #: under the same layout.
    layout: Sequence[int] = ()
    #: Number of this attempt, whose own checkpoints are used even with "never"; set by ``Checkpoints``.
    attempt: int = 0
    #: Seconds for which an earlier attempt may continue after its preemption notice.
    grace_s: float = 30.0

    def made_by(self, trained_by: Sequence[str]) -> dict[str, object]:
        """Return the run section of manifests; ``trained_by`` are the code versions that trained before this one."""
        versions = list(dict.fromkeys([*trained_by, self.version]))
        return {
            "identity": self.identity,
            "run": self.holder.execution,
            "code": self.modules,
            "trained_by": versions,
        }

    def ranks(self, world: int) -> dict[str, object]:
        """Return the rank section of a manifest for a run of ``world`` ranks."""
        return {"world": world} | ({"layout": list(self.layout)} if self.layout else {})

    def uses(self, name: CheckpointName, made_by: Mapping[str, object]) -> bool:
        """Return True if this policy allows resuming from ``name``, assuming an equal identity."""
        if self.resume == "same-code":
            return made_by.get("trained_by") == [self.version]
        run = self.holder.execution
        ours = name.attempt == self.attempt or (run and made_by.get("run") == run)
        return self.resume != "never" or bool(ours)

    def check(self, candidate: Candidate, manifest: Manifest) -> None:
        """Check a candidate's manifest.

        Raises ``UserError`` if its identity differs or its format is newer, ``SkippedCheckpoint`` if the policy ignores
        it, and ``DamagedArtifact`` if it is not the manifest of this checkpoint.
        """
        made_by, written_by = manifest.made_by, manifest.format
        content, place = made_by.get("content", 0), (made_by.get("step"), type(made_by.get("world")))
        if not isinstance(written_by, int) or not isinstance(content, int) or place != (candidate.name.step, int):
            raise DamagedArtifact(f"{candidate.uri}/{MANIFEST}: is not the manifest of a checkpoint of this step")
        world, ranks = made_by["world"], sum(map(is_rank_file, manifest.files))
        if ranks != world or rank_file(world - 1) not in manifest.files:
            raise DamagedArtifact(f"{candidate.uri}/{MANIFEST}: lists the files of {ranks} ranks, but {world} wrote it")
        if not self.uses(candidate.name, made_by):
            raise SkippedCheckpoint
        if written_by > FORMAT or content > CONTENT:
            raise UserError(
                f"{candidate.uri}: written by a newer version of this project (content {content}; this version reads "
                f"{CONTENT}); update, or start afresh with training.resume=never"
            )
        then, now = (with_defaults(self.defaults, each) for each in (made_by.get("identity", {}), self.identity))
        difference = first_difference(then, now, ignored=self.ignored)
        if difference:
            name, theirs, ours = difference
            raise UserError(
                f"{candidate.uri}: was made with {name} {abbreviated(theirs)}, this run has {abbreviated(ours)}; "
                f"continue with the same {name}, choose another checkpoint directory, or start afresh with "
                "training.resume=never"
            )


def abbreviated(value: object) -> str:
    """Return a value as JSON, cut to 60 characters; "unset" for None."""
    text = "unset" if value is None else json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def newest_usable(
    address: str, holder: Holder, resume: str, version: str
) -> tuple[CheckpointDirectory, CheckpointName, Mapping[str, Any]] | None:
    """Return the newest checkpoint that ``holder`` may resume from, with its run section; None if there is none.

    ``resume`` is the setting ``training.resume``, ``version`` a code version. The later restore reports errors.
    """
    policy, home = (
        ResumePolicy({}, holder=holder, resume=resume, version=version),
        CheckpointDirectory(storage_for(address)),
    )
    with suppress(StorageUnavailable):
        for name in home.checkpoints():
            content = home.read_bytes(f"{name}/{MANIFEST}")
            with suppress(DamagedArtifact):
                made_by = Manifest.parse(content or b"", name).made_by
                if policy.uses(name, made_by):
                    return home, name, made_by
    return None


def newest_identity(address: str, holder: Holder, resume: str, version: str) -> Mapping[str, Any] | None:
    """Return the identity of :func:`newest_usable`; None if there is none."""
    newest = newest_usable(address, holder, resume, version)
    identity = newest[2].get("identity") if newest else None
    return identity if isinstance(identity, dict) else None


def newest_conditions(address: str, holder: Holder, resume: str, version: str) -> Mapping[str, Any] | None:
    """Return the conditions of bitwise equality of :func:`newest_usable`; None if there is none."""
    if (newest := newest_usable(address, holder, resume, version)) is None:
        return None
    home, name, _ = newest
    with suppress(StorageUnavailable, DamagedArtifact):
        state: dict[str, Any] = from_json(home.read_bytes(f"{name}/{STATE}") or b"", dict[str, Any], name)
        conditions = state.get("progress", {}).get("conditions")
        return conditions if isinstance(conditions, dict) else {}
    return {}


@dataclass(frozen=True)
class OpenCheckpoint:
    """Checkpoint on this machine; all files but the tensor files are present and verified.

    :meth:`bring` fetches the tensors that are needed.
    """

    uri: str
    artifact: Artifact
    peers: Peers
    #: Ranks of this machine.
    neighbours: Sequence[int]

    def bring(self, pieces: Iterable[ByteRange]) -> None:
        """Fetch and verify the byte ranges of the tensor files that this rank reads.

        All ranks must call this, and all raise the same error: ``DamagedArtifact``, ``MissingObject``,
        ``StorageUnavailable``.
        """
        needed = self.peers.gather(needed_blocks(pieces, self.artifact.files))
        index, count = self.neighbours.index(self.peers.rank), len(self.neighbours)
        mine = blocks_to_fetch([needed[rank] for rank in self.neighbours], index, count)
        run_and_gather(self.peers, lambda: fetch_blocks(self.uri, self.artifact, mine))


@contextmanager
def open_checkpoint(candidate: Candidate, peers: Peers, policy: ResumePolicy) -> Iterator[OpenCheckpoint]:
    """Yield the checkpoint, which stays on this machine's disk while the context lasts.

    All ranks raise the same error: ``SkippedCheckpoint`` or ``UserError`` by the policy, ``DamagedArtifact`` or
    ``MissingObject`` if any rank found damage, ``StorageUnavailable``.
    """
    neighbours = peers.neighbours()
    leader = neighbours[0]
    with tempfile.TemporaryDirectory(prefix="checkpoint-", ignore_cleanup_errors=True) as temporary:
        directories = run_and_gather(
            peers, lambda: download_checkpoint(candidate, policy, temporary) if peers.rank == leader else None
        )
        if directories[leader] == "":
            raise SkippedCheckpoint
        directory = Path(directories[leader] or "")
        yield OpenCheckpoint(candidate.uri, open_verified(peers, directory), peers, neighbours)
        # Wait for all ranks: the leader's temporary directory must exist until they have read it.
        run_and_gather(peers, lambda: None)


def download_checkpoint(candidate: Candidate, policy: ResumePolicy, temporary: str) -> str:
    """Download a checkpoint's files, with empty tensor files of the right size; return their directory.

    Called on one rank per machine. Returns "" if the policy skips the checkpoint.
    """
    storage, target = candidate.storage, Path(temporary)
    path = storage.get(f"{candidate.name}/{MANIFEST}", target)
    manifest = Manifest.parse(path.read_bytes(), f"{candidate.uri}/{MANIFEST}")
    try:
        policy.check(candidate, manifest)
    except SkippedCheckpoint:
        return ""
    for file, record in manifest.files.items():
        if holds_tensors(file) and candidate.uri.startswith(STORES):
            with (path.parent / file).open("xb") as empty:
                empty.truncate(record.size)  # takes no space until its bytes are written
        else:
            storage.get(f"{candidate.name}/{file}", target)
    return str(path.parent)


@contextmanager
def unreadable_is_damaged(artifact: Artifact) -> Iterator[None]:
    """Raise read errors as ``DamagedArtifact``, so that an older checkpoint is tried."""
    try:
        yield
    except OSError as error:
        raise DamagedArtifact(f"{artifact.directory}: cannot be read ({error.strerror or error})") from None


def open_verified(peers: Peers, directory: Path) -> Artifact:
    """Open the checkpoint in ``directory`` and verify all files except tensor files.

    All ranks raise if any rank finds damage.
    """
    artifacts: list[Artifact] = []

    def check() -> None:
        with unreadable_is_damaged(artifact := Artifact.open(directory, KIND)):
            artifacts.append(artifact.check_sha256([file for file in artifact.files if not holds_tensors(file)]))

    run_and_gather(peers, check)
    return artifacts[0]


def restorable_tensors(live: Mapping[str, T], index: Index) -> dict[str, T]:
    """Return ``live`` without the optimiser state of parameters that have none in the checkpoint.

    Such parameters had received no gradient when the checkpoint was written.
    """
    state = "optimizer/state/"
    stepped = {name.rpartition("/")[0] for name in index if name.startswith(state)}
    return {n: item for n, item in live.items() if not n.startswith(state) or n.rpartition("/")[0] in stepped}


def check_tensors(candidate: Candidate, index: Index, live: Mapping[str, TensorForm]) -> None:
    """Raise ``UserError`` unless the training state's tensors have the checkpoint's names, shapes and dtypes.

    ``live`` holds the tensors of all ranks.
    """
    then = {name: (entry.dtype, tuple(entry.size)) for name, entry in index.items() if name.startswith(TRAINED)}
    now = {name: form for name, form in live.items() if name.startswith(TRAINED)}
    for name in sorted({*then, *now}):
        if then.get(name) != now.get(name):
            there, here = (described(forms.get(name)) for forms in (then, now))
            raise UserError(
                f"{candidate.uri}: holds another model: {name} is {there} there and {here} here; resume with the same "
                "model and code, or start afresh with training.resume=never"
            )


def tensor_form(tensor: Tensor) -> TensorForm:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def described(form: TensorForm | None) -> str:
    return f"{form[0]} {form[1]}" if form else "absent"
