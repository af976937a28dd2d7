"""Tuning: recommended settings for an interconnect and a model, with all trials (``tuning.json``)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.artifacts.records import read_record, write_record
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.profile import KIND, Fingerprint

FILE = "tuning.json"
#: Settings that affect the order in which gradients are added.
ORDER = ("bucket_cap_mb", "static_graph", "NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")
#: Variables that the tuner tries. Others in a tuning file are refused: some of NCCL's name a library to load.
VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_MAX_CTAS"),
    *("NCCL_MIN_CTAS", "NCCL_NTHREADS", "NCCL_P2P_NET_CHUNKSIZE", "NCCL_PROTO"),
)
#: Maximum characters of a variable's value, and its pattern.
SHOWN = 100
VALUE = re.compile(rf"[!-~]{{1,{SHOWN}}}")
#: Prefix that limits an algorithm in NCCL_ALGO to all_reduce. Since NCCL 2.24 an algorithm without this prefix applies
#: to all operations, and operations that lack the algorithm fail: broadcast and all_gather have no tree (nccl,
#: tuning.cc).
FOR_ALL_REDUCE = "allreduce:"
#: Name of the trial in which gradients are copied to the reduced buffers.
COPIED = "gradient_as_bucket_view=False"
TrialVerdict = Literal["taken", "no change", "may change numbers", "failed", "not tried"]


@dataclass(frozen=True)
class DdpSettings:
    """``DistributedDataParallel`` settings of the gradient exchange; the defaults are training's."""

    #: Bucket size in units of 1 << 20 bytes; None for torch's default, whose first bucket is smaller.
    bucket_cap_mb: int | None = None
    gradient_as_bucket_view: bool = True
    static_graph: bool = False
    #: "fp16": gradients are exchanged in half precision.
    hook: Literal["", "fp16"] = ""

    def __str__(self) -> str:
        changed = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(changed) or "the defaults"


def changes_numbers(setting: str, world: int) -> bool:
    """Return True if a setting can change the numerical results of a training.

    ``setting`` is a field of :class:`DdpSettings` or an environment variable. A communication hook rounds gradients.
    With three or more ranks, the order of additions matters.
    """
    return setting == "hook" or (world > 2 and setting in ORDER)


@dataclass(frozen=True)
class TuningTrial:
    """A setting compared with the best settings at that time."""

    setting: str
    verdict: TrialVerdict
    #: Previous best step time / step time with the setting, and its interval; 0 if not measured.
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0
    turns: int = 0
    #: Smallest gain that would have been found, as a fraction.
    unseen: float = 0.0
    #: Reason why it failed or was not tried.
    why: str = ""

    def __str__(self) -> str:
        if self.verdict in ("failed", "not tried"):
            return f"{self.setting}: {self.verdict}: {self.why}"
        measured = f"{self.gain:.2f} times as fast ({self.low:.2f} to {self.high:.2f}, {self.turns} turns)"
        if self.verdict == "may change numbers":
            return f"{self.setting}: {measured}, but it may change numbers: set collectives.numbers to may_change"
        seen = f"; a gain of less than {self.unseen:.0%} would not be seen" if self.verdict == "no change" else ""
        return f"{self.setting}: {self.verdict}: {measured}{seen}"


@dataclass(frozen=True)
class Tuning:
    """Contents of ``tuning.json``."""

    REMEDY: ClassVar = "tune again"
    fingerprint: Fingerprint
    #: Description of the model that was trained for the measurement.
    model: str
    ddp: DdpSettings
    #: Environment variables that libraries read at process start.
    environment: dict[str, str] = field(default_factory=dict)
    trials: tuple[TuningTrial, ...] = ()
    #: Step times for more ranks predicted by the network model, one line each.
    expected: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return self.ddp != DdpSettings() or bool(self.environment)

    def __str__(self) -> str:
        """Return the recommendation, with lines to paste, and the trials."""
        lines = [f"Steps of {self.model} between {self.fingerprint.world} processes over {self.fingerprint.backend}"]
        if not self.changes:
            lines.append(self._why_not())
        if self.ddp != DdpSettings():
            lines.append(f"DistributedDataParallel: {self.ddp}")
        lines += [f"export {name}={value}" for name, value in self.environment.items()]
        return "\n".join([*lines, *(f"  {trial}" for trial in self.trials), *self.expected])

    def _why_not(self) -> str:
        possible = [trial for trial in self.trials if trial.verdict == "may change numbers"]
        if not possible:
            unseen = [trial.unseen for trial in self.trials if trial.verdict == "no change"]
            return (
                f"no change of more than {max(unseen):.0%} was found" if unseen else "no change: no setting was tried"
            )
        best = max(possible, key=lambda trial: trial.gain)
        return (
            f"no change: no setting that keeps the numbers is faster by 3 % or more; {best.setting}, which may change "
            f"them, is {best.gain:.2f} times as fast"
        )


def check_variables(environment: Mapping[str, str], where: str) -> None:
    """Raise ``UserError`` for environment variables that the tuner would not set.

    The message names ``where`` they come from.
    """
    for name, value in environment.items():
        if name not in VARIABLES:
            raise UserError(
                f"{where}: sets the environment variable {name!r}, which the tuner never does; expected some of "
                f"{', '.join(VARIABLES)}; tune again"
            )
        if not VALUE.fullmatch(value):
            raise UserError(
                f"{where}: sets {name} to {value[:SHOWN]!r}; expected up to {SHOWN} printable characters; tune again"
            )


def write_tuning(directory: Path, tuning: Tuning, made_by: Mapping[str, object]) -> Artifact:
    """Write the artifact into the fresh ``directory``."""
    writer = ArtifactWriter(directory)
    write_record(writer, FILE, tuning)
    return writer.finish(KIND, made_by)


def read_tuning(directory: Path) -> Tuning:
    """Read a tuning.

    Raises ``UserError`` if ``directory`` holds no complete tuning of this version.
    """
    artifact = Artifact.open(directory, KIND)
    tuning = read_record(artifact, FILE, Tuning)
    check_variables(tuning.environment, str(artifact.path(FILE)))
    if any(trial.setting == COPIED and trial.verdict == "taken" for trial in tuning.trials):
        return tuning
    # Older results contain False, then the default, even if the trial with this setting was not taken.
    return replace(tuning, ddp=replace(tuning.ddp, gradient_as_bucket_view=True))
