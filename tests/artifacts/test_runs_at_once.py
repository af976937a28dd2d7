"""Several runs in one directory at once: every stage runs once, and every run has its own report."""

from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.processes import FORK
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.workspaces import ArtifactStore
from tests.support.tables import table_text


def prepare_and_report(place: Path, number: int, begin: Any) -> None:
    """What ``slipstream.flyte.stage`` does about a stage on one machine, and the end of a run."""
    from slipstream.pipeline.prepare.engine import prepare
    from slipstream.pipeline.report.run_directory import link_artifact, new_run
    from slipstream.shared.source.config import DataConfig

    store = ArtifactStore(place / "store")
    begin.wait(60)
    with store.turn("prepare", "key"):
        made = store.find("prepare", "key")
        if made is None:
            with store.workspace("prepare") as directory:
                data = str(place / "t.csv")
                prepare(directory, data, "y", DataConfig(), {}, 1, store.checkpoints("prepare", "key"))
                made = store.publish(directory, "prepare", "key")
                (place / f"made-by-{number}").touch()
    assert isinstance(made, Artifact)
    found = made
    new_run(place / "runs", lambda directory, now: link_artifact(found, directory / "prepared"))


@pytest.mark.prove
def test_three_at_once(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(table_text(400))
    begin = FORK.Barrier(3)
    runs = [FORK.Process(target=prepare_and_report, args=(tmp_path, number, begin)) for number in range(3)]
    for run in runs:
        run.start()
    for run in runs:
        run.join(100)
    assert [run.exitcode for run in runs] == [0, 0, 0]
    assert len(list(tmp_path.glob("made-by-*"))) == 1
    assert [path.name for path in (tmp_path / "store/prepare").iterdir()] == ["key"]
    reports = sorted((tmp_path / "runs").iterdir())
    prints = {Artifact.open(report / "prepared", "prepare").check().fingerprint for report in reports}
    assert len(reports) == 3 and len(prints) == 1
