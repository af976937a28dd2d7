"""Evaluation and export as Flyte tasks: outputs, and reuse of results."""

from pathlib import Path

import pytest
from flytekit.types.directory import FlyteDirectory

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export import engine
from slipstream.pipeline.export.config import ExportConfig
from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from tasks.evaluate import evaluate
from tasks.export import export
from tests.support.toys import untrained


@pytest.mark.prove
def test_tasks_make_then_reuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = write_table(tmp_path / "data", "regression")
    trained = untrained(tmp_path / "trained", data)
    inputs = {
        "trained": FlyteDirectory(str(trained.directory)),
        "prepared": FlyteDirectory(str(data.artifact.directory)),
    }

    def fingerprint(made: FlyteDirectory, kind: str) -> str:
        artifact = Artifact.open(Path(made.path), kind).check_sha256()
        assert artifact.made_by["trained"] == trained.fingerprint
        assert artifact.made_by["prepared"] == data.artifact.fingerprint
        return artifact.fingerprint

    config, other = (ExportConfig(calibration_rows=rows, seconds=2.0) for rows in (50, 60))
    for make, settings in ((evaluate, {}), (export, {"config": config})):
        first, second = make(**inputs, **settings), make(**inputs, **settings)
        assert not first.run.reused and second.run.reused
        assert fingerprint(first.artifact, first.run.name) == fingerprint(second.artifact, first.run.name)
    assert not export(**inputs, config=other).run.reused


def test_the_same_weights_with_other_code_are_another_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``export_model`` sees them after an edit of the user's model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        engine, "export", lambda directory, *given: ArtifactWriter(directory).finish("export", given[-1])
    )
    data = write_table(tmp_path / "data", "regression")
    trained, prepared = untrained(tmp_path / "trained", data).directory, data.artifact.directory
    inputs = {"trained": FlyteDirectory(str(trained)), "prepared": FlyteDirectory(str(prepared))}
    reused = [export(**inputs, config=ExportConfig(), code=code).run.reused for code in ("a", "a", "b")]
    assert reused == [False, True, False]
