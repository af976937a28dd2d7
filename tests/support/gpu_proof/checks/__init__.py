"""The checks by subject. Each runs in its own process, on one device or on all."""
