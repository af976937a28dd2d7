"""Checkpoints: taken in the background, hashed while written, published when every rank confirmed, verified on read."""

from tasks.train.checkpoint.layout import Keep, Name
from tasks.train.checkpoint.manager import Checkpoints, Restored
from tasks.train.checkpoint.publish import Superseded

__all__ = ["Checkpoints", "Keep", "Name", "Restored", "Superseded"]
