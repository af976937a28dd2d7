"""How many micro-batches the attempts at a training take: as many as its settings say, or as its home does.

``accumulation.json`` in the home of the checkpoints is written by rank 0, which finds a number for "auto", and by a
rank that ran out of memory, for the attempts after it. It counts for the same model and data, on as many processes with
the same layout and memory.
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

from slipstream.artifacts.format import canonical_json
from slipstream.artifacts.homes import Holder
from slipstream.artifacts.prepared.streamed import open_prepared
from slipstream.artifacts.records import to_json
from slipstream.distributed.process_group import Group, Peers
from slipstream.distributed.user_errors import same_error_on_all_ranks
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.machine.limits import memory_allowed
from slipstream.models.arithmetic import ability_of, common_precision
from slipstream.models.base.shape import shaped_for
from slipstream.settings import to_dict
from slipstream.storage import storage_for
from slipstream.text_table import size
from slipstream.train.checkpoint.home import DECISION, Home
from slipstream.train.checkpoint.publish import run_and_gather
from slipstream.train.config import TrainingConfig
from slipstream.train.setup import TrainingRequest, describe

LOG = logger("train")
#: Of a host's memory what the processes' tensors may take; Python, libraries and the data loader take the rest: an
#: assumption.
FOR_TENSORS = 0.75


@dataclass(frozen=True)
class MadeFor:
    """What a number of micro-batches was found for. ``memory`` is that of the smallest device, in bytes."""

    processes: int
    layout: str
    recompute: str
    precision: str
    batch_size: int
    memory: int
    #: The content of the prepared data, and a digest of the model's settings.
    data: str
    model: str

    @classmethod
    def of(cls, training: TrainingConfig, processes: int, precision: str, memory: int, job: tuple[str, str]) -> MadeFor:
        """``job`` is what :func:`data_and_model` returns."""
        layout = describe(training.parallel)
        return cls(processes, layout, training.recompute, precision, training.batch_size, memory, *job)


@dataclass(frozen=True)
class Decision:
    """A number of micro-batches, and what it was found for."""

    accumulation: int
    made_for: Annotated[MadeFor, Field(alias="for")]
    #: Bytes that a step was traced to take; None if it was not.
    peak: int | None = None
    #: The number with which a rank ran out of memory; 0: none did.
    ran_out: int = 0
    #: Why no further number helps, and the execution that found it out; "" if that is not known.
    refused: str = ""
    execution: str = ""

    def write(self, home: Home) -> None:
        """Raises as the store of the home."""
        home.storage.put(DECISION, to_json(self))

    def with_known(self, known: Decision) -> Decision:
        """This and what is known of the same: the larger numbers, unless this says that no larger one is possible."""
        if self.refused or known.made_for != self.made_for:
            return self
        accumulation, ran_out = max(self.accumulation, known.accumulation), max(self.ran_out, known.ran_out)
        return replace(self, accumulation=accumulation, ran_out=ran_out)

    def refused_in(self, holder: Holder) -> bool:
        """Whether the execution of ``holder`` found out that no further number helps. Of those without a name it is
        taken to be the same if the workers were started again."""
        again = holder.execution or holder.attempt > 0
        return bool(self.refused and again) and self.execution == holder.execution

    def number_for(self, asked: int | str, made_for: MadeFor) -> int:
        """The number to take where the settings ask for so many or for "auto"; 0 if this says nothing of that."""
        if self.made_for != made_for or not 1 <= self.accumulation <= made_for.batch_size:
            return 0
        return self.accumulation if asked == "auto" or int(asked) <= self.ran_out else 0


def read_decision(home: Home) -> Decision | None:
    """What the home says; None if nothing, or nothing that this version reads."""
    return home.read(DECISION, Decision)


def with_micro_batches(
    request: TrainingRequest, group: Group, on_host: dist.ProcessGroup | None
) -> tuple[TrainingRequest, MadeFor]:
    """The request with the number of the home or of its settings, and what such a number is for; for "auto" rank 0
    finds one and writes it. All ranks must call this; raises ``AgreedUserError`` on all of them if none fits, and on
    all as the store of the home."""
    training, peers = request.training, Peers(group.rank, group.world, on_host)
    found = peers.gather((ability_of(group.device), device_memory(group)))
    with same_error_on_all_ranks(on_host):
        precision = common_precision(training.precision, [ability for ability, _ in found])
        job = data_and_model(request) if group.rank == 0 else ("", "")
    job = peers.gather(job)[0]
    made_for = MadeFor.of(training, group.world, precision, min(memory for _, memory in found), job)
    number = run_and_gather(peers, lambda: decide(request, made_for) if group.rank == 0 else 0)[0]
    return replace(request, training=replace(training, accumulation=number)), made_for


def data_and_model(request: TrainingRequest) -> tuple[str, str]:
    """Return the content of the data, and a digest of the model's settings, wherever its base lies.

    Raises ``UserError`` for data or a base that is not what it should be.
    """
    data = open_prepared(request.prepared)
    # A model that training goes on from has its own shape.
    model = request.model if request.start else shaped_for(request.model, data.signature)
    settings = canonical_json({**to_dict(model), "base": ""})
    return data.artifact.content, xxhash.xxh3_128_hexdigest(settings)


def device_memory(group: Group) -> int:
    """Bytes that this process may use: of its GPU, or its part of the memory of its machine or pod."""
    if group.device.type == "cuda":
        return torch.cuda.get_device_properties(group.device).total_memory
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return int(FOR_TENSORS * (memory_allowed() or psutil.virtual_memory().total) / processes)


def decide(request: TrainingRequest, made_for: MadeFor) -> int:
    """The number that the home has for such processes, else that of the settings; for "auto" the one that is found now
    and written there. Raises ``UserError`` if none fits, or if this execution ran out of memory with the last one."""
    home, asked = Home(storage_for(request.home)), request.training.accumulation
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
    # Half a second, which most trainings need not spend.
    from slipstream.train.memory.automatic import found_by_trace

    found = found_by_trace(request, made_for.precision, made_for.processes, made_for.memory)
    number = found.job.training.micro_batches
    Decision(number, made_for, found.peak).write(home)
    LOG.info(
        "training.accumulation: auto is %d: a step takes %s of the %s of a device",
        number,
        size(found.peak or 0),
        size(made_for.memory),
    )
    return number
