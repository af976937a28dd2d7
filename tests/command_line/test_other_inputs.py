"""Images and texts run through the same stages as tables, without a target or a setting of their kind."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.support.command_line import Run

QUICK = json.dumps(
    {"training": {"epochs": 15, "batch_size": 64}, "export": {"seconds": 2}, "collectives": {"largest": 65536}}
)


def write_arrays(directory: Path) -> str:
    draw = np.random.default_rng(0)
    labels = np.arange(600) % 2
    images = draw.integers(0, 128, (600, 8, 8), np.uint8) + (labels * 60).astype(np.uint8)[:, None, None]
    np.savez_compressed(directory / "shades.npz", images=images, labels=np.array(["dark", "light"])[labels])
    return "shades.npz"


def write_texts(directory: Path) -> str:
    draw = np.random.default_rng(0)
    for label, words in {"good": ["lovely", "great", "fine"], "bad": ["awful", "poor", "sad"]}.items():
        (directory / "reviews" / label).mkdir(parents=True)
        for number in range(300):
            text = " ".join([*draw.choice([f"word{n}" for n in range(40)], 10), *draw.choice(words, 4)])
            (directory / "reviews" / label / f"{number}.txt").write_text(text)
    return "reviews"


@pytest.mark.prove
@pytest.mark.parametrize(("write", "name"), [(write_arrays, "image"), (write_texts, "tokens")])
def test_from_files_to_a_model_in_onnx(
    pyflyte_run: Run, tmp_path: Path, write: Callable[[Path], str], name: str
) -> None:
    result = pyflyte_run("--data", write(tmp_path), "--config", QUICK)
    assert result.returncode == 0, result.stdout
    (run,) = (tmp_path / "runs").iterdir()
    session = onnxruntime.InferenceSession(run / "model" / "model.onnx")
    assert [value.name for value in session.get_inputs()] == [name]
    accuracy = float(result.stdout.split("test accuracy")[1].split("%")[0])
    assert accuracy > 90, result.stdout
