"""Settings of named schedules, one TOML file per environment (``development.toml`` …)."""

from __future__ import annotations

import re
from dataclasses import field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeAlias

from slipstream.config import RunConfig
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.shared.cron import cron_error
from slipstream.shared.errors import UserError
from slipstream.shared.settings import Settings, settings
from slipstream.shared.source.dates import dated_address, has_date
from slipstream.shared.toml_file import read_toml

CHOICE = "SLIPSTREAM_SCHEDULES"
DEFAULT = "development"
SHIPPED = Path(__file__).parent
#: Label by which Kueue finds the queue of a job.
QUEUE = "kueue.x-k8s.io/queue-name"
LABEL = re.compile("([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
LABEL_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
Phase = Literal["succeeded", "failed", "timed_out", "aborted"]


@settings
class Notify(Settings):
    """Recipients of notifications, and the final phases of a run that cause one."""

    section = "notify"

    email: list[str] = field(default_factory=list)
    slack: list[str] = field(default_factory=list)
    on: list[Phase] = field(default_factory=lambda: ["failed", "timed_out", "aborted"])


@settings
class Schedule(Settings):
    """Settings of all kinds of schedules: the time (cron, UTC; empty: manual start only) and notifications.

    Labels and annotations are those of the execution, which propeller copies to its pods and PyTorchJobs. ``queue`` is
    the label of a Kueue queue. ``data`` may hold ``{date}``, the UTC date of the run, and ``{date-1}``, the day before.
    """

    cron: str = ""
    notify: Notify = field(default_factory=Notify)
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    service_account: str = ""
    queue: str = ""

    def check(self) -> None:
        if self.cron and (wrong := cron_error(self.cron)):
            raise UserError(f'cron: "{self.cron}" is not allowed; {wrong}')
        if self.queue and QUEUE in self.labels:
            raise self.reject("queue", f"none with the label {QUEUE}, which names it")
        for name, label in self.all_labels.items():
            if not (LABEL_NAME.fullmatch(name) and LABEL.fullmatch(label)):
                raise UserError(
                    f"labels: {name}={label} is not allowed; expected a label of Kubernetes: at most 63 letters, "
                    "digits, '-', '_' and '.'"
                )
        for name in ("data", "training_data"):
            if has_date(address := getattr(self, name, "")):
                dated_address(name, address, datetime.now(UTC))
                if not self.cron or name == "training_data":
                    raise self.reject(name, "an address without {date}: it is for the data of a schedule with cron")

    @property
    def all_labels(self) -> dict[str, str]:
        """Labels with that of the queue."""
        return {**self.labels, **({QUEUE: self.queue} if self.queue else {})}


@settings
class TrainingSchedule(Schedule):
    """Schedule of the main job.

    If ``registry`` is set, the model is promoted there if it is shown not to be worse than the current one.
    """

    kind: Literal["training"] = "training"
    data: str = ""
    target: str = ""
    registry: str = ""
    config: RunConfig = field(default_factory=RunConfig)


@settings
class CollectivesSchedule(Schedule):
    """Schedule of the interconnect benchmark."""

    kind: Literal["collectives"] = "collectives"
    config: CollectivesConfig = field(default_factory=CollectivesConfig)


@settings
class ScoringSchedule(Schedule):
    """Schedule that scores new rows with the model in production, and publishes the tables.

    If the rows drift and ``training_data`` is set, a new model is trained and promoted in the registry.
    """

    kind: Literal["scoring"] = "scoring"
    registry: str = ""
    data: str = ""
    output: str = ""
    training_data: str = ""
    target: str = ""
    config: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        super().check()
        for name in ("registry", "data", "output"):
            if self.cron and not getattr(self, name):
                raise self.reject(name, "an address, as a schedule scores by itself")


@settings
class SweepSchedule(Schedule):
    """Schedule of a hyperparameter search; a model with the best settings is trained, exported and reported.

    New data starts a new search.
    """

    kind: Literal["sweep"] = "sweep"
    data: str = ""
    target: str = ""
    config: RunConfig = field(default_factory=RunConfig)

    def check(self) -> None:
        super().check()
        if not self.config.sweep.space:
            raise UserError("config.sweep.space: is empty; expected settings to search, such as training.learning_rate")


AnySchedule: TypeAlias = TrainingSchedule | CollectivesSchedule | ScoringSchedule | SweepSchedule
KINDS: dict[str, type[AnySchedule]] = {
    "training": TrainingSchedule,
    "collectives": CollectivesSchedule,
    "scoring": ScoringSchedule,
    "sweep": SweepSchedule,
}


def environment_path(choice: str) -> Path:
    """Return the file of an environment: ``choice`` is a name (``production``) or a path to a ``.toml``."""
    return Path(choice) if choice.endswith(".toml") else SHIPPED / f"{choice}.toml"


def read_schedules(choice: str) -> dict[str, AnySchedule]:
    """Return the schedules by name, in the order of the file. Raises ``UserError`` for an invalid file or setting."""
    path = environment_path(choice)
    names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.toml")))
    missing = f"{CHOICE}={choice}: no such schedules; choose one of {names}, or a path to a .toml"
    tables = read_toml(path, missing).items()
    return {name: parse_schedule(f"{path}, [{name}]", name, table) for name, table in tables}


def parse_schedule(where: str, name: str, table: object) -> AnySchedule:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{where}: expected a name of small letters, digits and underscores")
    kind = table.get("kind") if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{where}: expected a table with a `kind`: {' or '.join(KINDS)}")
    try:
        return KINDS[kind].from_dict(table)
    except UserError as error:
        raise UserError(f"{where}: {error.message}") from None
