"""``pyflyte run workflows/scoring.py`` and ``slipstream score`` on the command line."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.command import main
from slipstream.pipeline.score.publish import score_data
from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.source.config import DataConfig
from tests.support.command_line import run_in
from tests.support.promotions import flip
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.raw_tables import mixed_frame
from tests.support.scoring import KEEP, registry_with_model, rows, write_files


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    return registry_with_model(tmp_path_factory.mktemp("served"))


@pytest.mark.prove
def test_the_tables_are_listed_and_the_newest_is_fetched(served: Registry, tmp_path: Path) -> None:
    data, output = write_files(tmp_path / "in", files=2, of_each=300), tmp_path / "out"
    said = CliRunner().invoke(main, [str(output)])
    assert said.exit_code == 1 and "no scored table was published yet" in said.output
    first, _ = score_data(served.uri, str(data), str(output), DataConfig(), KEEP)
    rows(100, seed=5).to_csv(data / "02.csv", index=False)
    second, _ = score_data(served.uri, str(data), str(output), DataConfig(), KEEP)
    said = CliRunner().invoke(main, [str(output), "--fetch", str(tmp_path / "copy")])
    assert said.exit_code == 0, said.output
    one, two, newest = said.output.splitlines()
    assert first.key in one and "600 rows; no drift" in one and second.key in two and "700 rows" in two
    assert newest == f"newest: {tmp_path / 'copy'}"
    (part,) = (tmp_path / "copy").glob("part-*.parquet")
    assert pq.read_table(part).num_rows == 700
    again = CliRunner().invoke(main, [str(output), "--fetch", str(tmp_path / "copy")])
    assert again.exit_code == 1 and "already exists" in again.output


@pytest.mark.prove
def test_a_record_forges_no_line_of_the_list(served: Registry, tmp_path: Path) -> None:
    data, output = write_files(tmp_path / "in", files=1, of_each=300), tmp_path / "out"
    publication, _ = score_data(served.uri, str(data), str(output), DataConfig(), KEEP)
    pointer = output / f"published/{publication.key}.json"
    pointer.write_bytes(canonical_json({**json.loads(pointer.read_bytes()), "at": "now\n   2  now  forged\x1b[2J"}))
    (line,) = CliRunner().invoke(main, [str(output)]).output.splitlines()
    assert line.startswith(r"   1  now 2 now forged\x1b[2J  ") and line.isprintable()


def test_a_table_that_was_damaged_is_named(served: Registry, tmp_path: Path) -> None:
    data, output = write_files(tmp_path / "in", files=1, of_each=300), tmp_path / "out"
    publication, _ = score_data(served.uri, str(data), str(output), DataConfig(), KEEP)
    (part,) = (output / "tables" / publication.key).glob("part-*.parquet")
    flip(part)
    said = CliRunner().invoke(main, [str(output), "--fetch", str(tmp_path / "copy")])
    assert said.exit_code == 1 and "its SHA-256 differs from the manifest's" in said.output
    assert not (tmp_path / "copy").exists()
    part.unlink()
    said = CliRunner().invoke(main, [str(output)])
    assert said.exit_code == 1 and "is missing; score the same data again" in said.output


def test_pyflyte_scores_and_ends_with_what_was_published(served: Registry, tmp_path: Path) -> None:
    write_files(tmp_path / "in", files=2, of_each=300)
    config = json.dumps({"scoring": {"keep": ["id"]}})
    arguments = ("--registry", served.uri, "--data", "in", "--output", "out", "--config", config)
    ended = run_in(tmp_path, *arguments, workflow="score", file="scoring")
    assert ended.returncode == 0, ended.stdout
    assert "Data        600 rows read, 600 scored, none quarantined" in ended.stdout
    assert "Published   now" in ended.stdout
    again = run_in(tmp_path, *arguments, workflow="score", file="scoring")
    assert "Published   earlier: the same data, model and settings were already scored" in again.stdout
    nothing = run_in(
        tmp_path, "--registry", "none", "--data", "in", "--output", "out", workflow="score", file="scoring"
    )
    assert nothing.returncode == 1 and "none: no model was promoted yet" in nothing.stdout
    assert "Traceback" not in nothing.stdout


@pytest.mark.prove
def test_a_model_is_trained_anew_if_rows_drift_and_only_then(served: Registry, tmp_path: Path) -> None:
    mixed_frame(600, "classification").to_csv(tmp_path / "training.csv", index=False)
    shifted = rows(600)
    numbers = shifted.select_dtypes("number").columns
    shifted[numbers] = shifted[numbers] + 5 * shifted[numbers].std()
    for name, frame in (("like", rows(600)), ("shifted", shifted)):
        (tmp_path / name).mkdir()
        frame.to_csv(tmp_path / name / "0.csv", index=False)
    training = {"epochs": 3, "batch_size": 64}
    config = json.dumps({"training": training, "export": EXPORT, "collectives": NETWORK})
    fixed = ("--registry", served.uri, "--output", "out", "--training_data", "training.csv", "--target", "y")

    def run(data: str) -> str:
        arguments = (*fixed, "--data", data, "--config", config)
        ended = run_in(tmp_path, *arguments, workflow="retrain_if_drifted", file="scoring")
        assert ended.returncode == 0, ended.stdout
        return " ".join(ended.stdout.split())

    said = run("like")
    assert "Drift none found" in said and "Retrained no, no rows drifted" in said
    assert not (tmp_path / "runs").exists() and not (tmp_path / ".slipstream/train").exists()
    said = run("shifted")
    assert "Retrained yes, rows drifted;" in said and "see runs/" in said
    assert list((tmp_path / ".slipstream/train").glob("*/manifest.json"))
    assert len(list((tmp_path / "out/published").iterdir())) == 2
