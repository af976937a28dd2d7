"""Made-up exported models with the files that a plan of serving reads."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.shared.artifacts.records import to_tree
from slipstream.shared.artifacts.results.export import ExportReport, VariantFigures
from slipstream.shared.artifacts.results.ledger import TrainingFigures
from tests.support.measured_trainings import FIGURES, figures
from tests.support.report_runs import export, write

#: Of the CPU of c3-highcpu-4.
CPU = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"


INT8, FP32 = "onnx-int8", "onnx-fp32"
#: A training on one such core, of a million operations for each row that is only predicted.
ON_CPU = figures(
    gpu="", speed={"flops_per_row": 3e6, "peak_flops": 172.8e9}, world=replace(FIGURES.world, device="cpu", threads=1)
)


def report(**machine: Any) -> ExportReport:
    """FP32 of 0.12 ms a request, and an 8-bit variant of 0.062 ms that is good enough, measured on :data:`CPU`."""
    its = export("accuracy")
    return replace(its, machine=replace(its.machine, **{"cpu": CPU, **machine}))


def variant(its: ExportReport, name: str) -> VariantFigures:
    return next(each for each in its.variants if each.name == name)


def write_exported(directory: Path, its: ExportReport | None = None, training: TrainingFigures | None = None) -> str:
    """The directory of a run: its model, and its summary if there is a training."""
    write(directory / "model", "export", {"export.json": its or report()})
    if training:
        (directory / "summary.json").write_text(json.dumps({"training": to_tree(training)}))
    return str(directory)
