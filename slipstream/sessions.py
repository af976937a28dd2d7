"""Former name of :mod:`slipstream.flytekit_plugin`, which flytekit imports where an older release was installed."""

import importlib

importlib.import_module("slipstream.flytekit_plugin")
