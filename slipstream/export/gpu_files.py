"""Files for GPUs, written beside what is deployed on a CPU: they are checked here, and timed where there is a GPU."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from slipstream.artifacts.format import ArtifactWriter
from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.results.export import VariantFigures
from slipstream.export.choose import VariantVerdict
from slipstream.export.config import ExportConfig
from slipstream.export.quantize.half_precision import TRIED_ROWS, Half, error_of, write_half
from slipstream.export.quantize.quantise import Quantiser
from slipstream.export.quantize.search import calibration, creation_failure
from slipstream.export.quantize.tensorrt import COMMAND, FILE, trtexec, write_tensorrt
from slipstream.export.variants import left_out

VERDICT = "for GPUs"


def gpu_files(writer: ArtifactWriter, fp32: Path, data: PreparedData, config: ExportConfig) -> list[VariantFigures]:
    """Write what ``config`` asks for, of the file ``fp32``, and tell what became of it.

    Raises ``UserError`` if the file for TensorRT is not what TensorRT takes.
    """
    if not (config.tensorrt or config.half):
        return []
    figures, inputs = list[VariantFigures](), calibration(data, config)
    with TemporaryDirectory(dir=writer.directory) as scratch:
        prepared = Quantiser(fp32, inputs, Path(scratch), 8).prepared(smooth=False)
        for kind in get_args(Half) if config.half else ():
            target = writer.directory / f"model.{kind}.onnx"
            try:
                write_half(prepared, target, kind)
                error = error_of(target, prepared, inputs)
            except Exception as problem:
                target.unlink(missing_ok=True)
                figures.append(left_out(kind, creation_failure(problem)))
            else:
                reason = (
                    f"not timed on a CPU; by ONNX's reference implementation its outputs differ from FP32's by at most "
                    f"{error:.2g} on {min(TRIED_ROWS, len(inputs[0]))} rows"
                )
                figures.append(left_out(kind, VariantVerdict(VERDICT, reason), target))
        if config.tensorrt:
            write_tensorrt(prepared, writer.directory / FILE, inputs)
            writer.write_bytes(COMMAND, f"{trtexec(data.signature)}\n".encode())
            reason = f"not timed on a CPU; symmetric, all zero points 0; {COMMAND} has the line that builds its engine"
            figures.append(left_out("tensorrt", VariantVerdict(VERDICT, reason), writer.directory / FILE))
    return figures
