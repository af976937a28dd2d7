"""Slipstream's code: a package per stage, whose ``task.py`` holds the Flyte tasks, and the packages that they share."""

import os

# Locally the content-addressed store serves (tasks/artifacts/store.py); a hit of Flyte's own local cache would run none
# of our code, so nothing could verify what it returns, or say that it was a hit.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
