"""Shared code of tests."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
