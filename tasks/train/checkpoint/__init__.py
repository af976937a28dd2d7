"""Checkpoints: written in the background, hashed on the way, published once all ranks have stored their part, and
verified when they are read."""

from tasks.train.checkpoint.manager import Checkpoints, Restored
from tasks.train.checkpoint.restore import ResumePolicy, newest_identity
from tasks.train.checkpoint.state_dicts import AppState, Stateful
from tasks.train.homes.home import Superseded
from tasks.train.homes.layout import Name, Retention

__all__ = [
    "AppState",
    "Checkpoints",
    "Name",
    "Restored",
    "ResumePolicy",
    "Retention",
    "Stateful",
    "Superseded",
    "newest_identity",
]
