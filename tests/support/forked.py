"""What forked processes do in tests: say what they are, or wait."""

from __future__ import annotations

import os
import time
from pathlib import Path


def told(*arguments: object) -> None:
    """What a forked process says of itself."""
    import torch

    names = ("MARK", "RANK", "PYTHONSAFEPATH")
    print(*arguments, *(os.environ.get(name, "-") for name in names), torch.get_num_threads(), Path.cwd(), flush=True)


def wait_for_long() -> None:
    from slipstream.distributed.child_processes import end_with_parent

    end_with_parent()
    time.sleep(600)
