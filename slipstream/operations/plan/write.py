"""Profile file written from a plan."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

from slipstream.operations.plan.advice import CapacityChoice
from slipstream.operations.plan.decide import SPOT, TrainingRequirements
from slipstream.operations.plan.measured import MeasuredTraining
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.placement import Planned
from slipstream.shared.profiles.profile import OTHER_CAUSES, Table, read_profile_tables
from slipstream.shared.settings import to_dict
from slipstream.shared.storage.local import cannot_write
from slipstream.shared.telemetry.prices import TYPE_LABEL

#: CPUs and GiB per GPU for an instance without a profile: assumed, not measured.
CPUS, MEMORY_GIB = 4, 16
#: Timeout of an attempt relative to the 95 % quantile of hours; it includes waits for pods.
ROOM = 2


def profile_toml(choice: CapacityChoice, planned: Planned | None = None, directory: Path = Path()) -> str:
    """Return a profile as TOML, for a file in ``directory``, with the figures of ``planned``."""
    option, outcome = choice.row.option, choice.outcome
    spot = outcome.way == SPOT
    hours = outcome.hours.high
    lines = [f"# Written by slipstream plan: {choice}; {hours:.3g} h with 95 % probability."]
    if seconds := round(outcome.between_failures_s or 0):
        lines.append(f"# In run.yaml, training.checkpoint_interval: {{mean_time_between_failures: {seconds}}}")
    own: Table = {}
    if option.profile:
        own = read_profile_tables(option.extends, ()).get("stages", {}).get("train", {})
        base = Path(option.extends)
        name = os.path.relpath(base, directory.resolve()) if base.is_absolute() else option.extends
        lines += [f"extends = {json.dumps(name, ensure_ascii=False)}", ""]
    group: dict[str, object] = (
        {}
        if option.profile
        else {
            "cpu": str(CPUS * option.gpus),
            "memory": f"{MEMORY_GIB * option.gpus}Gi",
            "shared_memory": f"{2 * option.gpus}Gi",
            "gpu": str(option.gpus),
        }
    )
    if not option.profile:
        lines.append("# cpu and memory are not measured: set them by the use of a run.")
    group |= {"nodes": option.pods, "processes": option.gpus, "interruptible": spot}
    prices = {"price_per_hour": option.price.on_demand, "spot_price_per_hour": option.price.spot}
    group |= {name: float(price) for name, price in prices.items() if price is not None}
    lines.append("[distributed]")
    lines += [f"{name} = {json.dumps(value)}" for name, value in group.items()]
    if not option.profile:
        lines.append(f'node_selector = {{ "{TYPE_LABEL}" = "{option.instance.name}" }}')
        lines += ["", "[[distributed.tolerations]]", 'key = "nvidia.com/gpu"', 'effect = "NoSchedule"']
    # Settings of its own [stages.train] would override those of [distributed].
    again = [f"{name} = {json.dumps(value)}" for name, value in group.items() if name in own]
    lines += ["", "[stages.train]", *again, f"timeout_minutes = {max(60, math.ceil(ROOM * hours * 60))}"]
    if spot and option.pods > 1:
        lines.append(f"retries = {outcome.retries + OTHER_CAUSES}")
    if planned:
        lines += ["", "# For the report, which compares it with the actual run.", "[plan]"]
        lines += [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in to_dict(planned).items()]
    return "\n".join(lines) + "\n"


def planned_figures(choice: CapacityChoice, planned: MeasuredTraining, wanted: TrainingRequirements) -> Planned | None:
    """Return the figures that the report compares with the run; None for more than one training."""
    if wanted.trials > 1:
        return None
    its = choice.outcome
    hours, dollars = ([shortened(q) for q in (of.low, of.median, of.high)] for of in (its.hours, its.dollars))
    return Planned(str(choice), wanted.rows or planned.rows, hours, dollars, shortened(its.interruptions))


def shortened(amount: float) -> float:
    return float(f"{amount:.6g}")


def write_profile(text: str, path: Path) -> None:
    """Write the profile to a new file, or raise ``UserError``."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"--write {path}: is there already; choose another name, or remove it") from None
    except OSError as error:
        raise cannot_write(path, error) from None
