"""What only a GPU can show, in one command of at most ten minutes: ``slipstream gpu-proof``, or ``make gpu``."""
