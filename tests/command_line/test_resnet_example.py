"""The recipe of ``examples/resnet.yaml``: SGD, flips and crops, on images that are already split."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from sklearn.datasets import load_digits

from slipstream.config import RunConfig
from slipstream.shared.artifacts.versions import ROOT
from tests.support.command_line import Run
from tests.support.quick_config import EXPORT, NETWORK

EXAMPLE = yaml.safe_load((ROOT / "examples/resnet.yaml").read_text(encoding="utf-8"))
FOLDERS = {"train": 300, "val": 200, "test": 400}


def write_digits(place: Path) -> None:
    digits, first = load_digits(), 0
    for folder, rows in FOLDERS.items():
        for row in range(first, first + rows):
            path = place / folder / f"digit-{digits.target[row]}" / f"{row}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((digits.images[row] * 15).astype(np.uint8)).save(path)
        first += rows


def test_the_example_is_a_configuration() -> None:
    found = RunConfig.from_dict(EXAMPLE)
    assert found.data.split.directories and found.training.optimizer == "sgd" and found.training.nesterov
    assert [each.transform for each in found.training.augment] == ["horizontal_flip", "crop"]


@pytest.mark.prove
def test_from_split_images_to_the_report(pyflyte_run: Run, tmp_path: Path) -> None:
    write_digits(tmp_path / "pictures")
    config = {**EXAMPLE, "export": EXPORT, "collectives": NETWORK}
    result = pyflyte_run("--data", "pictures", "--config", json.dumps(config))
    assert result.returncode == 0, result.stdout
    assert "300 to train, 200 to validate, 400 to test" in result.stdout
    (run,) = (tmp_path / "runs").iterdir()
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["evaluation"]["metric"]["value"] > 0.6  # chance is 0.1; a mirrored digit is another figure
