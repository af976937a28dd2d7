"""Export stage: ONNX conversion, quantisation, measurement and choice of the variant to deploy."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, get_args

import numpy as np

from slipstream.pipeline.export.card import model_card
from slipstream.pipeline.export.choose import (
    FP32,
    TORCH,
    TORCH_BF16,
    Contender,
    GateResult,
    choose_variant,
    fp32_variant,
    left_out,
    onnx_variant,
    torch_variants,
    variant_figures,
)
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import PARITY_BATCHES, exporters_silenced, output_name, without_provenance
from slipstream.pipeline.export.finalists import evaluate_finalists
from slipstream.pipeline.export.package.assemble import LOGITS, assemble_package, finish_package
from slipstream.pipeline.export.package.libraries import ModelProvenance, write_libraries
from slipstream.pipeline.export.package.samples import model_distributions
from slipstream.pipeline.export.quantize.half_precision import TRIED_ROWS, Half, largest_output_error, write_half
from slipstream.pipeline.export.quantize.quantise import Quantiser, calibration_rows, stacked_products
from slipstream.pipeline.export.quantize.recipes import CONVOLUTIONS
from slipstream.pipeline.export.quantize.search import (
    BATCHES,
    calibration_inputs,
    creation_failure,
    has_shrunk,
    search_recipes,
    size_in_words,
)
from slipstream.pipeline.export.session import check_provider, default_threads, operator_times
from slipstream.pipeline.export.weights_alone import export_weights, too_large
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.results.export import (
    MODEL_CARD,
    PREPROCESSING,
    REPORT,
    SIGNATURE,
    DeployedTensor,
    ExportReport,
    MachineFigures,
    ModelSignature,
    VariantFigures,
)
from slipstream.shared.artifacts.results.scoring import DISTRIBUTIONS
from slipstream.shared.artifacts.results.training import code_versions_of
from slipstream.shared.artifacts.versions import installed_version
from slipstream.shared.comparison.latencies import Workload, affordable_batches, measure_latencies
from slipstream.shared.errors import UserError
from slipstream.shared.machine.description import CpuModel, this_machine
from slipstream.shared.machine.limits import usable_cores
from slipstream.shared.models.predict import held_out_rows

if TYPE_CHECKING:
    import onnx

    from slipstream.shared.models.trained import TrainedModel


#: Gate results of the variants that the gate does not evaluate.
REFERENCES = {
    TORCH: GateResult("reference", "torch itself, run eagerly: the reference for the others"),
    TORCH_BF16: GateResult(
        "reference", "torch with matmuls in bfloat16: for comparison only, without a file to deploy"
    ),
    FP32: GateResult("exact", f"gives the same outputs as torch, at batches {', '.join(map(str, PARITY_BATCHES))}"),
}
#: Maximum characters of a value in an error message.
LONGEST = 120
#: Fraction of ``export.seconds`` that is reserved for timing the finalists, even after a long search.
TIMING = 0.3


def export(
    directory: Path, trained: TrainedModel, data: PreparedData, config: ExportConfig, made_by: Mapping[str, object]
) -> Artifact:
    """Write the artifact of :mod:`slipstream.shared.artifacts.results.export` into the fresh ``directory``.

    A model that is too large for ONNX gets no variants (:mod:`slipstream.pipeline.export.weights_alone`). Raises
    ``UserError`` if the model cannot be exported to ONNX, if its ONNX outputs differ from torch's, or if no variant is
    within the budget.
    """
    from slipstream.shared.models.adapters.network import merge_adapters
    from slipstream.shared.models.hugging_face.files import round_weights, weights_dtype

    writer, machine, signature = ArtifactWriter(directory), this_machine(), trained.signature
    if config.target == "vnni" and machine.saturates:
        raise config.reject("target", f"portable, as {machine.cpu} has no VNNI to measure VNNI files with")
    check_provider(config.provider)
    check_inputs(signature, data.signature)
    model = trained.load()
    network = getattr(model, "network", model)
    code = code_versions_of(trained.artifact)
    dtype = weights_dtype(config.dtype, trained.inherited)
    libraries = write_libraries(writer, network, trained, data, dtype)
    if why := too_large(model, config):
        figures = machine_figures(machine, config)
        return export_weights(writer, libraries, data, config, made_by, figures, why, code, trained.artifact.made_by)
    merge_adapters(network)
    round_weights(network, dtype)
    test, threshold = held_out_rows(data), trained.threshold
    torch = torch_variants(model, signature, test, machine)
    fp32 = fp32_variant(directory, model, torch[0].load(), data, test, config)
    for_gpus = gpu_files(writer, directory / str(fp32.file), data, config)
    started = time.perf_counter()
    deciding_first = sorted(BATCHES, key=lambda batch: batch != config.decide_at_batch)
    workload = Workload(signature, test, config.threads)
    batches = affordable_batches(fp32.load(), workload, TIMING * config.seconds, deciding_first)
    profiled = operator_times(directory / str(fp32.file), signature, test, config, batches)
    searched = search_recipes(directory, directory / str(fp32.file), data, config, started, batches, threshold)
    made = [onnx_variant(each.name, each.path, signature, test, config, each.code) for each in searched.finalists]
    finalists = {each.variant.name: each for each in evaluate_finalists(fp32, made, data, test, config, threshold)}
    left = max(TIMING * config.seconds, config.seconds - (time.perf_counter() - started))
    timed_variants = [*torch, fp32, *(each.variant for each in finalists.values())]
    loads = {variant.name: variant.load for variant in timed_variants}
    timed = measure_latencies(loads, FP32, workload, left, batches)
    decision = choose_variant(
        signature.task,
        Contender(FP32, fp32.bytes, timed[FP32]),
        [each.contender(timed[name]) for name, each in finalists.items()],
        config,
    )
    verdicts = {**REFERENCES, **decision.verdicts}
    variants = [
        replace(
            variant_figures(v, torch[0], signature.task, test, timed[v.name], config, threshold),
            chosen=v.name == decision.chosen,
            verdict=verdicts[v.name].short,
            reason=verdicts[v.name].reason,
            **(finalists[v.name].figures(config) if v.name in finalists else {}),
        )
        for v in timed_variants
    ]
    report = ExportReport(
        task=signature.task,
        variants=[*variants, *for_gpus, *searched.others],
        chosen=decision.chosen,
        why=decision.why,
        decided_at_batch=config.decide_at_batch,
        best=decision.best,
        max_loss=config.max_loss,
        weight_bits=8 if config.target == "vnni" else 7,
        profile=profiled,
        machine=machine_figures(machine, config),
        licence=config.licence,
        libraries=libraries,
        mix_requests=config.mix_requests or None,
    )
    chosen = next(variant for variant in timed_variants if variant.name == decision.chosen)
    origin = ModelProvenance(made_by, config.licence, "portable" if decision.chosen == FP32 else config.target)
    on_tensors = deployed_signature(signature, config.opset, str(chosen.file), threshold)
    file = directory / str(chosen.file)
    deployed = assemble_package(writer, file, on_tensors, data, origin, config.sample_rows == "real", threshold)
    if distributions := model_distributions(chosen.load(), data):
        write_record(writer, DISTRIBUTIONS, distributions)
    write_descriptions(writer, report, deployed, data)
    writer.write_bytes(MODEL_CARD, model_card(deployed, report, data.card, code, trained.artifact.made_by).encode())
    return finish_package(writer, made_by)


def write_descriptions(
    writer: ArtifactWriter, report: ExportReport, deployed: ModelSignature, data: PreparedData
) -> None:
    """Write the report, the signature, and the files of the data for encoding raw columns."""
    write_record(writer, REPORT, report)
    write_record(writer, SIGNATURE, deployed)
    for name in PREPROCESSING:
        if name in data.artifact.files:
            writer.write_bytes(name, data.artifact.read_bytes(name))


def check_inputs(model: Signature, data: Signature) -> None:
    """Raise ``UserError`` unless the data have the signature that the model was trained on."""
    for name in ("task", "target", "inputs", "classes", "cardinalities", "buckets", "image_mean", "image_std"):
        takes, given = (getattr(each, name) for each in (model, data))
        if takes != given:
            if name == "inputs":
                takes, given = (
                    ", ".join(f"{i.name} {i.dtype} {list(i.shape)}" for i in each) for each in (takes, given)
                )
            raise UserError(
                f"the prepared data do not fit the model: {name} of {shortened(given)} instead of {shortened(takes)}; "
                "expected the data that the model was trained on, or later rows prepared with data.earlier"
            )


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def deployed_signature(signature: Signature, opset: int, file: str, threshold: float | None = None) -> ModelSignature:
    """Return names, types, shapes and units for calling the model in ``file``."""
    above = "" if threshold is None else f"; {signature.classes[1]!r} is predicted above {fmt.probability(threshold)}"
    units = {
        "classification": f"logits; softmax gives probabilities{above}",
        "next token": LOGITS,
    }
    unit = units.get(signature.task, f"units of {signature.target}")
    return ModelSignature(
        format=1,
        task=signature.task,
        target=signature.target,
        model=file,
        opset=opset,
        dynamic_batch=True,
        inputs=[DeployedTensor(i.name, i.dtype, ("batch", *i.shape)) for i in signature.inputs],
        outputs=[
            DeployedTensor(output_name(signature), signature.output_dtype, ("batch", *signature.output_shape), unit)
        ],
        classes=list(signature.classes),
        cardinalities=list(signature.cardinalities),
        preprocessing=list(PREPROCESSING),
    )


def machine_figures(machine: CpuModel, config: ExportConfig) -> MachineFigures:
    """Return machine, threads per call and library versions for ``export.json``."""
    import onnxruntime
    import torch

    return MachineFigures(
        cpu=machine.cpu,
        gpu=torch.cuda.get_device_name() if config.provider == "cuda" else "",
        architecture=machine.architecture,
        flags=list(machine.flags),
        cores=usable_cores(),
        threads=config.threads,
        onnxruntime=onnxruntime.__version__,  # of either distribution
        onnx=installed_version("onnx"),
        torch=installed_version("torch"),
    )


FILE, COMMAND = "model.tensorrt.onnx", "model.tensorrt.txt"
#: Batch sizes in the TensorRT engine's optimisation profile.
SHAPES = (("min", 1), ("opt", 32), ("max", 256))


def write_tensorrt(prepared: Path, target: Path, inputs: Sequence[np.ndarray]) -> None:
    """Quantise the file ``prepared`` for TensorRT, calibrated by ``inputs``.

    ``prepared`` comes from :meth:`.quantise_weight.Quantiser.prepared`. Raises ``UserError`` if a zero point is not 0,
    and the errors of ONNX Runtime's tool.
    """
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    model = onnx.load(prepared)
    options = {"ActivationSymmetric": True, "WeightSymmetric": True, "AddQDQPairToWeight": True, "QuantizeBias": False}
    with exporters_silenced(), default_threads(usable_cores()):
        quantize_static(
            prepared,
            target,
            calibration_rows([value.name for value in model.graph.input], inputs),
            quant_format=QuantFormat.QDQ,
            activation_type=QuantType.QInt8,
            weight_type=QuantType.QInt8,
            per_channel=True,
            calibrate_method=CalibrationMethod.MinMax,
            op_types_to_quantize=list(CONVOLUTIONS),
            nodes_to_exclude=stacked_products(model),
            extra_options={**options, "OpTypesToExcludeOutputQuantization": list(CONVOLUTIONS)},
        )
    plain = without_provenance(onnx.load(target))
    check_symmetric(plain)
    onnx.save(plain, target)


def check_symmetric(model: onnx.ModelProto) -> None:
    """Raise ``UserError`` unless every zero point is an int8 0, as TensorRT requires."""
    from onnx import numpy_helper

    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear") and len(node.input) > 2:
            zero = stored.get(node.input[2])
            if zero is None or zero.dtype != np.int8 or np.any(zero):
                raise UserError(f"export.tensorrt: the zero point of {node.name} is not an int8 0, as TensorRT asks")


def trtexec_command(signature: Signature) -> str:
    """Return the command that builds a TensorRT engine on the target GPU."""

    def shapes(rows: int) -> str:
        return ",".join(f"{spec.name}:{'x'.join(map(str, (rows, *spec.shape)))}" for spec in signature.inputs)

    profile = " ".join(f"--{name}Shapes={shapes(rows)}" for name, rows in SHAPES)
    return f"trtexec --onnx={FILE} --int8 --fp16 {profile} --saveEngine=model.plan"


VERDICT = "for GPUs"


def gpu_files(writer: ArtifactWriter, fp32: Path, data: PreparedData, config: ExportConfig) -> list[VariantFigures]:
    """Write the GPU files that ``config`` requests, made from the file ``fp32``, and return their report entries.

    Raises ``UserError`` if the TensorRT file cannot be made.
    """
    if not (config.tensorrt or config.half):
        return []
    figures, inputs = list[VariantFigures](), calibration_inputs(data, config)
    with TemporaryDirectory(dir=writer.directory) as scratch:
        prepared = Quantiser(fp32, inputs, Path(scratch), 8).prepared(smooth=False)
        for kind in get_args(Half) if config.half else ():
            target = writer.directory / f"model.{kind}.onnx"
            try:
                write_half(prepared, target, kind)
                if not has_shrunk(target, prepared):
                    raise UserError(size_in_words(target, prepared))
                error = largest_output_error(target, prepared, inputs)
            except Exception as problem:
                target.unlink(missing_ok=True)
                figures.append(left_out(kind, creation_failure(problem)))
            else:
                reason = (
                    f"not timed on a CPU; by ONNX's reference implementation its outputs differ from FP32's by at most "
                    f"{error:.2g} on {min(TRIED_ROWS, len(inputs[0]))} rows"
                )
                figures.append(left_out(kind, GateResult(VERDICT, reason), target))
        if config.tensorrt:
            write_tensorrt(prepared, writer.directory / FILE, inputs)
            writer.write_bytes(COMMAND, f"{trtexec_command(data.signature)}\n".encode())
            reason = (
                f"not timed on a CPU; symmetric, all zero points 0; {COMMAND} has the command that builds its engine"
            )
            figures.append(left_out("tensorrt", GateResult(VERDICT, reason), writer.directory / FILE))
    return figures
