"""``training.accumulation: auto``: the fewest micro-batches that fit, found once for a training and then kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import psutil
import torch
import torch.distributed as dist

from slipstream.artifacts.format import canonical_json
from slipstream.artifacts.prepared.streamed import open_prepared
from slipstream.distributed.process_group import Group, Peers
from slipstream.distributed.user_errors import same_error_on_all_ranks
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.machine.limits import memory_allowed
from slipstream.models.arithmetic import ability_of, common_precision
from slipstream.models.base.shape import shaped_for
from slipstream.storage import storage_for
from slipstream.text_table import size
from slipstream.train.checkpoint.home import Home
from slipstream.train.config import TrainingConfig
from slipstream.train.data_loader import stored_blocks
from slipstream.train.data_order import GlobalOrder
from slipstream.train.memory.choices import Job, Traced, choices, trace_all, with_precision
from slipstream.train.memory.processes import Untraced
from slipstream.train.memory.remedies import USABLE, remedies
from slipstream.train.parallel.layout import nodes
from slipstream.train.setup import TrainingRequest, describe

LOG = logger("train")
#: In the home of the checkpoints, beside which it is swept.
DECISION = "accumulation.json"
NUMBER, MADE_FOR = "accumulation", "for"
#: Of a host's memory what the processes' tensors may take; Python, libraries and the data loader take the rest: an
#: assumption.
FOR_TENSORS = 0.75


def with_micro_batches(request: TrainingRequest, group: Group, on_host: dist.ProcessGroup | None) -> TrainingRequest:
    """The request with a number for "auto". Rank 0 finds it and writes it into the home of the checkpoints, or reads
    what was found there for the same processes, layout and memory. All ranks must call this; raises ``AgreedUserError``
    on all of them if none fits."""
    training = request.training
    if training.accumulation != "auto":
        return request
    peers = Peers(group.rank, group.world, on_host)
    abilities, memory = peers.gather(ability_of(group.device)), min(peers.gather(device_memory(group)))
    number = 0
    with same_error_on_all_ranks(on_host):
        precision = common_precision(training.precision, abilities)
        if group.rank == 0:
            number = decided(request, with_precision(training, precision), group.world, memory)
    return replace(request, training=replace(training, accumulation=peers.gather(number)[0]))


def device_memory(group: Group) -> int:
    """Bytes that this process may use: of its GPU, or its part of the memory of its machine or pod."""
    if group.device.type == "cuda":
        return torch.cuda.get_device_properties(group.device).total_memory
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", group.world))
    return int(FOR_TENSORS * (memory_allowed() or psutil.virtual_memory().total) / processes)


def decided(request: TrainingRequest, training: TrainingConfig, world: int, memory: int) -> int:
    """The number that the home has for such processes, else the one found now, which is written there."""
    home = Home(storage_for(request.home))
    made_for: dict[str, object] = {
        "processes": world,
        "layout": describe(training.parallel),
        "recompute": training.recompute,
        "precision": training.precision,
        "memory": memory,
    }
    record = home.read(DECISION)
    number = kept(record, made_for)
    if number:
        LOG.info("training.accumulation: auto is %d, as it was before", number)
        return number
    if request.start or request.teacher:
        raise UserError(
            "training.accumulation: a number expected where a model is compressed; auto is traced without a teacher"
        )
    data = open_prepared(request.prepared)
    largest = GlobalOrder(stored_blocks(data, "train"), training.batch_size, training.seed).largest
    model = shaped_for(request.model, data.signature)
    job = Job(model, data.signature, replace(training, batch_size=largest), world, nodes(world))
    found = fewest_that_fit(job, memory)
    number = found.job.training.micro_batches
    home.storage.put(DECISION, canonical_json({NUMBER: number, MADE_FOR: made_for, "peak": found.peak}))
    LOG.info(
        "training.accumulation: auto is %d: a step takes %s of the %s of a device",
        number,
        size(found.peak or 0),
        size(memory),
    )
    return number


def kept(record: Mapping[str, object], made_for: Mapping[str, object]) -> int:
    """The number of a record that was made for the same; 0 if it was not."""
    number = record.get(NUMBER)
    same = record.get(MADE_FOR) == made_for
    return number if same and isinstance(number, int) and number > 0 else 0


def fewest_that_fit(job: Job, memory: float) -> Traced:
    """The fewest micro-batches whose step fits into a device of so many bytes. Raises ``UserError`` with what else
    would help if none does, or if the step cannot be traced."""
    numbers = distinct(job)

    def traced(number: int) -> Traced:
        (one,) = trace_all([job.with_(number=number)])
        if isinstance(one.found, Untraced):
            reason = one.found.reason
            raise UserError(f"training.accumulation: a number expected, as the step cannot be traced: {reason}")
        return one

    first = traced(numbers[0])
    if first.fits(USABLE * memory):
        return first
    best = traced(numbers[-1])
    if not best.fits(USABLE * memory):
        raise UserError(refusal(job, best, memory))
    low, high = 0, len(numbers) - 1  # the first does not fit, the last does
    while high - low > 1:
        middle = (low + high) // 2
        one = traced(numbers[middle])
        low, high, best = (low, middle, one) if one.fits(USABLE * memory) else (middle, high, best)
    return best


def distinct(job: Job) -> list[int]:
    """The numbers of micro-batches that differ in their rows, in whole rounds of a pipeline; from the fewest on."""
    rounds = job.training.parallel.pipeline
    numbers, rows = list[int](), 0
    for number in range(job.fewest, max(job.share, job.fewest) + 1, rounds):
        each = -(-job.share // number)
        if each != rows:
            numbers.append(number)
        rows = each
    return numbers


def refusal(job: Job, leanest: Traced, memory: float) -> str:
    """One line: what does not fit, and the cheapest remedies."""
    others: dict[tuple[str, str], Job] = {}
    for one in choices(job):
        if isinstance(one, Job):  # of each way to shard and recompute the last, with the most micro-batches
            others[one.training.parallel.shard, one.training.recompute] = one
    found = enumerate(remedies(leanest.job, trace_all(list(others.values())), memory), start=1)
    number = leanest.job.training.micro_batches
    peak = size(leanest.peak or 0)
    return (
        f"training.accumulation: no number of micro-batches fits: with {number} a step takes {peak}, "
        f"and {size(USABLE * memory)} of a device's {size(memory)} may be used; cheapest first: "
        f"{'; '.join(f'{place}) {remedy}' for place, remedy in found)}"
    )
