"""Artifacts as Flyte types, one for each kind, so that a task cannot get an artifact of another kind.

The kind is the format of Flyte's blob. The backend compares formats when a workflow is registered. flytekit compares
them neither when it compiles a workflow nor when it calls a task; :class:`ArtifactOf` does so in local runs and in
pods. A directory without a format, such as a user's own, is accepted as any kind. Directories inside a dataclass, such
as the results of map tasks, have no format.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, NamedTuple

from flytekit import FlyteContext, HashMethod
from flytekit.core.type_engine import TypeTransformerFailedError
from flytekit.models.literals import Literal
from flytekit.models.types import LiteralType
from flytekit.types.directory import FlyteDirectory
from flytekit.types.directory.types import FlyteDirToMultipartBlobTransformer

from slipstream.artifacts.format import LONGEST_MANIFEST, MANIFEST, Manifest
from slipstream.stages import StageRun
from slipstream.storage import read_below


class ArtifactOf(FlyteDirToMultipartBlobTransformer):
    """flytekit's transformer of directories, for artifacts of one stage."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage

    def get_literal_type(self, t: type[FlyteDirectory]) -> LiteralType:
        return LiteralType(blob=self._blob_type(self.stage))

    def get_format(self, t: type[FlyteDirectory]) -> str:
        return self.stage

    async def async_to_python_value(
        self, ctx: FlyteContext, lv: Literal, expected_python_type: type[FlyteDirectory]
    ) -> FlyteDirectory:
        given = lv.scalar.blob.metadata.type.format if lv.scalar and lv.scalar.blob else ""
        if given not in ("", self.stage):
            raise TypeTransformerFailedError(f"artifact: is of the stage {given!r}; expected the stage {self.stage!r}")
        return await super().async_to_python_value(ctx, lv, expected_python_type)


def fingerprint_of(directory: FlyteDirectory) -> str:
    """Return the value for Flyte's cache key: the artifact's content, not its location or the code that made it."""
    path = Path(directory.path)
    if not (path / MANIFEST).exists():
        return uri_of(directory)
    return Manifest.parse(read_below(str(path), MANIFEST, LONGEST_MANIFEST), path / MANIFEST).content


def uri_of(directory: FlyteDirectory) -> str:
    """Return where the artifact lies: an address in a store, or a path on this machine."""
    return str(directory.remote_source or directory.path)


BY_CONTENT = HashMethod(fingerprint_of)
Prepared = Annotated[FlyteDirectory, ArtifactOf("prepare"), BY_CONTENT]
Trained = Annotated[FlyteDirectory, ArtifactOf("train"), BY_CONTENT]
Evaluated = Annotated[FlyteDirectory, ArtifactOf("evaluate"), BY_CONTENT]
Exported = Annotated[FlyteDirectory, ArtifactOf("export"), BY_CONTENT]
#: A listing of the raw data, or a partial result of pods that prepare one table.
Part = Annotated[FlyteDirectory, BY_CONTENT]


class Made(NamedTuple):
    """A stage's artifact and its run. Tasks declare the artifact's kind by one of the types below."""

    artifact: FlyteDirectory
    run: StageRun


class MadePrepared(NamedTuple):
    artifact: Prepared
    run: StageRun


class MadeTrained(NamedTuple):
    artifact: Trained
    run: StageRun


class MadeEvaluated(NamedTuple):
    artifact: Evaluated
    run: StageRun


class MadeExported(NamedTuple):
    artifact: Exported
    run: StageRun


@dataclasses.dataclass(frozen=True)
class MadeByElement:
    """:class:`Made` as the single output that an element of a map task may have."""

    artifact: FlyteDirectory
    run: StageRun

    @classmethod
    def of(cls, made: Made) -> MadeByElement:
        return cls(*made)
