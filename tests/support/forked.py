"""Bodies of forked processes in tests: report themselves, or wait."""

import gc
import os
import time
from pathlib import Path


def told(*arguments: object) -> None:
    """What a forked process says of itself."""
    import torch

    names = ("MARK", "RANK", "PYTHONSAFEPATH")
    print(*arguments, *(os.environ.get(name, "-") for name in names), torch.get_num_threads(), Path.cwd(), flush=True)


def wait_for_long() -> None:
    from slipstream.shared.distributed.child_processes import end_with_parent

    end_with_parent()
    time.sleep(600)


def collect_garbage() -> None:
    """How many objects a collection leaves alone, and the memory (KiB) that this process has to itself before and
    after one."""
    before = private_kib()
    gc.collect()
    print(gc.get_freeze_count(), before, private_kib(), flush=True)


def private_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
