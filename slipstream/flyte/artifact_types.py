"""Flyte types of artifacts, one per stage, so that a task cannot get another stage's artifact.

The stage is the format of Flyte's blob. The backend compares formats when a workflow is registered. flytekit compares
them neither when it compiles a workflow nor when it calls a task; :class:`ArtifactOf` does so in local runs and in
pods. A directory without a format, such as a user's own, is accepted for any stage. Directories inside a dataclass,
such as results of map tasks, have no format.
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

from slipstream.shared.artifacts.format import LONGEST_MANIFEST, MANIFEST, Manifest
from slipstream.shared.stages import StageRun
from slipstream.shared.storage import read_below


class ArtifactOf(FlyteDirToMultipartBlobTransformer):
    """flytekit type transformer for directories with an artifact of one stage."""

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


def artifact_fingerprint(directory: FlyteDirectory) -> str:
    """Return the artifact's contribution to Flyte's cache key.

    It is the digest of its content, independent of location and code version; the address if there is no manifest.
    """
    path = Path(directory.path)
    if not (path / MANIFEST).exists():
        return artifact_uri(directory)
    return Manifest.parse(read_below(str(path), MANIFEST, LONGEST_MANIFEST), path / MANIFEST).content


def artifact_uri(directory: FlyteDirectory) -> str:
    """Return the artifact's address in a store, or its path on this machine."""
    return str(directory.remote_source or directory.path)


BY_CONTENT = HashMethod(artifact_fingerprint)
Prepared = Annotated[FlyteDirectory, ArtifactOf("prepare"), BY_CONTENT]
Trained = Annotated[FlyteDirectory, ArtifactOf("train"), BY_CONTENT]
Evaluated = Annotated[FlyteDirectory, ArtifactOf("evaluate"), BY_CONTENT]
Exported = Annotated[FlyteDirectory, ArtifactOf("export"), BY_CONTENT]
#: Listing of the raw data, or partial result of a pod that prepares or scores part of a table.
Part = Annotated[FlyteDirectory, BY_CONTENT]


class Made(NamedTuple):
    """Artifact and run of a stage. Tasks return one of the subtypes below, which declare the stage."""

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
    """:class:`Made` as one dataclass, since an element of a map task has a single output."""

    artifact: FlyteDirectory
    run: StageRun

    @classmethod
    def of(cls, made: Made) -> MadeByElement:
        return cls(*made)
