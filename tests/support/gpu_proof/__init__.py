"""``slipstream gpu-proof`` or ``make gpu``: checks that need a GPU, in at most ten minutes."""
