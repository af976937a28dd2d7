"""The Flyte tasks, one module per stage: each hands its inputs to an engine of :mod:`slipstream`, and its result on."""

import os
import sys
from pathlib import Path

from tasks.flyte.lazy_modules import stay_lazy

# pyflyte has the project's root on the path while it imports a workflow, and then takes that entry out again; worker
# processes are started later, with the path that there is then, and import the tasks again.
sys.path.append(str(Path(__file__).parents[1]))
# Locally the content-addressed store serves (slipstream/artifacts/store.py); a hit of Flyte's own local cache would run
# none of our code, so nothing could verify what it returns, or say that it was a hit.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
stay_lazy()
