"""Table of a tuning for NCCL's example tuner plugin (``NCCL_TUNER_CONFIG_FILE``; nccl, ext-tuner/example).

The plugin uses a single channel for sizes or operations without a row, and for rows without channels. So the rows cover
all sizes of all operations, and each names its channels.
"""

from __future__ import annotations

from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.tuning import FOR_ALL_REDUCE, Tuning

HEADER = "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff"
#: Required columns, and the environment variables with which the tuner sets them.
NEEDED = {"algorithm": "NCCL_ALGO", "protocol": "NCCL_PROTO", "channels": "NCCL_MAX_CTAS"}
#: Operations that the tuner does not time; NCCL has the algorithm "ring" for all of them.
OTHERS = ("broadcast", "reduce", "allgather", "reducescatter")
LARGEST = 2**62


def plugin_csv(tuning: Tuning) -> str:
    """Return the table for the tuned hardware.

    Raises ``UserError`` unless the tuner chose algorithm, protocol and channels.
    """
    its = tuning.fingerprint
    if its.backend != "nccl":
        raise UserError(f"--nccl-csv: NCCL's plugin has no effect over {its.backend}")
    if missing := [name for name, variable in NEEDED.items() if variable not in tuning.environment]:
        raise UserError(
            f"--nccl-csv: a table names algorithm, protocol and channels of every size, and the tuner found no better "
            f"{' and '.join(missing)} than NCCL's own choice; paste the lines instead"
        )
    algorithm, protocol, channels = (tuning.environment[variable].lower() for variable in NEEDED.values())
    algorithm = algorithm.removeprefix(FOR_ALL_REDUCE)
    chosen = {"allreduce": algorithm} | dict.fromkeys(OTHERS, "ring")
    rows = [
        f"{operation},0,{LARGEST},{way},{protocol if way == algorithm else 'simple'},{channels},"
        f"{its.nodes},{its.world},-1,-1"
        for operation, way in chosen.items()
    ]
    return "\n".join([HEADER, *rows, ""])
