"""Flytekit's place in this package: no other folder of ``slipstream/`` imports it."""
