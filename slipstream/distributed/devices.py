"""Which devices a process group computes on, and what its processes talk by."""

from __future__ import annotations

from slipstream.errors import UserError


def check_gpus(processes: int, gpus: int) -> None:
    """Raise ``UserError`` if a machine with ``gpus`` GPUs cannot give each of its ``processes`` one."""
    if 0 < gpus < processes:
        raise UserError(
            f"{processes} processes for {gpus} GPU{'s' if gpus > 1 else ''}: each process needs one of its own; start "
            f"at most {gpus} on this machine, or hide the GPUs (CUDA_VISIBLE_DEVICES=) to compute on the CPU"
        )


def backend_of(wanted: str, gpus: int) -> str:
    """``nccl`` or ``gloo``. Raises ``UserError`` if there are no GPUs for what is ``wanted``."""
    if wanted == "nccl" and not gpus:
        raise UserError("training.backend: nccl needs a GPU for each process, and there is none; expected auto or gloo")
    return ("nccl" if gpus else "gloo") if wanted == "auto" else wanted
