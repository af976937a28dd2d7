"""The rooms of Slipstream, one per stage. In each, ``task.py`` is the door: Flyte outside, plain Python inside."""

import os

# Locally the content-addressed store serves (tasks/artifacts/store.py); a hit of Flyte's own local cache would run none
# of our code, so nothing could verify what it returns, or say that it was a hit.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
