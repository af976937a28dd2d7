"""The Flyte tasks, one module per stage. Each hands its inputs to an engine of :mod:`slipstream` and wraps the
result."""

import os

# Locally the content-addressed store serves (slipstream/artifacts/store.py); a hit of Flyte's own local cache would run
# none of our code, so nothing could verify what it returns, or say that it was a hit.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
