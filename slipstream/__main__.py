"""The command ``slipstream``, also as ``python -m slipstream`` and ``torchrun -m slipstream``.

Only the subcommand that is called is imported, and its libraries with it.
"""

import sys


def main() -> int:
    """Run the subcommand that the arguments of this process name; return its exit code."""
    if sys.argv[1:2] == ["check"]:  # where models are served there may be no click
        from slipstream.export.check import main as check

        return check(sys.argv[2:])
    from slipstream.subcommands import slipstream

    return slipstream(prog_name="slipstream")


if __name__ == "__main__":
    from slipstream.distributed.child_processes import end_with_torch_elastic

    # Before torch is imported, which takes seconds: an agent that dies until this is called is not noticed.
    end_with_torch_elastic()
    sys.exit(main())
