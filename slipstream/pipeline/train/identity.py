"""Identity of a training: the values that must equal a checkpoint's to resume it.

It covers data, model, settings, the user's model code, the base, the order of the samples and :data:`STEP_VERSION`. It
has no code version, so a training resumes after code edits. Module digests are stored separately, so that logs can name
changed modules.

If its conditions are equal too, a resumed run ends with the same bits as an uninterrupted run. Otherwise samples and
order are the same, but numbers differ by rounding, or more if a layer depends on how a batch is divided among
processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from slipstream.pipeline.train.applied_tuning import AppliedTuning
from slipstream.pipeline.train.checkpoint.manager import RestoredCheckpoint
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.config import STEP_VERSION, TrainingConfig, resume_settings
from slipstream.pipeline.train.data_order import ORDER_VERSION
from slipstream.pipeline.train.loop.state import TrainingState
from slipstream.pipeline.train.parallel.config import layout_in_words
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.versions import code_version, module_digests
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.logs import logger
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory_code import model_code
from slipstream.shared.settings import to_dict
from slipstream.shared.stages import STAGES

LOG = logger("train")
#: Maximum number of changed modules that a log line names.
NAMED = 5
#: Conditions that determine how a global batch is divided into micro-batches.
PARTITIONING = ("processes", "accumulation", "layout")


def run_identity(
    data: PreparedData,
    model: ModelConfig,
    training: TrainingConfig,
    applied: AppliedTuning | None = None,
    base_digest: str = "",
) -> dict[str, object]:
    """Return the values that must equal a checkpoint's to resume it.

    They are all that determines the result, and the applied tuning, but not the number of micro-batches, the checkpoint
    interval or the code. A base and initial adapters count by their digests. In a store the digest follows the store's
    metadata, so a copy may count as another base.
    """
    code = model_code(model)
    return {
        "data": data.artifact.content,
        "model": to_dict(model.without_addresses()),
        **({"model_code": code} if code else {}),
        **({"base": base_digest} if base_digest else {}),
        "order": ORDER_VERSION,
        "step": STEP_VERSION,
        "training": resume_settings(training),
        **({"network": asdict(applied)} if applied else {}),
    }


def training_code() -> tuple[str, dict[str, str]]:
    """Return the code version of this process and the digest of every module used in training."""
    return code_version("train"), module_digests(STAGES["train"].engines)


def describe_other_code(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Return a log line that names modules changed since a checkpoint; empty without changes."""
    changed = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
    if not changed:
        return ""
    more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
    return f"training resumes a checkpoint of other code: {', '.join(changed[:NAMED])}{more} changed since"


def log_resumption(restored: RestoredCheckpoint, state: TrainingState, policy: ResumePolicy) -> None:
    """Log the checkpoint that training resumes from, and reasons why results may differ."""
    LOG.info("training resumes from step %d (%s)", restored.step, restored.source)
    if other_code := describe_other_code(restored.modules, policy.modules):
        LOG.warning("%s", other_code)
    if not all(settings["fused"] for settings in state.optimizer.param_groups):
        LOG.info("training continues with the optimiser of this checkpoint, which is slower than the fused one")
    if changes := describe_changes(restored.progress.get("conditions", {}), state.conditions, state.model):
        LOG.warning("%s", changes)


def bit_identity_conditions(training: TrainingConfig, group: RankContext) -> dict[str, object]:
    """Return the conditions, beyond the identity, under which a resumed run is bit-identical."""
    gpu = group.device.type == "cuda"
    return {
        "processes": group.world,
        "accumulation": training.micro_batches,
        "layout": layout_in_words(training.parallel),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": group.backend,
        "device": torch.cuda.get_device_name(group.device) if gpu else torch.backends.cpu.get_cpu_capability(),
    }


def describe_changes(then: Mapping[str, object], now: Mapping[str, object], model: nn.Module) -> str:
    """Return a sentence on changed conditions since the checkpoint, and their effect; "" without changes."""
    changed = [name for name in now if name in then and then[name] != now[name]]
    if not changed:
        return ""
    changes = ", ".join(f"{name} {then[name]} -> {now[name]}" for name in changed)
    layers = batch_dependent_layers(model) if set(changed) & set(PARTITIONING) else []
    numbers = f"other numbers ({', '.join(layers)})" if layers else "numbers equal up to rounding"
    return f"training resumes, but not bit for bit ({changes}): the same samples in the same order, {numbers}"


def batch_dependent_layers(model: nn.Module) -> list[str]:
    """Return types of layers whose results depend on how a batch is divided: batch normalisation and dropout."""
    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            or (isinstance(module, _DropoutNd) and module.p > 0)
            # Attention and recurrent layers store their dropout as a number.
            or (isinstance(dropout := getattr(module, "dropout", None), float) and dropout > 0)
        }
    )
