"""Flyte task of this project: export."""

from slipstream.flyte.functions import export as functions
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.registered import registered

export = registered(functions.export, __name__, **stage_metadata("export"))
