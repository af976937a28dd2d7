"""``slipstream rehearse``: the main workflow of a profile, pod by pod on this machine."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import click

from slipstream.operations.doctor.package import measured_save
from slipstream.operations.plan.simulation import TrainingPace, preemption_table
from slipstream.operations.proofs.rehearsal.acts import Acts
from slipstream.operations.proofs.rehearsal.rehearsal import (
    CONFIG,
    TARGET,
    difference,
    literal,
    rehearsal,
    shrunk,
    write_table,
)
from slipstream.operations.proofs.rehearsal.timeline import write_page
from slipstream.shared.profiles.profile import load_profile


@click.command()
@click.argument("profile")
@click.option("--kills", type=click.IntRange(0), default=8, show_default=True, help="How many pods are lost.")
@click.option("--seed", default=0, show_default=True, help="By which they are drawn.")
@click.option("--storm", is_flag=True, help="Instead: by simulation, what preemptions cost a training.")
@click.option("--per-day", type=float, help="Preemptions of a pod; those of the profile if it is not given.")
@click.option("--hours", default=TrainingPace.hours, show_default=True, help="Of a training that nothing disturbs.")
@click.option("--trained", type=click.Path(path_type=Path), help="A trained model: its saves took as long.")
@click.option("--price", default=0.0, help="Of an hour of one pod.")
@click.option("--page", type=click.Path(path_type=Path), default=Path("runs/rehearsal.html"), show_default=True)
def main(profile: str, kills: int, seed: int, page: Path, storm: bool, **preemptions: Any) -> None:
    """Run the main workflow of PROFILE on this machine, with and without pods that are lost.

    PROFILE is a name or the path of a .toml. Every pod is a process; a page shows them over time. With --storm nothing
    runs: the command prints what preemptions would cost a training.

    Example: slipstream rehearse a100-spot --kills 4
    """
    if storm:
        say(preemption_forecast(profile, **preemptions))
        return
    whole = load_profile(profile)
    small = shrunk(whole)
    lead = difference(whole, small)
    say(lead)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as workdir, rehearsal(Path(workdir), small) as place:
        inputs = {"data": literal(write_table(place.bucket)), "target": literal(TARGET), "config": literal(CONFIG)}
        acts = Acts(place, inputs, say)
        try:
            acts.undisturbed()
            acts.again()
            acts.disturbed(seed, kills)
        finally:
            page.parent.mkdir(parents=True, exist_ok=True)
            records = {name: execution.record for name, execution in acts.executions.items()}
            write_page(page, f"Rehearsal of {whole.name}", lead, records, acts.found)
            say(f"\nTimeline  {page}")


def preemption_forecast(profile: str, per_day: float | None, hours: float, trained: Path | None, price: float) -> str:
    placement = load_profile(profile).placement("train")
    save_s = measured_save(trained).seconds if trained else TrainingPace.save_s
    per_day = placement.preemptions_per_day if per_day is None else per_day
    return preemption_table(profile, placement, per_day, TrainingPace(hours, save_s=save_s), price)


def say(line: str) -> None:
    print(line, flush=True)
