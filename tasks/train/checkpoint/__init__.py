"""Checkpoints: written in the background, hashed on the way, published once all ranks have stored their part, and
verified when they are read."""

from tasks.train.checkpoint.layout import Name, Retention
from tasks.train.checkpoint.manager import Checkpoints, Restored, Stateful
from tasks.train.checkpoint.publish import Superseded
from tasks.train.checkpoint.restore import newest_identity

__all__ = ["Checkpoints", "Name", "Restored", "Retention", "Stateful", "Superseded", "newest_identity"]
