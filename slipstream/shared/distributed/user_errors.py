"""User errors in multi-process jobs: agreement of all ranks, missing devices, and converted torch errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from slipstream.shared.distributed.error_meanings import ErrorMeaning, error_meaning
from slipstream.shared.errors import Agreed, UserError

if TYPE_CHECKING:
    import torch.distributed as dist


#: Error message for parameters that have a gradient in some steps only.
SOMETIMES_UNUSED = (
    "model.name: some of its parameters take part in the loss of some batches only; let them take part in all, "
    "multiplied by 0 where they do not count"
)


class AgreedUserError(Agreed, UserError):
    """User error that any rank found and all ranks raise."""


@contextmanager
def same_error_on_all_ranks(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run the block on every rank; if any fails, raise the lowest failed rank's error on all ranks.

    ``UserError``, and errors that :func:`torch_user_error` converts, become ``AgreedUserError``. If only one raised,
    the others would wait in their next collective. Costs one small collective in ``group``, which must be a gloo group
    if GPU memory may be exhausted, since NCCL needs some.
    """
    import torch.distributed as dist

    mine: str | None = None
    try:
        yield
    except Exception as error:
        mistake = error if isinstance(error, UserError) else torch_user_error(error)
        if mistake is None:
            raise
        mine = mistake.message
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, mine, group=group)
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise AgreedUserError(first)


def check_gpus(processes: int, gpus: int) -> None:
    """Raise ``UserError`` if a machine has GPUs, but fewer than ``processes``."""
    if 0 < gpus < processes:
        raise UserError(
            f"{processes} processes for {gpus} GPU{'s' if gpus > 1 else ''}: each process needs one of its own; start "
            f"at most {gpus} on this machine, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )


def resolve_backend(wanted: str, gpus: int) -> str:
    """Return ``nccl`` or ``gloo``, given ``wanted`` or "auto"; raises ``UserError`` for nccl without GPUs."""
    if wanted == "nccl" and not gpus:
        raise UserError("training.backend: nccl needs a GPU for each process, and there is none; expected auto or gloo")
    return ("nccl" if gpus else "gloo") if wanted == "auto" else wanted


def torch_user_error(error: BaseException) -> UserError | None:
    """Convert a torch error to a user error with the setting to change; None if no setting helps."""
    message = str(error)
    if error_meaning(error) is ErrorMeaning.MEMORY:
        return UserError(f"training.accumulation: out of memory ({message}); raise it, or lower training.batch_size")
    if not isinstance(error, RuntimeError):
        return None
    if "does not have a deterministic implementation" in message:
        what = message.partition(" does not have")[0]
        return UserError(
            f"training.deterministic: {what} has no deterministic kernel on this device; choose another layer, or set "
            "it to false, which makes runs differ in their last bits"
        )
    if message.startswith("Expected to have finished reduction in the prior iteration"):
        return UserError(SOMETIMES_UNUSED)
    return None
