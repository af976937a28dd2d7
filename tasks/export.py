"""Flyte task of this project: export."""

from slipstream.flyte.functions import export as functions
from slipstream.flyte.functions.model_and_data import registered
from slipstream.flyte.metadata import stage_metadata

export = registered(functions.export, __name__, **stage_metadata("export"))
