"""Resources of stages: accelerators, spot capacity, retries."""
