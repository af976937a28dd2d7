"""The only folder of this package that imports flytekit."""

from slipstream.flyte.compat import patch_tasks

patch_tasks()
