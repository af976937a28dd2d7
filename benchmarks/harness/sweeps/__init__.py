"""Sweeps for benchmarks: simulated ones on learning curves that are made up, and real ones on a small table."""
