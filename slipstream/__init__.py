"""Slipstream's engines: a package per stage, and the packages that the stages share. Plain Python; none knows Flyte."""

import os

# The wheels of ONNX Runtime send usage data to their maker, with an identifier kept in the home directory, unless this
# is set before the first import (its Privacy.md, "Disabling Telemetry").
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# The C++ side of torch warns on stderr when the reverse look-up of a loopback address fails, as it does wherever
# /etc/hosts does not name it; its errors still come through.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
