"""``python -m slipstream`` and ``torchrun -m slipstream`` are the command ``slipstream``."""

import sys

from slipstream.cli import main
from slipstream.distributed.child_processes import end_with_torch_elastic

if __name__ == "__main__":
    # Before torch is imported, which takes seconds: an agent that dies until this is called is not noticed.
    end_with_torch_elastic()
    sys.exit(main())
