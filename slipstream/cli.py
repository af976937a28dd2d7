"""The command ``slipstream``. Only the subcommand that is called is imported, and its libraries with it."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the subcommand that the arguments of this process name; returns its exit code."""
    if sys.argv[1:2] == ["check"]:  # where models are served there may be no click
        from slipstream.export.check import main as check

        return check(sys.argv[2:])
    from slipstream.subcommands import slipstream

    return slipstream(prog_name="slipstream")
