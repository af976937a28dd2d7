"""Checkpoints: written in the background, hashed on the way, published once all ranks have stored their part, and
verified when they are read."""

from slipstream.train.checkpoint.manager import Checkpoints, Restored
from slipstream.train.checkpoint.restore import ResumePolicy, newest_identity
from slipstream.train.checkpoint.state_dicts import AppState, Stateful
from slipstream.train.homes.home import Superseded
from slipstream.train.homes.layout import Name, Retention

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
