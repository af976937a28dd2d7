"""Hardware profiles: the requests of every stage to the cluster, as data.

A profile is a TOML file. ``[default]`` applies to every stage. ``[distributed]`` overrides it for the process groups
(train and collectives) and, on one node, for the trials of a sweep. ``[stages.<stage>]`` overrides both for one stage.
``extends`` names another profile, which these tables override. Mappings (environment, labels) are merged by key, lists
are replaced. ``[plan]`` is never inherited.

``SLIPSTREAM_PROFILE`` (a name in ``profiles/`` or the path of a file) selects a profile when the workflow is packaged
or registered. Flyte imports the workflow again inside the pod and takes the process group's shape from it, so the
resolved profile is passed in every task's environment, where it takes precedence.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.shared.errors import UserError
from slipstream.shared.machine.gpus import visible_gpus
from slipstream.shared.profiles.placement import Placement, Planned
from slipstream.shared.settings import Settings, settings, to_dict, unknown_setting
from slipstream.shared.stages import DISTRIBUTED, STAGES
from slipstream.shared.toml_file import read_toml

CHOICE = "SLIPSTREAM_PROFILE"
RESOLVED = "SLIPSTREAM_PROFILE_RESOLVED"
BUILT_IN = Path(__file__).parent / "built_in"
#: Name of the table with the training plan, which the report compares with the training.
PLAN = "plan"
#: Key of the file with the image's libraries, and of the profile below.
VERSIONS, EXTENDS = "versions", "extends"
CPU_PROCESSES = 2
#: Maximum minutes for which the pods of a process group wait for each other; a first attempt waits half of them.
JOIN_MINUTES = 30
#: Retries for other causes than preemptions: an unavailable store, a lost worker.
OTHER_CAUSES = 2
#: Maximum average preemptions of a stage for which retries are derived: beyond it no stage makes progress.
MOST_OUTLASTED = 10_000
#: Table of a TOML file.
Table = dict[str, Any]


@settings
class ProfileFile(Settings):
    """Contents of a profile's file, before it is merged with the profile that it extends."""

    extends: str = ""
    versions: str = ""
    default: Table = field(default_factory=dict)
    distributed: Table = field(default_factory=dict)
    stages: dict[str, Table] = field(default_factory=dict)
    plan: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Profile:
    """Profile with all its tables merged.

    Where ``processes`` is 0, :meth:`placement` resolves it on the machine of the stage.
    """

    name: str
    default: Placement
    stages: Mapping[str, Placement]
    #: None unless a plan wrote it.
    plan: Planned | None = None
    #: Path of the output of ``slipstream versions`` in the image; "" for the project's constraints. Not needed in pods.
    versions: str = ""
    #: Absolute path of its file; "" for a built-in profile and in pods.
    file: str = field(default="", compare=False)

    def asked(self, stage: str) -> Placement:
        """Return the request of the stage, with ``processes`` 0 where :meth:`build_placement` would resolve it."""
        return self.stages.get(STAGES[stage].pod_of or stage, self.default)

    def placement(self, stage: str) -> Placement:
        """Return the request with the number of processes that the stage has on this machine."""
        placement = self.asked(stage)
        if placement.processes:
            return placement
        return replace(placement, processes=int(placement.gpu) or visible_gpus() or CPU_PROCESSES)

    def to_tree(self, stage: str = "") -> Table:
        """Return the tables, as JSON holds them; for the pods of ``stage`` without the environment of other stages."""
        default, stages = to_dict(self.default), {name: to_dict(placement) for name, placement in self.stages.items()}
        if stage:
            own = self.asked(stage)
            for placement, tree in ((self.default, default), *((self.stages[name], stages[name]) for name in stages)):
                if placement is not own:
                    tree["environment"] = {}
        plan = {PLAN: to_dict(self.plan)} if self.plan else {}
        return {"name": self.name, "default": default, "stages": stages, **plan}

    def to_json(self, stage: str = "") -> str:
        return json.dumps(self.to_tree(stage), sort_keys=True)


def parse_profile(name: str, data: Table) -> Profile:
    """Build and resolve a profile; raises ``UserError`` naming the wrong setting."""
    try:
        tables = ProfileFile.from_dict({key: value for key, value in data.items() if key != "name"})
    except UserError as error:
        raise UserError(f"profile {name}: {error.message}") from None
    default, stages = tables.default, tables.stages
    for stage in stages:
        if stage not in STAGES:
            raise UserError(unknown_setting(f"profile {name}.stages", stage, tuple(STAGES)))
        if other := STAGES[stage].pod_of:
            raise UserError(f"profile {name}.stages.{stage}: runs in the pod of {other}; set stages.{other} instead")
    groups: dict[str, Table] = {}
    if "distributed" in data:
        group = merge_tables(default, tables.distributed)
        groups = dict.fromkeys(DISTRIBUTED, group)
        groups |= {name: {**group, "nodes": 1} for name, stage in STAGES.items() if stage.trains_alone}
    asked = {**groups, **{stage: merge_tables(groups.get(stage, default), own) for stage, own in stages.items()}}
    try:
        of_stages = {stage: build_placement(stage, asked[stage]) for stage in STAGES if stage in asked}
        plan = Planned.from_dict(tables.plan) if PLAN in data else None
        return Profile(name, build_placement("", default), of_stages, plan, tables.versions)
    except UserError as error:
        raise UserError(f"profile {name}: {error.message}") from None


