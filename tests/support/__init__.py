"""What tests of different rooms share."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
