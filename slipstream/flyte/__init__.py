"""The only folder of this package that imports flytekit."""

from slipstream.flyte.compat import patch_loaded_command_line, patch_tasks
from slipstream.flyte.settings_type import register_settings

patch_tasks()
register_settings(patch_loaded_command_line)
