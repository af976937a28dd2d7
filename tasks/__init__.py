"""The Flyte tasks, one module per stage: each hands its inputs to an engine of :mod:`slipstream`, and its result on."""

import os
import sys
from pathlib import Path

# pyflyte has the project's root on the path while it imports a workflow, and no longer; worker processes, which are
# started later and take over the path, import the tasks again.
if (root := str(Path(__file__).parents[1])) not in sys.path:
    sys.path.append(root)
# Locally the content-addressed store serves (slipstream/artifacts/store.py); a hit of Flyte's own local cache would run
# none of our code, so nothing could verify what it returns, or say that it was a hit.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
