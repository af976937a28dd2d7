"""What importing costs: a workflow's module loads flytekit and what the Elastic plugin needs, and no engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "onnx", "onnxruntime", "onnxscript", "sklearn", "matplotlib", "jinja2", "polars", "moto")


def loaded_by(module: str) -> set[str]:
    code = f"import {module}, sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_workflow_loads_no_engine() -> None:
    loaded = loaded_by("workflows.training")
    assert "flytekit" in loaded and not loaded & set(HEAVY)


@pytest.mark.parametrize("room", ["preprocess", "evaluate", "export", "report"])
def test_doors_without_a_process_group_load_no_torch(room: str) -> None:
    loaded = loaded_by(f"tasks.{room}.task")
    assert f"tasks.{room}.task" in loaded and not loaded & {"torch", *HEAVY}


def test_a_data_card_needs_no_charts() -> None:
    loaded = loaded_by("tasks.report.data_engine")
    assert "jinja2" in loaded and not loaded & {"torch", "matplotlib"}


@pytest.mark.parametrize("room", ["preprocess", "train", "evaluate", "export", "collectives", "report"])
def test_engines_know_nothing_of_flyte(room: str) -> None:
    from pathlib import Path

    engines = [path for path in Path("tasks", room).rglob("*.py") if path.name != "task.py"]
    assert engines and not [path for path in engines if "flytekit" in path.read_text(encoding="utf-8")]
