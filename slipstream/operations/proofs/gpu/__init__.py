"""``slipstream gpu-proof`` and ``make gpu``: checks that need a GPU, in at most ten minutes."""
