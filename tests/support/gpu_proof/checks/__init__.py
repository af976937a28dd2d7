"""The checks by what they look at. Each runs in a process of its own, on one device or on all."""
