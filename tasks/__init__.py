"""Slipstream's code: a package per stage, whose ``task.py`` holds the Flyte tasks, and the packages that they share."""

import os

# Locally the content-addressed store serves (tasks/artifacts/store.py); a hit of Flyte's own local cache would run none
# of our code, so nothing could verify what it returns, or say that it was a hit.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
# The wheels of ONNX Runtime send usage data to their maker, with an identifier kept in the home directory, unless this
# is set before the first import (its Privacy.md, "Disabling Telemetry").
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# The C++ side of torch warns on stderr when the reverse look-up of a loopback address fails, as it does wherever
# /etc/hosts does not name it; its errors still come through.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
