"""The main job on the command line: stages run, are reused, and run again after changes."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pytest

from tests.support.command_line import PYFLYTE, TRAINING, Run, start_in
from tests.support.quick_config import EXPORT, NETWORK

STAGES = ("prepare", "train", "evaluate", "export", "collectives")
QUICK = {"training": {"epochs": 3}, "export": EXPORT, "collectives": NETWORK}
#: A network that is trained and exported in a moment.
SMALL = {**QUICK, "model": {"arguments": {"widths": [8], "depth": 1}}, "training": {"epochs": 1}}


def made(output: str) -> dict[str, str]:
    """What became of each stage: "reused", "damaged …", or the seconds that it took."""
    words = r"(?:warning: the stored artifact is )?(reused|damaged|[\d.]+ s):? +\S*"
    said = {stage: re.findall(rf"^{stage} +{words}", output, re.M) for stage in STAGES}
    return {
        stage: " then ".join("made" if word.endswith(" s") else word for word in words) for stage, words in said.items()
    }


def run_directory(tmp_path: Path) -> Path:
    return max(path for path in (tmp_path / "runs").iterdir() if not path.name.startswith("."))


def test_made_then_reused_then_mended_then_changed(pyflyte_run: Run, tmp_path: Path) -> None:
    first = start_in(tmp_path, "--config", json.dumps(SMALL))
    assert first.returncode == 0, first.stdout
    assert made(first.stdout) == dict.fromkeys(STAGES, "made"), first.stdout
    directory = run_directory(tmp_path)
    assert f"runs/{directory.name}/report.html" in first.stdout and f"runs/{directory.name}/model" in first.stdout
    summary = json.loads((directory / "summary.json").read_text())
    rows = summary["data"]
    assert rows["rows_read"] == rows["rows_kept"] == 1797
    assert rows["rows_train"] + rows["rows_validation"] + rows["rows_test"] == 1797
    session = onnxruntime.InferenceSession(directory / "model/model.onnx")
    (image,) = session.get_inputs()
    assert session.run(None, {image.name: np.zeros((7, 1, 8, 8), np.uint8)})[0].shape == (7, 10)
    assert not list(tmp_path.glob(".slipstream/checkpoints/*/step-*")), "checkpoints outlived the finished training"
    history = json.loads(next(tmp_path.glob(".slipstream/train/*/history.json")).read_text())
    assert history["world"]["size"] == 1, "a small model on a CPU trains in one process"

    # One bit of the stored data flips, the stored export is deleted, and another opset is asked for.
    (rows,) = tmp_path.glob(".slipstream/prepare/*/train-00000.rows")
    data = bytearray(rows.read_bytes())
    data[1000] ^= 1
    rows.write_bytes(data)
    shutil.rmtree(next(tmp_path.glob(".slipstream/evaluate/*")))
    third = pyflyte_run("--config", json.dumps({**SMALL, "export": {**EXPORT, "opset": 21}}))
    assert third.returncode == 0, third.stdout
    assert made(third.stdout) == {
        "prepare": "damaged then made",
        "train": "reused",  # the data came out the same, so nothing that was made from it changes
        "evaluate": "made",
        "export": "made",
        "collectives": "reused",
    }, third.stdout


@pytest.mark.prove
def test_a_table_for_regression_in_parquet_and_new_bytes_behind_the_same_name(pyflyte_run: Run, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "customer": [f"c{i:05d}" for i in range(1500)],
            "size": generator.normal(100, 15, 1500),
            "rooms": generator.integers(1, 6, 1500),
            "district": generator.choice(["north", "south", "west"], 1500),
        }
    )
    frame["price"] = 3 * frame["size"] + 20 * frame["rooms"] + 50 * (frame["district"] == "west") + 1000
    frame.loc[::50, "size"] = np.nan
    frame.to_parquet(tmp_path / "homes.parquet")
    config = json.dumps({**QUICK, "training": {"epochs": 25, "batch_size": 64}})
    arguments = ["--data", "homes.parquet", "--target", "price", "--config", config]
    first = pyflyte_run(*arguments)
    assert first.returncode == 0, first.stdout
    summary = json.loads((run_directory(tmp_path) / "summary.json").read_text())
    # Without the gaps the target is a function of the columns; with them (2 %) most of the variance is explained.
    assert summary["evaluation"]["model"]["r2"] > 0.8, summary["evaluation"]
    assert summary["data"]["rows_kept"] == 1500
    card = json.loads(next(tmp_path.glob(".slipstream/prepare/*/card.json")).read_text())
    roles = {column["name"]: column["role"] for column in card["columns"]}
    assert roles["customer"] == "identifier" and roles["district"] == "categorical" and roles["size"] == "numeric"

    frame.iloc[:-1].to_parquet(tmp_path / "homes.parquet")
    second = pyflyte_run(*arguments)
    assert second.returncode == 0 and made(second.stdout)["prepare"] == "made", second.stdout
    assert made(second.stdout)["train"] == "made"
    assert json.loads((run_directory(tmp_path) / "summary.json").read_text())["data"]["rows_kept"] == 1499


@pytest.mark.prove
def test_a_model_of_the_users_own(pyflyte_run: Run, tmp_path: Path) -> None:
    source = (
        "from torch import nn\n"
        "def build(signature, width):\n"
        "    pixels = signature.inputs[0].shape[1] * signature.inputs[0].shape[2]\n"
        "    hidden = nn.Linear(pixels, width)\n"
        "    return nn.Sequential(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(width, signature.outputs))\n"
    )
    (tmp_path / "nets.py").write_text(source)
    config = json.dumps({**QUICK, "model": {"name": "nets:build", "arguments": {"width": 32}}})
    first = pyflyte_run("--config", config)
    assert first.returncode == 0, first.stdout
    parameters = json.loads(next(tmp_path.glob(".slipstream/train/*/history.json")).read_text())["parameters"]
    assert parameters == 64 * 32 + 32 + 32 * 10 + 10


@pytest.mark.prove
def test_a_killed_run_goes_on_where_it_stopped_and_says_so(pyflyte_run: Run, tmp_path: Path) -> None:
    config = json.dumps({**QUICK, "training": {"epochs": 60, "patience": 0}})
    command: list[str | Path] = [PYFLYTE, "run", TRAINING, "train_and_export", "--config", config]
    killed = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob(".slipstream/checkpoints/*/step-*/manifest.json")):
        assert killed.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(0.02)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert not list(tmp_path.glob("runs/*")) and not list(tmp_path.glob(".slipstream/train/*/manifest.json"))

    again = pyflyte_run("--config", config)
    assert again.returncode == 0, again.stdout
    assert made(again.stdout)["prepare"] == "reused" and made(again.stdout)["train"] == "made"
    (step,) = re.findall(r"resumes from step (\d+)", again.stdout)
    attempt = json.loads(next(tmp_path.glob(".slipstream/train/*/attempt.json")).read_text())
    history = json.loads(next(tmp_path.glob(".slipstream/train/*/history.json")).read_text())
    assert attempt["steps"] + int(step) == history["steps_total"] and int(step) > 0
    assert attempt["ledger"]["attempts"] == 2 and attempt["ledger"]["kept"] == history["steps_total"]
    assert len(list(tmp_path.glob("runs/*"))) == 1


ADULT = Path(__file__).parents[3] / "shared/data/adult-train.csv"
COLUMNS = [
    *("age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship"),
    *("race", "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income"),
]


def accuracy_by_variant(summary: dict[str, Any]) -> dict[str, float]:
    return {each["name"]: each["metrics"]["accuracy"] for each in summary["export"]["variants"] if each["metrics"]}


@pytest.mark.skipif(not ADULT.exists(), reason="the Adult table is missing next to this checkout")
@pytest.mark.prove
def test_adult_as_published_trains_with_the_defaults(pyflyte_run: Run, tmp_path: Path) -> None:
    config = {**QUICK, "training": {}, "data": {"header": False, "columns": COLUMNS}}
    result = pyflyte_run("--data", str(ADULT), "--target", "income", "--config", json.dumps(config))
    assert result.returncode == 0, result.stdout
    summary = json.loads((run_directory(tmp_path) / "summary.json").read_text())
    rows = summary["data"]
    assert rows["rows_read"] == 32_561 == rows["rows_kept"] + rows["rows_quarantined"]
    # 85.3 % is what the mean over five splits must reach (`make prove`); one split varies by about half a point.
    assert summary["evaluation"]["metric"]["value"] >= 0.848
    accuracy = accuracy_by_variant(summary)
    assert accuracy[summary["export"]["chosen"]] >= accuracy["onnx-fp32"] - 0.01


@pytest.mark.prove
@pytest.mark.skipif(not ADULT.exists(), reason="the Adult table is missing next to this checkout")
def test_adult_over_five_splits(pyflyte_run: Run, tmp_path: Path) -> None:
    found, lost = [], []
    for seed in range(5):
        config = {**QUICK, "training": {}, "data": {"header": False, "columns": COLUMNS, "split": {"seed": seed}}}
        result = pyflyte_run("--data", str(ADULT), "--target", "income", "--config", json.dumps(config))
        assert result.returncode == 0, result.stdout
        summary = json.loads((run_directory(tmp_path) / "summary.json").read_text())
        found.append(summary["evaluation"]["metric"]["value"])
        accuracy = accuracy_by_variant(summary)
        lost.append(accuracy["onnx-fp32"] - accuracy[summary["export"]["chosen"]])
    print("accuracy", found, "lost by the chosen variant", lost)
    assert np.mean(found) >= 0.853 and max(lost) <= 0.01
