"""Test whether a setting is faster than the current one, from turns that time both.

A machine's load changes from second to second, so times are compared only within a turn. A setting wins only if it is
faster by at least ``MATTERS``. The level is divided by the number of settings (Bonferroni). So at most ``FALSE_ALARMS``
of all tunings without a better setting name a winner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.tuning import FOR_ALL_REDUCE, Tuning

FALSE_ALARMS = 0.01
MATTERS = 0.03
FEWEST_TURNS = 5


@dataclass(frozen=True)
class SpeedTest:
    """Result of the test; ``gain`` is current time / time with the other setting, 1 for no difference."""

    #: True if the other setting wins.
    change: bool
    gain: float
    #: Confidence interval of the gain at the Bonferroni-corrected level.
    low: float
    high: float
    turns: int
    #: Smallest gain that would be found, as a fraction.
    unseen: float

    def __str__(self) -> str:
        gain = f"{self.gain:.2f} times as fast ({self.low:.2f} to {self.high:.2f}, {self.turns} turns)"
        return gain if self.change else f"no change: {gain}; a gain of less than {self.unseen:.0%} would not be seen"


def compare_settings(in_use: Sequence[float], other: Sequence[float], tried: int) -> SpeedTest:
    """Compare two settings by their seconds in every turn; ``tried`` is the number of settings tried in all.

    The interval is Student's t for the mean logarithm of the turns' ratios. The test is one-sided at the level
    ``FALSE_ALARMS / tried``; gains below ``MATTERS`` do not count.
    """
    if len(in_use) != len(other) or len(in_use) < FEWEST_TURNS:
        raise ValueError(f"a decision takes {FEWEST_TURNS} turns of both settings, not {len(in_use)} and {len(other)}")
    ratios = np.log(np.asarray(in_use) / np.asarray(other))
    turns, middle = len(ratios), float(ratios.mean())
    quantile = float(student.ppf(1 - FALSE_ALARMS / tried, turns - 1))
    half = quantile * float(ratios.std(ddof=1)) / turns**0.5
    change = middle - half > 0 and middle >= np.log1p(MATTERS)
    gain, low, high = (float(np.exp(middle + sign * half)) for sign in (0, -1, 1))
    return SpeedTest(bool(change), gain, low, high, turns, max(MATTERS, float(np.expm1(2 * half))))


# The plugin uses a single channel for sizes or operations without a row, and for rows without channels. So the rows
# cover all sizes of all operations, and each names its channels.
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
