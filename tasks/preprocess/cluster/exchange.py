"""What one pod hands to the next while several prepare a table: a value and the files that it speaks of.

It is an artifact like any other. The value is pickled, by and for the same version of this code; it is not read before
its SHA-256 is the manifest's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tasks.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact, hash_file, link_or_copy
from tasks.preprocess.pool.resume import Workplace, workplace
from tasks.preprocess.pool.workers import Workers

KIND = "prepare.part"
VALUE = "value.pickle"
#: In a part with much data, the directory of a part with all that is said of it: it can be fetched alone.
SAID = "said"


def hand_over(directory: Path, value: Any, files: Iterable[Path] = ()) -> Artifact:
    """Write the part into the fresh ``directory``; ``files`` become its own, under their last names."""
    writer = ArtifactWriter(directory)
    for file in files:
        link_or_copy(file, directory / file.name)
    writer.write_bytes(VALUE, pickle.dumps(value, pickle.HIGHEST_PROTOCOL))
    return writer.finish(KIND, {})


def take_over(directory: Path) -> Any:
    """The value. Raises ``DamagedArtifact`` unless it and all files are what was handed over."""
    part = Artifact.open(directory, KIND).check()
    if hash_file(part.path(VALUE)).sha256 != part.files[VALUE].sha256:
        raise DamagedArtifact(f"{part.path(VALUE)}: its SHA-256 is not the manifest's")
    return pickle.loads(part.path(VALUE).read_bytes())


@contextmanager
def beside(result: Path, workers: int) -> Iterator[Workplace]:
    """A workplace on the disk of ``result``."""
    with (
        closing(Workers(workers)) as processes,
        workplace(result.with_name(f"{result.name}.work"), processes, lasting=False) as place,
    ):
        yield place
