"""Sweeps for benchmarks: simulated with synthetic learning curves, and real ones on the handwritten digits."""
