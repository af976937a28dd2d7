"""Flyte task of other projects: evaluate."""

from slipstream.flyte.functions import evaluate as functions
from slipstream.flyte.functions.model_and_data import registered
from slipstream.flyte.metadata import stage_metadata

evaluate = registered(functions.evaluate, __name__, **stage_metadata("evaluate"))
