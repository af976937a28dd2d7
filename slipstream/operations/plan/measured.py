"""Inputs of a plan: measured trainings, their attempts, and interconnect profiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.operations.plan.capacity import PastAttempt
from slipstream.shared.artifacts.format import LONGEST_MANIFEST, MANIFEST, Manifest
from slipstream.shared.artifacts.records import from_tree
from slipstream.shared.artifacts.results import ledger
from slipstream.shared.artifacts.results.ledger import TrainingFigures, read_figures
from slipstream.shared.artifacts.results.training import KIND as TRAINED
from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.profile import KIND as NETWORK
from slipstream.shared.interconnect.profile import NetworkProfile, read_profile
from slipstream.shared.storage import STORES, read_below, storage_for

SUMMARY, TRAINING = "summary.json", "training"
#: Names that older versions recorded instead of a GPU's: of a chart's line, and of a measured peak.
OLDER_NAMES = r"(rank|GPU) \d+|measured|"
EXPECTED = "expected a directory runs/…, a trained model, a checkpoint directory or a network profile"


@dataclass(frozen=True)
class MeasuredTraining:
    """Past training; seconds exclude starts, saves and steps whose work was lost."""

    name: str
    figures: TrainingFigures
    #: FLOPs per row, and peak FLOP/s of all devices together.
    flops_per_row: float
    peak_flops: float
    #: Seconds of computing (steps and evaluations), and of waiting for rows.
    computing_s: float
    waiting_s: float
    #: Mean seconds from an attempt's start to its first step, and mean seconds for which a save blocks the steps.
    start_s: float
    stall_s: float

    @property
    def processes(self) -> int:
        return self.figures.world.size

    @property
    def rows(self) -> int:
        """Rows trained on, without lost steps."""
        return self.figures.ledger.kept * self.figures.batch_size

    @property
    def memory_bytes(self) -> int:
        """Peak memory of a process in bytes; 0 if unknown."""
        return self.figures.throughput.memory_bytes if self.figures.throughput else 0

    def same_work(self, other: MeasuredTraining) -> bool:
        """Return True if a row and a step of both runs need the same computation."""
        mine, its = self.figures, other.figures
        return (mine.parameters, mine.batch_size, round(self.flops_per_row)) == (
            its.parameters,
            its.batch_size,
            round(other.flops_per_row),
        )


@dataclass
class GivenMeasurements:
    """All measurements that the user gave, in order."""

    trainings: list[MeasuredTraining] = field(default_factory=list)
    attempts: list[list[PastAttempt]] = field(default_factory=list)
    networks: list[NetworkProfile] = field(default_factory=list)


def read_evidence(places: Sequence[str]) -> GivenMeasurements:
    """Read directories of runs, trained models, checkpoint directories (also in a store) and network profiles.

    Raises ``UserError`` for anything else, and if there is no training to plan.
    """
    evidence = GivenMeasurements()
    for place in places:
        add_evidence(place, evidence)
    if not evidence.trainings:
        where = f" among {', '.join(places)}" if places else ""
        raise UserError(f"no run to start from{where}; train once and give it with --measured: runs/… or a model")
    return evidence


def add_evidence(place: str, evidence: GivenMeasurements) -> None:
    directory = Path(place)
    if place.startswith(STORES) or (directory / ledger.PREFIX).is_dir():
        evidence.attempts.append(attempts_in(place))
        return
    if (directory / SUMMARY).is_file():
        figures = figures_of_run(directory / SUMMARY)
    elif (directory / MANIFEST).is_file():
        kind = Manifest.parse(read_below(place, MANIFEST, LONGEST_MANIFEST), directory).kind
        if kind == NETWORK:
            evidence.networks.append(read_profile(directory))
            return
        if kind != TRAINED:
            raise UserError(f"{place}: an artifact of the kind {kind}; {EXPECTED}")
        figures = read_figures(directory)
    else:
        raise UserError(
            f"{place}: {'nothing of a run is there' if directory.exists() else 'does not exist'}; {EXPECTED}"
        )
    evidence.trainings.append(measured_training(place, figures))
    spans = figures.attempts
    evidence.attempts.append([PastAttempt(s.began_at, s.seconds, s.ended, figures.pods) for s in spans])


def figures_of_run(path: Path) -> TrainingFigures:
    try:
        found = parse_json(path.read_bytes())[TRAINING]
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found is None:
        raise UserError(
            f"{path}: has no record of a training (older versions did not write it); expected the directory of a "
            "whole run, or the trained model in .slipstream/train/"
        )
    figures = from_tree(found, TrainingFigures, path)
    if figures.world.device != "cpu" and re.fullmatch(OLDER_NAMES, figures.gpu):
        return replace(figures, gpu=ledger.gpu_name("", figures.throughput))
    return figures


def attempts_in(place: str) -> list[PastAttempt]:
    """Return the attempts in a checkpoint directory, or raise ``UserError``."""
    records = ledger.read_attempts(storage_for(place))
    if not records:
        raise UserError(f"{place}: no attempts in its {ledger.PREFIX}; {EXPECTED}")
    return [PastAttempt(each.began_at, each.wall, each.ended, each.pods) for each in records]


def measured_training(name: str, figures: TrainingFigures) -> MeasuredTraining:
    """Return the means that a plan needs from a training's figures.

    Raises ``UserError`` if its last attempt finished no step.
    """
    its, speed = figures.ledger, figures.throughput
    if speed is None or not its.kept or not figures.batch_size:
        raise UserError(f"{name}: its last attempt finished no step; expected a run that trained")
    kept, seconds = its.kept / its.executed, its.seconds
    saves = its.saves if its.saves is not None else its.attempts
    return MeasuredTraining(
        name=name,
        figures=figures,
        flops_per_row=speed.flops_per_row,
        peak_flops=speed.peak_flops,
        computing_s=(seconds[ledger.STEPS] + seconds[ledger.EVALUATION]) * kept,
        waiting_s=seconds[ledger.DATA_WAIT] * kept,
        start_s=(seconds[ledger.START] + seconds[ledger.RESTORE]) / its.attempts,
        stall_s=seconds[ledger.STALL] / max(1, saves),
    )
