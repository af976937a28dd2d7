"""``slipstream rehearse``: the main workflow of a profile, pod by pod on this machine."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import click

from slipstream.doctor.package import measured_save
from slipstream.plan.storm import Pace, forecast
from slipstream.profiles.profile import load
from tests.support.cluster.rehearsal import CONFIG, TARGET, literal, rehearsal, table
from tests.support.cluster.rehearse.acts import Acts
from tests.support.cluster.rehearse.shrunk import difference, shrunk
from tests.support.cluster.rehearse.timeline import write_page


@click.command()
@click.argument("profile")
@click.option("--kills", type=click.IntRange(0), default=8, show_default=True, help="How many pods are lost.")
@click.option("--seed", default=0, show_default=True, help="By which they are drawn.")
@click.option("--storm", is_flag=True, help="Instead: by simulation, what preemptions cost a training.")
@click.option("--per-day", type=float, help="Preemptions of a pod; those of the profile if it is not given.")
@click.option("--hours", default=Pace.hours, show_default=True, help="Of a training that nothing disturbs.")
@click.option("--trained", type=click.Path(path_type=Path), help="A trained model: its saves took as long.")
@click.option("--price", default=0.0, help="Of an hour of one pod.")
@click.option("--page", type=click.Path(path_type=Path), default=Path("runs/rehearsal.html"), show_default=True)
def main(profile: str, kills: int, seed: int, page: Path, storm: bool, **weather: Any) -> None:
    """Run the main workflow of PROFILE, a name or the path of a .toml, pod by pod on this machine, undisturbed and with
    pods that are lost; draw it as a page. With --storm nothing runs: it says what preemptions would cost a training.

    Example: slipstream rehearse a100-spot --kills 4
    """
    if storm:
        say(storm_over(profile, **weather))
        return
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    whole = load(profile)
    small = shrunk(whole)
    lead = difference(whole, small)
    say(lead)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as workdir, rehearsal(Path(workdir), small) as place:
        inputs = {"data": literal(table(place.bucket)), "target": literal(TARGET), "config": literal(CONFIG)}
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


def storm_over(profile: str, per_day: float | None, hours: float, trained: Path | None, price: float) -> str:
    placement = load(profile).placement("train")
    save_s = measured_save(trained).seconds if trained else Pace.save_s
    per_day = placement.preemptions_per_day if per_day is None else per_day
    return forecast(profile, placement, per_day, Pace(hours, save_s=save_s), price)


def say(line: str) -> None:
    print(line, flush=True)
