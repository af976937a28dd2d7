"""Choice of the micro-batch count for an attempt, from settings or checkpoint directory.

``accumulation.json`` in the checkpoint directory holds the count for later attempts. It is written by rank 0 to resolve
"auto", and by a rank that ran out of memory. It applies to the same model, data, processes, layout and memory.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Annotated

import psutil
import torch
import torch.distributed as dist
import xxhash
from pydantic import Field

from slipstream.pipeline.train.checkpoint.home import DECISION, CheckpointDirectory
from slipstream.pipeline.train.checkpoint.publish import run_and_gather
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import layout_in_words
from slipstream.pipeline.train.request import TrainingRequest
from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.artifacts.records import to_json
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.distributed.process_group import Peers, RankContext
from slipstream.shared.distributed.user_errors import same_error_on_all_ranks
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import size_text
from slipstream.shared.logs import logger
from slipstream.shared.machine.limits import memory_allowed
from slipstream.shared.models.arithmetic import common_precision, device_capability
from slipstream.shared.models.base.shape import shaped_for
from slipstream.shared.settings import to_dict
from slipstream.shared.storage import storage_for

LOG = logger("train")
#: Fraction of a host's memory that tensors may take on CPUs. The remainder is for Python, libraries and the data
#: loader: an assumption.
FOR_TENSORS = 0.75


@dataclass(frozen=True)
class DecisionConditions:
    """Conditions for which a micro-batch count was found.

    ``memory`` is that of the smallest device, in bytes.
    """

    processes: int
    layout: str
    recompute: str
    precision: str
    batch_size: int
    memory: int
    #: Content digest of the prepared data.
    data: str
    #: Digest of the model's settings.
    model: str

    @classmethod
    def of(
        cls, training: TrainingConfig, processes: int, precision: str, memory: int, job: tuple[str, str]
    ) -> DecisionConditions:
        """Return the conditions of a training; ``job`` comes from :func:`data_and_model`."""
        layout = layout_in_words(training.parallel)
        return cls(processes, layout, training.recompute, precision, training.rows_per_step, memory, *job)


@dataclass(frozen=True)
class MicroBatchDecision:
    """Micro-batch count and its conditions, as in ``accumulation.json``."""

    accumulation: int
    made_for: Annotated[DecisionConditions, Field(alias="for")]
    #: Traced peak of a step in bytes; None if it was not traced.
    peak: int | None = None
    #: Micro-batch count with which a rank ran out of memory; 0 if none did.
    ran_out: int = 0
    #: Error message if no larger count is possible; otherwise "".
    refused: str = ""
    #: Execution that wrote ``refused``; "" if it has no name.
    execution: str = ""

    def write(self, home: CheckpointDirectory) -> None:
        """Write the decision to the checkpoint directory; raises the store's errors."""
        home.storage.put(DECISION, to_json(self))

    def with_known(self, known: MicroBatchDecision) -> MicroBatchDecision:
        """Merge with the stored decision ``known``, taking the larger numbers.

        If the conditions differ, or this decision has ``refused``, it is returned unchanged.
        """
        if self.refused or known.made_for != self.made_for:
            return self
        accumulation, ran_out = max(self.accumulation, known.accumulation), max(self.ran_out, known.ran_out)
        return replace(self, accumulation=accumulation, ran_out=ran_out)

    def refused_in(self, holder: Holder) -> bool:
        """Return True if the execution of ``holder`` found that no larger count is possible.

        An execution without a name counts as the same only after torchrun restarted its workers.
        """
        again = holder.execution or holder.attempt > 0
        return bool(self.refused and again) and self.execution == holder.execution

    def number_for(self, asked: int | str, made_for: DecisionConditions) -> int:
        """Return the count for the setting ``asked``, a number or "auto"; 0 if this decision does not apply."""
        if self.made_for != made_for or not 1 <= self.accumulation <= made_for.batch_size:
            return 0
        return self.accumulation if asked == "auto" or int(asked) <= self.ran_out else 0


def read_decision(home: CheckpointDirectory) -> MicroBatchDecision | None:
    """Return the decision in the checkpoint directory; None if it is absent or malformed."""
    return home.read(DECISION, MicroBatchDecision)


def with_micro_batches(
    request: TrainingRequest, group: RankContext, on_host: dist.ProcessGroup | None
) -> tuple[TrainingRequest, DecisionConditions]:
    """Return the request with its micro-batch count, and the conditions for which the count holds.

    The count comes from the checkpoint directory or the settings; for "auto" rank 0 finds and writes it. Collective.
    Raises on all ranks: ``AgreedUserError`` if no count fits, and the errors of the store.
    """
    training, peers = request.training, Peers(group.rank, group.world, on_host)
    found = peers.gather((device_capability(group.device), device_memory(group)))
    with same_error_on_all_ranks(on_host):
        precision = common_precision(training.precision, [ability for ability, _ in found])
        job = data_and_model(request) if group.rank == 0 else ("", "")
    job = peers.gather(job)[0]
    made_for = DecisionConditions.of(training, group.world, precision, min(memory for _, memory in found), job)
    number = run_and_gather(
        peers, lambda: decide_micro_batches(request, made_for, group.device.type) if group.rank == 0 else 0
    )[0]
    training = replace(training, accumulation=number)
    return replace(request, training=training, opened=request.origin), made_for


def data_and_model(request: TrainingRequest) -> tuple[str, str]:
    """Return digests of the data's content and of the model's settings without its base.

    Raises ``UserError`` for invalid data or an invalid base.
    """
    data = open_prepared(request.prepared)
    # ``start`` is a trained model, whose shape is already decided.
    model = request.model if request.start else shaped_for(request.model, data.signature, request.origin)
    settings = canonical_json({**to_dict(model), "base": ""})
    return data.artifact.content, xxhash.xxh3_128_hexdigest(settings)


def device_memory(group: RankContext) -> int:
    """Return the bytes for this process: its GPU's memory, or its part of the machine's or pod's memory."""
    if group.device.type == "cuda":
        return torch.cuda.get_device_properties(group.device).total_memory
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return int(FOR_TENSORS * (memory_allowed() or psutil.virtual_memory().total) / processes)


def decide_micro_batches(request: TrainingRequest, made_for: DecisionConditions, device: str) -> int:
    """Return the micro-batch count from the checkpoint directory, else from the settings.

    For "auto" without a stored count, finds and writes one. Raises ``UserError`` if none fits, or if this execution
    already ran out of memory with the largest possible count.
    """
    home, asked = CheckpointDirectory(storage_for(request.home)), request.training.accumulation
    decision = read_decision(home)
    number = decision.number_for(asked, made_for) if decision else 0
    if decision and number:
        if decision.refused_in(request.holder):
            raise UserError(decision.refused)
        ran_out = f": with {decision.ran_out} a rank ran out of memory" if decision.ran_out else ""
        LOG.info("training.accumulation: %s is %d, as it was before%s", asked, number, ran_out)
        return number
    if asked != "auto":
        return asked
    # The import takes half a second, and most trainings do not need it.
    from slipstream.pipeline.train.memory.automatic import found_by_trace

    found = found_by_trace(request, made_for.precision, made_for.processes, made_for.memory, device)
    number = found.job.training.micro_batches
    MicroBatchDecision(number, made_for, found.peak).write(home)
    LOG.info(
        "training.accumulation: auto is %d: a step takes %s of the %s of a device",
        number,
        size_text(found.peak or 0),
        size_text(made_for.memory),
    )
    return number
