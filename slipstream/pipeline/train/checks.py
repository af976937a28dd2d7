"""Checks that settings, data, model and devices are compatible.

They run before any process starts. With plain torchrun the training processes run them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import stored_blocks
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.device_clock import synchronise_device
from slipstream.pipeline.train.loop.augmentation import check_augment
from slipstream.pipeline.train.loop.goal import check_goal
from slipstream.pipeline.train.loop.objective import token_losses
from slipstream.pipeline.train.loop.probe import ModelTraits, probe_model
from slipstream.pipeline.train.loop.step import micro_batches, padded_rows
from slipstream.pipeline.train.memory.lasting import MemoryCapacity, ModelState, refuse_what_cannot_fit, room_of_host
from slipstream.pipeline.train.parallel.compiled import recompute_blocks
from slipstream.pipeline.train.parallel.config import GradientsConfig, ParallelConfig
from slipstream.pipeline.train.parallel.layout import check_plan, count_nodes
from slipstream.pipeline.train.parallel.replicas import check_exchange
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.distributed.user_errors import resolve_backend
from slipstream.shared.errors import UserError
from slipstream.shared.machine.gpus import bf16_gpus, visible_gpus
from slipstream.shared.models.arithmetic import choose_precision
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.base.shape import shaped_for, with_base_shape
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model, initial_values
from slipstream.shared.models.plan import block_names, model_plan
from slipstream.shared.one_line import one_line
from slipstream.shared.source.config import DataConfig
from slipstream.shared.telemetry.preflight import memory_of_gpu, refuse_if_too_small

META = torch.device("meta")
#: Largest number of parameters times rows (tokens, for text) of a step for which one process on a CPU is faster than
#: two, as ``benchmarks/trainer.py --part processes`` measures. It is the same on every machine.
SMALL = 50_000_000


def check_training(prepared: Path, model: ModelConfig, training: TrainingConfig, processes: int, nodes: int) -> None:
    """Raise ``UserError`` for errors that can be found without a process group.

    ``processes`` is the total number of processes. The model is built here only if settings or a base require it:
    on the meta device if possible, else in host memory. :func:`.check_fits` checks memory from the model's shapes.
    """
    gpus = visible_gpus()
    precision = choose_precision(training.precision, gpu=gpus > 0, bf16=bf16_gpus())
    check_exchange(training.gradients, resolve_backend(training.backend, gpus), precision)
    check_pipeline(training, gpu=gpus > 0)
    _, replicas, shards, _ = training.parallel.sizes(processes, nodes)
    data = open_prepared(prepared)
    check_data(data, training)
    origin = ModelOrigin(model)
    model = shaped_for(model, data.signature, origin)
    pieces = micro_batch_slices(data, training, replicas * shards)
    if training.compile is True:
        check_compiler(gpus > 0)
    if model.base or training.parallel.divides or training.compile is True or training.recompute == "full":
        predictor = build_model(model, data.signature, training.seed, empty=True)
        initial_values(model, predictor.network, training.seed, origin)
        check_divisible(training, probe_traits(predictor, torch.device("cpu")), precision)
        check_plan(training.parallel, model_plan(predictor.network), len(pieces), adapted=predictor.adapted)
        if training.recompute == "full":
            recompute_blocks(predictor.network)
        if training.parallel.uses_fsdp(replicas * shards):
            check_parameters(predictor.network)


def suits_one_process(prepared: Path, model: ModelConfig, training: TrainingConfig) -> bool:
    """Return True if a step has so little work that other processes do not pay on a CPU.

    Returns False if the settings are about several processes, or if a base decides the size of the model.
    """
    asked = training.parallel != ParallelConfig() or training.gradients != GradientsConfig()
    if asked or training.network_profile or model.base:
        return False
    data = open_prepared(prepared)
    try:
        shaped = shaped_for(model, data.signature, ModelOrigin(model))
        predictor = build_model(shaped, data.signature, training.seed, shapes_alone=True)
    except UserError:
        return False
    text = data.signature.task == "next token"
    rows = training.for_rows(data.training_rows).rows_per_step * (data.signature.inputs[0].shape[0] if text else 1)
    return rows * sum(each.numel() for each in predictor.parameters()) <= SMALL


def check_base(origin: ModelOrigin, training: TrainingConfig, data: DataConfig) -> None:
    """Raise ``UserError`` if the model with the base ``origin`` cannot be trained on text with these settings.

    The text need not be prepared yet. Reads the base's ``config.json``, the headers of its weights and the settings.
    Raises ``StorageUnavailable`` for a base in a store.
    """
    signature = rows_of_text(data, origin)
    shaped = shaped_for(origin.model, signature, origin)
    predictor = build_model(shaped, signature, training.seed, empty=True)
    initial_values(shaped, predictor.network, training.seed, origin)
    enough = training.parallel.pipeline * training.parallel.stages_per_rank  # their number depends on the data
    check_plan(training.parallel, model_plan(predictor.network), enough, adapted=predictor.adapted)


def rows_of_text(config: DataConfig, origin: ModelOrigin) -> Signature:
    """Return the signature that text will have once it is prepared.

    Its vocabulary size is the base's, else the maximum for the tokenizer (``data.vocabulary``).
    """
    tokens, end = TensorSpec("tokens", "int32", (config.length,)), -1 if config.across_documents else 0
    vocabulary = config.vocabulary
    if origin.model.base:
        vocabulary = with_base_shape(origin.model, config.length, origin).arguments["vocab_size"]
    return Signature((tokens,), "next token", "next token", buckets=vocabulary, document_end=end)


def probe_traits(predictor: Predictor, device: torch.device) -> ModelTraits:
    """Return a model's traits, probed on ``device``, or on the meta device if any parameter is there."""
    return probe_model(predictor, META if any(parameter.is_meta for parameter in predictor.parameters()) else device)


