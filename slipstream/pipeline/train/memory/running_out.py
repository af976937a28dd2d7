"""Handling of a rank that ran out of memory in a step, which is never repeated.

The rank writes a larger micro-batch count to the checkpoint directory and exits. The next attempt resumes with it from
the last checkpoint, on the same samples in the same global batches. The rank can no longer join the collective in which
its peers wait, so it acts alone; several such ranks write equal records. If a micro-batch already has one row, only
other settings or devices help, and there is no further attempt.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from slipstream.pipeline.train.checkpoint.manager import Checkpoints
from slipstream.pipeline.train.data_loader import stored_blocks
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.loop.probe import ROWS
from slipstream.pipeline.train.memory.automatic import at_least_doubled, legal_numbers
from slipstream.pipeline.train.memory.decision import DecisionConditions, MicroBatchDecision, read_decision
from slipstream.pipeline.train.request import TrainingRequest
from slipstream.pipeline.train.setup import Setup, first_of_machine
from slipstream.shared.errors import OutOfMemory, UserError
from slipstream.shared.one_line import one_line
from slipstream.shared.storage import StorageUnavailable

#: Errors of reads and writes that may succeed later.
NOT_WRITTEN = (StorageUnavailable, OSError, MemoryError)
#: Advice in messages if no step can be traced.
EXPECTED = (
    "expected training.recompute full, another training.parallel.shard, more processes, shorter rows, or devices with "
    "more memory"
)


def after_running_out(
    setup: Setup, request: TrainingRequest, made_for: DecisionConditions, checkpoints: Checkpoints, reason: str
) -> OutOfMemory | UserError:
    """Record a larger micro-batch count for the next attempt, and return the error to exit with.

    ``reason`` is torch's message. Raises ``Superseded`` if a later attempt is running.
    """
    now = setup.training.micro_batches
    more = at_least_doubled(now, possible_numbers(setup))
    what = f"rank {setup.group.rank} ran out of memory at {now} micro-batch{'es' if now > 1 else ''}"
    if more:
        return with_more(checkpoints, MicroBatchDecision(more, made_for, ran_out=now), what)
    what = f"training.accumulation: {what}, the most that are possible ({reason})"
    # Recorded before the trace, which takes long: during it this process may be killed or run out of memory.
    refusal = record_refusal(
        f"{what}; {EXPECTED}", request, MicroBatchDecision(now, made_for, ran_out=now), checkpoints
    )
    if first_of_machine(setup.group):
        with suppress(MemoryError):
            better = f"{what}; {what_helps(request, made_for, setup.group.device.type)}"
            refusal = record_refusal(better, request, MicroBatchDecision(now, made_for, ran_out=now), checkpoints)
    return UserError(refusal)


def record_refusal(
    refusal: str, request: TrainingRequest, decision: MicroBatchDecision, checkpoints: Checkpoints
) -> str:
    """Record, if possible, that no larger count is possible, and return the message ``refusal``."""
    with suppress(UserError, *NOT_WRITTEN):
        store_decision(checkpoints, replace(decision, refused=refusal, execution=request.holder.execution))
    return refusal


def with_more(checkpoints: Checkpoints, decision: MicroBatchDecision, what: str) -> OutOfMemory | UserError:
    """Write the decision for the next attempt, and return the error to exit with.

    ``what`` is the start of its message.
    """
    more, now = decision.accumulation, decision.ran_out
    try:
        more = store_decision(checkpoints, decision).accumulation
    except UserError as error:  # the store refuses permanently: no attempt would get the number
        return UserError(
            f"training.accumulation: {what}, and the next attempt cannot be set to {more} ({error.message}); expected "
            f"{more}, or a writable checkpoint directory"
        )
    except NOT_WRITTEN as error:
        given = f"if that number is set: it could not be recorded ({error})"
        return OutOfMemory(f"{what}: goes on with {more} from the last checkpoint, {given}", now)
    return OutOfMemory(f"{what}: goes on with {more} from the last checkpoint", now)


def possible_numbers(setup: Setup) -> list[int]:
    """Return the micro-batch counts that the layout, batch size and model allow."""
    training, parallel = setup.training, setup.training.parallel
    order = GlobalOrder(stored_blocks(setup.resolved.data, "train"), training.rows_per_step, training.seed)
    share = -(-order.largest // setup.layout.data_size)
    return legal_numbers(share, parallel, ROWS if setup.traits.has_batch_statistics else 1)


def store_decision(checkpoints: Checkpoints, decision: MicroBatchDecision) -> MicroBatchDecision:
    """Merge ``decision`` with the stored decision, write the result and return it.

    Raises ``Superseded`` if a later attempt is running, ``UserError`` if the store refuses permanently, and one of
    ``NOT_WRITTEN`` if another try may succeed.
    """
    home = checkpoints.home
    home.check_claim(checkpoints.attempt)
    known = read_decision(home)
    left = decision.with_known(known) if known else decision
    left.write(home)
    return left


def what_helps(request: TrainingRequest, made_for: DecisionConditions, device: str) -> str:
    """Return settings whose traced step takes less memory, as the end of a line."""
    from slipstream.pipeline.train.memory.automatic import suggest_remedies

    try:
        return suggest_remedies(request, made_for.precision, made_for.processes, made_for.memory, device)
    except (UserError, *NOT_WRITTEN) as error:
        why = one_line(str(error)) or type(error).__name__
        return f"settings that take less memory are unknown, as the step cannot be traced ({why}); {EXPECTED}"
