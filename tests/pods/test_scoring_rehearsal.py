"""The packaged scoring on a rehearsed cluster: several pods, some of them lost, publish the bytes of one process."""

from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from flyteidl.core.literals_pb2 import Literal

from slipstream.config import RunConfig
from slipstream.operations.proofs.rehearsal.kills import LOSSES, Kill, Kills
from slipstream.operations.proofs.rehearsal.rehearsal import Rehearsal, literal, rehearsal
from slipstream.pipeline.score.publish import list_publications, read_manifest, verify_table
from slipstream.shared.artifacts.format import FileRecord
from slipstream.shared.artifacts.results.scoring import Publication
from slipstream.shared.profiles.profile import parse_profile
from tests.support.scoring import KEEP, in_shares, registry_with_model, write_files

WORKFLOW = "workflows.scoring.score"
PROFILE = {"stages": {"score": {"nodes": 2, "retries": 3}}}
FILES = 6


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with rehearsal(tmp_path_factory.mktemp("place"), parse_profile("two", PROFILE)) as made:
        yield made


@pytest.mark.prove
def test_pods_that_are_lost_publish_one_table_with_the_bytes_of_one_process(here: Rehearsal, tmp_path: Path) -> None:
    registry = registry_with_model(tmp_path / "made")
    data = large_files(tmp_path / "data")
    alone = in_shares(registry, data, tmp_path / "alone", 1)
    inputs = {
        "registry": literal(here.bucket.upload(tmp_path / "made/registry", "registry")),
        "data": literal(here.bucket.upload(data, "data")),
        "model": literal(""),
        "config": literal(RunConfig(scoring=KEEP)),
    }
    undisturbed = execute(here, "undisturbed", inputs, Kills())
    parts = parts_of(tmp_path / "alone", alone)
    assert len(parts) == 3 and parts_of(here.bucket.uri("scores-undisturbed"), undisturbed) == parts
    for turn, how in enumerate(LOSSES):
        kills = Kills([Kill(node, 0, 1 + turn % 2, how) for node in ("n0", "n1/0", "n1/2")] + [Kill("n2", 0, 1, how)])
        disturbed = execute(here, f"lost-{turn}", inputs, kills)
        assert len(kills.fired) == 4 and disturbed.manifest == undisturbed.manifest


def large_files(directory: Path) -> Path:
    """Write files larger than two parts together; most of it is an unused column."""
    write_files(directory, FILES, of_each=3000)
    for path in directory.iterdir():
        frame = pd.read_csv(path)
        frame["note"] = "x" * 9_000
        frame.to_csv(path, index=False)
    return directory


def parts_of(output: Path | str, publication: Publication) -> dict[str, FileRecord]:
    files = read_manifest(str(output), publication).files
    return {name: record for name, record in files.items() if name.startswith("part-")}


def execute(rehearsed: Rehearsal, name: str, inputs: dict[str, Literal], kills: Kills) -> Publication:
    output = rehearsed.bucket.uri(f"scores-{name}")
    execution = rehearsed.execution(name, kills=kills)
    execution.run(WORKFLOW, {**inputs, "output": literal(output)})
    assert len({attempt.node for attempt in execution.record.attempts if attempt.task == "score_share"}) == 3
    (publication,) = list_publications(output)
    verify_table(output, publication, read_bytes=False)
    return publication
