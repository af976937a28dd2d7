"""``python -m slipstream`` and ``torchrun -m slipstream`` are the command ``slipstream``."""

import sys

from slipstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
