"""What runs by itself, and when: named schedules, of an environment one TOML file (``development.toml`` …)."""

from __future__ import annotations

import re
from dataclasses import field
from pathlib import Path
from typing import Literal, TypeAlias

from slipstream.collectives.config import CollectivesConfig
from slipstream.config import RunConfig
from slipstream.cron import flaw
from slipstream.errors import UserError
from slipstream.settings import Settings, settings
from slipstream.toml_file import BadToml, read_toml

CHOICE = "SLIPSTREAM_SCHEDULES"
DEFAULT = "development"
SHIPPED = Path(__file__).parent
Phase = Literal["succeeded", "failed", "timed_out", "aborted"]


@settings
class Notify(Settings):
    """Who hears of what."""

    section = "notify"

    email: list[str] = field(default_factory=list)
    slack: list[str] = field(default_factory=list)
    on: list[Phase] = field(default_factory=lambda: ["failed", "timed_out", "aborted"])


@settings
class Schedule(Settings):
    """What all kinds have: when (cron, UTC; empty: only when somebody starts it), and who hears of it."""

    cron: str = ""
    notify: Notify = field(default_factory=Notify)

    def check(self) -> None:
        if self.cron and (wrong := flaw(self.cron)):
            raise UserError(f'cron: "{self.cron}" is not allowed; {wrong}')


@settings
class TrainingSchedule(Schedule):
    """The main job: on what, with which configuration, and the registry in which its model goes into service if it is
    shown not to be worse than the one that is there (empty: it does not)."""

    kind: Literal["training"] = "training"
    data: str = ""
    target: str = ""
    registry: str = ""
    config: RunConfig = field(default_factory=RunConfig)


@settings
class CollectivesSchedule(Schedule):
    """The measurement of the interconnect."""

    kind: Literal["collectives"] = "collectives"
    config: CollectivesConfig = field(default_factory=CollectivesConfig)


@settings
class ScoringSchedule(Schedule):
    """The model in service in a registry on new rows, and where the tables are published. With ``training_data`` a
    model is trained anew, and promoted in the registry, if the rows drift."""

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
    """A search for settings, of which the best are trained, exported and reported: over new data it begins anew."""

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


def path_of(choice: str) -> Path:
    """The file of an environment by its name (``production``), or a file of the user's own."""
    return Path(choice) if choice.endswith(".toml") else SHIPPED / f"{choice}.toml"


def read_schedules(choice: str) -> dict[str, AnySchedule]:
    """The schedules by name, in the order of the file. Raises ``UserError`` naming the file and the setting."""
    path = path_of(choice)
    try:
        data: dict[str, object] = read_toml(path)
    except FileNotFoundError:
        names = ", ".join(sorted(file.stem for file in SHIPPED.glob("*.toml")))
        raise UserError(f"{CHOICE}={choice}: no such schedules; choose one of {names}, or a path to a .toml") from None
    except (OSError, BadToml) as error:
        raise UserError(f"{path}: the schedules cannot be read: {error}") from None
    return {name: schedule(f"{path}, [{name}]", name, table) for name, table in data.items()}


def schedule(where: str, name: str, table: object) -> AnySchedule:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise UserError(f"{where}: expected a name of small letters, digits and underscores")
    kind = table.get("kind") if isinstance(table, dict) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise UserError(f"{where}: expected a table with a `kind`: {' or '.join(KINDS)}")
    try:
        return KINDS[kind].from_dict(table)
    except UserError as error:
        raise UserError(f"{where}: {error.message}") from None
