"""Flyte tasks, one module per stage; each calls an engine of :mod:`slipstream`."""

import os
import sys
from pathlib import Path

from slipstream.flyte.lazy_modules import stay_lazy

# pyflyte removes the project's root from the path after importing a workflow. Worker processes start later, inherit the
# path and import the tasks again.
sys.path.append(str(Path(__file__).parents[1]))
# Local runs use the content-addressed store (slipstream/artifacts/store.py). A hit of Flyte's local cache would run
# none of our code, so nothing could verify the result or report the hit.
os.environ.setdefault("FLYTE_LOCAL_CACHE_ENABLED", "false")
stay_lazy()
