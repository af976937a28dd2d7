"""A run's directory is complete or absent."""

import hashlib
import json
import stat
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from slipstream.pipeline.report import engine
from slipstream.pipeline.report.summary import summary_content
from slipstream.shared.artifacts.format import Artifact, DamagedArtifact
from slipstream.shared.artifacts.workspaces import temporary_workspace
from tests.support.report_runs import INT8, STAGES, results
from tests.support.wording import refuses

CONFIG = {"training": {"epochs": 20}}


def test_a_run_has_its_page_its_figures_and_its_model(tmp_path: Path) -> None:
    found = results(tmp_path / "in", ["no", "yes"])
    summary = engine.build_report(tmp_path / "runs", found, STAGES, CONFIG)
    directory = Path(summary.directory)
    assert list((tmp_path / "runs").iterdir()) == [directory]
    assert sorted(path.name for path in directory.iterdir()) == [
        *("card.html", "card.json", "model", "prepared", "report.html", "summary.json", "tensorboard", "trained")
    ]
    assert Artifact.open(directory / "prepared", "prepare").fingerprint == found.prepared.fingerprint
    assert Artifact.open(directory / "trained", "train").fingerprint == found.trained.fingerprint
    assert (directory / "card.json").read_bytes() == found.prepared.read_bytes("card.json")
    assert "Data card" in (directory / "card.html").read_text(encoding="utf-8")
    assert (directory / summary.report).read_text(encoding="utf-8").startswith("<!doctype html>")
    assert (directory / summary.model_file).read_bytes() == INT8
    assert Artifact.open(directory / summary.model, "export").check_sha256().fingerprint == found.exported.fingerprint
    assert stat.S_IMODE((directory / summary.model).stat().st_mode) & 0o500 == 0o500
    assert json.loads((directory / "summary.json").read_text()) == json.loads(json.dumps(summary_content(summary)))


def test_the_summary_holds_the_figures_of_the_stages(tmp_path: Path) -> None:
    found = results(tmp_path / "in", ["no", "yes"])
    summary = engine.build_report(tmp_path / "runs", found, STAGES, CONFIG)
    confusion = found.evaluation.confusion
    assert confusion
    right = (confusion[0][0] + confusion[1][1]) / sum(map(sum, confusion))
    assert summary.evaluation.metric.value == pytest.approx(right)
    assert summary.evaluation.baseline.accuracy == found.evaluation.baseline.accuracy
    rows = summary.data
    assert rows.rows_train + rows.rows_validation + rows.rows_test == rows.rows_kept
    assert rows.rows_kept + rows.rows_quarantined == rows.rows_read
    assert [v.name for v in summary.export.variants if v.chosen] == [summary.export.chosen]
    assert summary.network
    assert summary.network.all_reduce_latency_bytes == 1024
    assert summary.network.all_reduce_busbw_bytes == 16 << 20


def test_runs_of_the_same_second_do_not_meet(tmp_path: Path) -> None:
    found = results(tmp_path / "in", [])
    places = [engine.build_report(tmp_path / "runs", found, STAGES, CONFIG).directory for _ in range(4)]
    assert len(set(places)) == 4
    assert sorted(places) == sorted(str(path) for path in (tmp_path / "runs").iterdir())


def test_a_damaged_model_leaves_nothing_behind(tmp_path: Path) -> None:
    found = results(tmp_path / "in", ["no", "yes"])
    model = found.exported.path("model.int8.onnx")
    model.write_bytes(model.read_bytes()[:-1] + b"!")
    with pytest.raises(DamagedArtifact, match=r"model\.int8\.onnx: block 0"):
        engine.build_report(tmp_path / "runs", found, STAGES, CONFIG)
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_page_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def fail(*_: object) -> str:
        seen.extend(1 for _ in (tmp_path / "runs").glob(".*/model/model.onnx"))
        raise RuntimeError("no page")

    monkeypatch.setattr(engine, "report_page", fail)
    with refuses(RuntimeError):
        engine.build_report(tmp_path / "runs", results(tmp_path / "in", []), STAGES, CONFIG)
    assert seen == [1]  # the model was already there when it failed
    assert list((tmp_path / "runs").iterdir()) == []


#: Ends in the middle of its work.
KILLED = """
import os, signal, sys
from pathlib import Path
from slipstream.shared.artifacts.workspaces import temporary_workspace
with temporary_workspace(Path(sys.argv[1])) as directory:
    (directory / "report.html").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_kill_left_behind_is_swept_by_the_next_run(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "runs")])
    assert len(list((tmp_path / "runs").glob(".*/report.html"))) == 1
    with temporary_workspace(tmp_path / "runs") as of_another:
        summary = engine.build_report(tmp_path / "runs", results(tmp_path / "in", []), STAGES, CONFIG)
        assert of_another.exists()
    assert list((tmp_path / "runs").iterdir()) == [Path(summary.directory)]


def test_every_model_file_is_copied_byte_by_byte(tmp_path: Path) -> None:
    found = results(tmp_path / "in", ["a", "b", "c"])
    summary = engine.build_report(tmp_path / "runs", found, STAGES, CONFIG)
    copied = Path(summary.directory, summary.model)
    for name, record in found.exported.files.items():
        assert hashlib.sha256((copied / name).read_bytes()).hexdigest() == record.sha256


def test_only_the_copy_beside_the_report_has_the_date(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/MODEL_CARD.md").write_text("# A model\n", encoding="utf-8")
    for day in (1, 2):
        engine.write_dated_card(tmp_path, datetime(2026, 1, day))
        assert (tmp_path / "MODEL_CARD.md").read_text(encoding="utf-8") == f"# A model\n\nReported on 2026-01-0{day}.\n"
        assert (tmp_path / "model/MODEL_CARD.md").read_text(encoding="utf-8") == "# A model\n"