def build_placement(stage: str, data: Table) -> Placement:
    """Build a placement from settings; unset ``retries`` are derived from ``preemptions_per_day``."""
    asked = Placement.from_dict(data)
    if stage in DISTRIBUTED and asked.nodes > 1 and asked.timeout_minutes <= JOIN_MINUTES:
        raise asked.reject(
            "timeout_minutes", f"more than {JOIN_MINUTES}, for which the pods of a job wait for each other"
        )
    if "retries" in data or not asked.preemptions_per_day:
        return asked
    pods = asked.nodes if stage in DISTRIBUTED else 1
    hours = 2 * asked.timeout_minutes / 60
    if (mean := asked.preemptions_per_day * hours / 24 * pods) > MOST_OUTLASTED:
        raise asked.reject(
            "preemptions_per_day",
            f"fewer, or retries: {pods} pods are preempted {mean:.3g} times in the {hours:g} h of the stage "
            f"(twice timeout_minutes), and retries are counted for up to {MOST_OUTLASTED:,}",
        )
    return replace(asked, retries=OTHER_CAUSES + retries_for(asked.preemptions_per_day, hours, pods))


def merge_tables(below: Table, above: Table) -> Table:
    """Override ``below`` by ``above``: mappings are merged, all else is replaced."""
    joined = {
        key: merge_tables(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return {**below, **joined}


@cache
def current_profile() -> Profile:
    """Return the profile of this process: from the task's environment, else the user's choice."""
    if travelled := os.environ.get(RESOLVED):
        data = json.loads(travelled)
        return parse_profile(data["name"], data)
    return load_profile(os.environ.get(CHOICE) or "local", f"{CHOICE}=")


def load_profile(choice: str, setting: str = "") -> Profile:
    """Read a profile by name or path; raise ``UserError``, with ``setting`` before ``choice``, if it is wrong."""
    path = path_of(choice)
    found = parse_profile(path.stem, read_profile_tables(choice, (), setting))
    return found if path.parent == BUILT_IN else replace(found, file=str(path.resolve()))


def read_profile_tables(choice: str, through: tuple[Path, ...], setting: str = "") -> Table:
    """Return the tables of a profile, merged over those of the profile that it extends.

    ``through`` are the paths of the profiles that extend it, the nearest last.
    """
    path = path_of(choice, through[-1].parent if through else Path()).resolve()
    where = f"{through[-1]}: extends {choice}" if through else f"{setting}{choice}"
    if path in through:
        raise UserError(f"{where}: extends itself in a circle; remove one extends")
    missing = f"{where}: no such profile; choose one of {', '.join(profile_names())}, or a path to a .toml"
    data = read_toml(path, missing)
    try:
        tables = ProfileFile.from_dict(data)
    except UserError as error:
        raise UserError(f"{path}: {error.message}") from None
    if VERSIONS in data:
        data[VERSIONS] = str(path.parent / tables.versions)
    if EXTENDS not in data:
        return data
    below = read_profile_tables(str(data.pop(EXTENDS)), (*through, path))
    below.pop(PLAN, None)
    return merge_tables(below, data)


def path_of(choice: str, beside: Path = Path()) -> Path:
    """Return the path of a profile; a relative path is resolved against ``beside``."""
    return beside / choice if choice.endswith(".toml") else BUILT_IN / f"{choice}.toml"


def profile_names() -> list[str]:
    return sorted(file.stem for file in BUILT_IN.glob("*.toml"))


# Flyte keeps two budgets per task. A *system* failure uses the platform's budget (3 by default; the attempt after the
# last system retry runs on demand), a *user* failure uses the task's ``retries``. The preemption of a single pod is a
# system failure: it costs no retries and cannot fail the stage. The preemption of a PyTorchJob is a user failure,
# whichever pod reports it first: it costs a retry, and the next attempt stays on spot.
#: Probability that an execution is preempted no more often than it has retries.
ENOUGH = 0.99


def retries_for(preemptions_per_day: float, hours: float, pods: int) -> int:
    """Return the user retries that outlast the preemptions of a stage.

    ``preemptions_per_day`` is the rate of one pod, ``hours`` the time of the stage over all attempts, ``pods`` the
    number of pods of its job. A preempted pod ends the attempt of all pods. Preemptions are modelled as a Poisson
    process; the result is the 99 % quantile of their number. It is 0 for a single pod.
    """
    if pods == 1:
        return 0
    return poisson_quantile(preemptions_per_day * hours / 24 * pods, ENOUGH)


def poisson_quantile(mean: float, probability: float) -> int:
    """Return the smallest n with P(X <= n) >= ``probability`` for a Poisson variable X of this mean.

    Written out because importing scipy.stats would take longer than all other imports of a registration.
    """
    if mean <= 0:
        return 0
    number, at_most = 0, 0.0
    while True:
        at_most += math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))
        if at_most >= probability:
            return number
        number += 1
