"""Command ``slipstream``, also as ``python -m slipstream`` and ``torchrun -m slipstream``.

Only the called subcommand and its libraries are imported.
"""

import sys


def main() -> int:
    """Run the subcommand that this process's arguments name and return its exit code."""
    if sys.argv[1:2] == ["check"]:  # click may be missing where models are served
        from slipstream.pipeline.export.check import main as check

        return check(sys.argv[2:])
    from slipstream.subcommands import slipstream

    return slipstream(prog_name="slipstream")


if __name__ == "__main__":
    from slipstream.shared.distributed.child_processes import end_with_torch_elastic

    # Before torch is imported, which takes seconds: until this call a dying agent goes unnoticed.
    end_with_torch_elastic()
    sys.exit(main())
