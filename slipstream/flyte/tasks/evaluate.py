"""Flyte task of other projects: evaluate."""

from slipstream.flyte.functions import evaluate as functions
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.registered import registered

evaluate = registered(functions.evaluate, __name__, **stage_metadata("evaluate"))