def micro_batch_slices(data: PreparedData, training: TrainingConfig, shares: int) -> list[slice]:
    """Return the micro-batches of one rank's padded batch, as slices.

    ``shares`` is the number of data-parallel ranks. Raises ``UserError`` if a rank has fewer rows than micro-batches.
    """
    largest = GlobalOrder(stored_blocks(data, "train"), training.rows_per_step, training.seed).largest
    share = -(-largest // shares)
    # "auto" resolves to at most one micro-batch per row, in whole rounds of a pipeline.
    most = max(1, share // training.parallel.pipeline * training.parallel.pipeline)
    number = most if training.accumulation == "auto" else training.micro_batches
    if number > share:
        raise UserError(
            f"training.accumulation: {number} micro-batches for a rank's batch of {share} "
            f"row{'s' if share > 1 else ''} (batches of {largest}, {shares} data-parallel ranks); expected at most "
            f"{share}"
        )
    return micro_batches(padded_rows(share, number), number)


def check_data(data: PreparedData, training: TrainingConfig) -> None:
    """Raise ``UserError`` if a split has no rows, or the data do not suit the goal or the augmentation."""
    for split in ("train", "validation"):
        if not sum(data.segment_rows(split)):
            raise UserError(f"data.split: no row fell into the {split} split; give more rows or larger shares")
    check_goal(training, data)
    check_augment(training, data.signature)


def check_pipeline(training: TrainingConfig, *, gpu: bool) -> None:
    """Raise ``UserError`` for pipeline stages on GPUs that communicate over gloo."""
    # torch 2.13 passes GPU addresses to gloo's point-to-point calls, which need host memory
    # (``ProcessGroupGloo::send``); its collectives copy first.
    if gpu and training.backend == "gloo" and training.parallel.pipeline > 1:
        raise UserError(
            "training.backend: gloo cannot send from one stage of a pipeline on GPUs to the next; expected auto or "
            "nccl, or training.parallel.pipeline 1"
        )


def check_divisible(training: TrainingConfig, traits: ModelTraits, precision: str) -> None:
    """Raise ``UserError`` if the model cannot be divided or compiled, or the precision does not fit a division."""
    if training.compile is True and traits.has_batch_statistics:
        raise UserError(
            "training.compile: this model has batch normalisation or buffers that change, so its batches are not "
            "padded, and every batch size would be compiled separately; expected false"
        )
    if training.parallel.divides and traits.has_batch_statistics:
        raise UserError(
            "training.parallel: this model has batch normalisation or buffers that change, which cannot be divided; "
            "expected no shard, pipeline or tensor, or layer or group normalisation instead"
        )
    if training.parallel.divides and precision == "fp16":
        raise UserError(
            "training.precision: fp16 is not allowed with training.parallel, where its loss scaling is not tested; "
            "expected bf16 or fp32"
        )


def check_parameters(model: nn.Module) -> None:
    """Raise ``UserError`` for parameters that FSDP cannot shard block by block.

    These are scalars, and parameters that several blocks share.
    """
    blocks = block_names(model)
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.ndim:
            raise UserError(
                f"training.parallel.shard: the model's parameter {name!r} is a single number without dimensions, "
                "which cannot be divided; expected none, or give it the shape [1]"
            )
        owners.setdefault(parameter, set()).add(next((b for b in blocks if name.startswith(f"{b}.")), ""))
        if len(owners[parameter]) > 1:
            raise UserError(
                f"training.parallel.shard: the model's parameter {name!r} belongs to several of its blocks, which are "
                "gathered one at a time; expected none"
            )


def check_compiler(gpu: bool) -> None:
    """Raise ``UserError`` if ``torch.compile`` lacks a compiler.

    GPUs need Triton and a C compiler, CPUs a C++ compiler (found as in ``torch/_inductor/config.py`` and
    ``triton/runtime/build.py``).
    """
    if gpu and importlib.util.find_spec("triton") is None:
        raise UserError(
            "training.compile: Triton, which compiles for GPUs, is not installed; expected false, or install Triton"
        )
    variable = "CC" if gpu else "CXX"
    usual = ["gcc", "clang"] if gpu else ["clang++" if sys.platform == "darwin" else "g++"]
    names = shlex.split(os.environ.get(variable, ""))[:1] or usual
    if not any(map(shutil.which, names)):
        raise UserError(
            f"training.compile: there is no {' or '.join(names)}; expected false, or install one, or name another in "
            f"{variable}"
        )


def why_not_fused(device: torch.device) -> str:
    """Return why the loss of tokens cannot be computed by Triton kernels on ``device``; "" if it can.

    Runs them once on a GPU, because a compiler or Python's headers may be missing.
    """
    if device.type != "cuda":
        return "not a GPU"
    try:
        check_compiler(gpu=True)
        if torch.cuda.get_device_properties(device).major < 8:
            return "the GPU has a compute capability below 8.0"
        logits = torch.zeros(1, 16, dtype=torch.bfloat16, device=device, requires_grad=True)
        token_losses(logits, torch.zeros(1, dtype=torch.int64, device=device), fused=True).sum().backward()
        synchronise_device(device)
    except UserError as error:
        return error.message
    except Exception as error:  # of many libraries
        return one_line(f"{type(error).__name__}: {error}")
    return ""


def check_memory(predictor: Predictor, training: TrainingConfig, group: RankContext, precision: str) -> None:
    """Raise ``UserError`` if parameters, gradients and optimiser state do not fit this process's device.

    Also checks free memory of this process's GPU, but not of other GPUs, whose processes may have started.
    """
    state, on = ModelState.of(predictor, training), count_nodes(group.world)
    layout = training.parallel, group.world, on, precision
    if group.device.type == "cpu":
        refuse_what_cannot_fit(state, *layout, room_of_host(group.world // on))
    elif gpu := memory_of_gpu(str(torch.cuda.get_device_properties(group.device).uuid)):
        refuse_what_cannot_fit(state, *layout, MemoryCapacity(gpu.total_bytes, gpu.label))
        refuse_if_too_small(gpu, state.of_process(*layout))
