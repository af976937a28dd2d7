"""The command ``slipstream``. Only the subcommand that is called is imported, and its libraries with it."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run the subcommand that the arguments of this process name; returns its exit code."""
    # As with ``python -m``: factories of models, workflows and tests are found from the working directory.
    if sys.path[0] not in ("", here := str(Path.cwd())):
        sys.path.insert(0, here)
    if sys.argv[1:2] == ["check"]:  # where models are served there may be no click
        from slipstream.export.check import main as check

        return check(sys.argv[2:])
    from slipstream.subcommands import slipstream

    return slipstream(prog_name="slipstream")
