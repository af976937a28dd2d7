"""What a rank does that ran out of memory in a step: never the step again.

It leaves a larger number of micro-batches in the home and ends, and the attempt after it goes on from the last
checkpoint with that: the same samples in the same global batches. A collective that its peers wait in is not to be
joined any more, so the rank acts alone; of several the records are equal. If a micro-batch has one row already, nothing
but other settings or devices helps, and no attempt is made again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from slipstream.errors import OutOfMemory, UserError
from slipstream.one_line import one_line
from slipstream.storage import StorageUnavailable
from slipstream.train.checkpoint.manager import Checkpoints
from slipstream.train.data_loader import stored_blocks
from slipstream.train.data_order import GlobalOrder
from slipstream.train.loop.probe import ROWS
from slipstream.train.memory.decision import Decision, MadeFor, read_decision
from slipstream.train.memory.numbers import doubled, legal_numbers
from slipstream.train.setup import Setup, TrainingRequest, first_of_machine

#: What becomes of reading and writing that may succeed another time.
NOT_WRITTEN = (StorageUnavailable, OSError, MemoryError)
#: What helps where no step can be traced to say more.
EXPECTED = (
    "expected training.recompute full, another training.parallel.shard, more processes, shorter rows, or devices with "
    "more memory"
)


def after_running_out(
    setup: Setup, request: TrainingRequest, made_for: MadeFor, checkpoints: Checkpoints, reason: str
) -> OutOfMemory | UserError:
    """What this rank ends with, once the home says what the next attempt is to do; ``reason`` is how torch put it.
    Raises ``Superseded`` if that is at work already."""
    now = setup.training.micro_batches
    more = doubled(now, possible_numbers(setup))
    what = f"rank {setup.group.rank} ran out of memory at {now} micro-batch{'es' if now > 1 else ''}"
    if more:
        return with_more(checkpoints, Decision(more, made_for, ran_out=now), what)
    what = f"training.accumulation: {what}, the most that are possible ({reason})"
    # First without a trace, which takes long: this process may be ended meanwhile, or want for memory again.
    refusal = refuse(f"{what}; {EXPECTED}", request, Decision(now, made_for, ran_out=now), checkpoints)
    if first_of_machine(setup.group):
        with suppress(MemoryError):
            better = f"{what}; {what_helps(request, made_for)}"
            refusal = refuse(better, request, Decision(now, made_for, ran_out=now), checkpoints)
    return UserError(refusal)


def refuse(refusal: str, request: TrainingRequest, decision: Decision, checkpoints: Checkpoints) -> str:
    """Leave it in the home, if that can be written, that no further number helps. Returns ``refusal``."""
    with suppress(UserError, *NOT_WRITTEN):
        leave(checkpoints, replace(decision, refused=refusal, execution=request.holder.execution))
    return refusal


def with_more(checkpoints: Checkpoints, decision: Decision, what: str) -> OutOfMemory | UserError:
    """What a rank ends with that left this for the next attempt; ``what`` happened."""
    more, now = decision.accumulation, decision.ran_out
    try:
        more = leave(checkpoints, decision).accumulation
    except UserError as error:  # the home refuses, and would again: no attempt would know
        return UserError(
            f"training.accumulation: {what}, and the next attempt cannot be told to take {more} ({error.message}); "
            f"expected {more}, or a home of checkpoints that can be written"
        )
    except NOT_WRITTEN as error:
        given = f"if that is given: it could not be written down ({error})"
        return OutOfMemory(f"{what}: goes on with {more} from the last checkpoint, {given}", now)
    return OutOfMemory(f"{what}: goes on with {more} from the last checkpoint", now)


def possible_numbers(setup: Setup) -> list[int]:
    """The numbers of micro-batches that are possible."""
    training, parallel = setup.training, setup.training.parallel
    order = GlobalOrder(stored_blocks(setup.data, "train"), training.batch_size, training.seed)
    share = -(-order.largest // setup.layout.data_size)
    return legal_numbers(share, parallel, ROWS if setup.traits.has_batch_statistics else 1)


def leave(checkpoints: Checkpoints, decision: Decision) -> Decision:
    """Write it into the home, with what that knows of the same already. Returns what is there now. Raises
    ``Superseded`` if a later attempt is at work, ``UserError``, or one of ``NOT_WRITTEN``."""
    home = checkpoints.home
    home.check_claim(checkpoints.attempt)
    known = read_decision(home)
    left = decision.with_known(known) if known else decision
    left.write(home)
    return left


def what_helps(request: TrainingRequest, made_for: MadeFor) -> str:
    """The end of a line: settings whose step takes less by its trace, if it can be traced."""
    from slipstream.train.memory.automatic import leaner

    try:
        return leaner(request, made_for.precision, made_for.processes, made_for.memory)
    except (UserError, *NOT_WRITTEN) as error:
        why = one_line(str(error)) or type(error).__name__
        return f"what takes less is not known, as the step cannot be traced ({why}): {EXPECTED}"
