"""Training throughput and model FLOPs utilisation (MFU).

MFU (Chowdhery et al. 2022, PaLM, appendix B) is the number of FLOPs that the model's forward and backward passes need,
divided by what the devices could compute in that time. Recomputation and the optimiser do not count.
"""

from __future__ import annotations

import resource
import sys
import time

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.shared.artifacts.results.training import Throughput
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.machine.gpus import data_sheet_peak

#: Width of the square matrices in timed matmuls (on a CPU, on a GPU), and number of matmuls.
WIDTH, GPU_WIDTH, PRODUCTS = 512, 4096, 8
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_throughput(
    *, rows: int, seconds: float, tokens_per_row: int, flops_per_row: float, kind: str, group: RankContext
) -> Throughput | None:
    """Return the throughput of ``rows`` that all ranks trained on in ``seconds``; None without rows.

    ``kind`` is the type of computation: "fp32", "tf32", "bf16" or "fp16". All ranks must call this.
    """
    if not rows or seconds <= 0:
        return None
    name = torch.cuda.get_device_name(group.device) if group.device.type == "cuda" else "cpu"
    known = data_sheet_peak(name, kind)
    memory = largest_memory(group.device)  # before the matmuls, which need memory themselves
    mine = [known or measured_peak(group.device, kind), memory]
    figures = torch.tensor(mine, dtype=torch.float64, device=group.device)
    gathered = [torch.empty_like(figures) for _ in range(group.world)]
    dist.all_gather(gathered, figures)
    peaks, memories = torch.stack(gathered).cpu().unbind(dim=1)
    per_second = rows / seconds
    return Throughput(
        rows_per_s=per_second,
        flops_per_row=flops_per_row,
        peak_flops=peaks.sum().item(),
        peak_from=f"the data sheet of {name}" if known else "measured",
        utilisation=per_second * flops_per_row / peaks.sum().item(),
        memory_bytes=int(memories.max().item()),
        tokens_per_s=per_second * tokens_per_row if tokens_per_row else None,
    )


def measured_peak(device: torch.device, kind: str) -> float:
    """Return the FLOP/s of the fastest of several large matmuls."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the memory left by training is enough
    width = GPU_WIDTH if device.type == "cuda" else WIDTH
    one: Tensor = torch.ones(width, width, dtype=DTYPES[kind], device=device)
    best = float("inf")
    for _ in range(PRODUCTS):
        synchronise_device(device)
        started = time.perf_counter()
        one @ one
        synchronise_device(device)
        best = min(best, time.perf_counter() - started)
    return 2 * width**3 / best


def largest_memory(device: torch.device) -> int:
    """Return this process's peak memory in bytes: of tensors on a GPU, else its resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # ``ru_maxrss`` is in KiB, on macOS in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def synchronise_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
