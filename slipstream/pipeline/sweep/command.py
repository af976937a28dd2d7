"""``slipstream sweep``: list of a sweep's trials, also while it runs."""

from __future__ import annotations

import click

from slipstream.pipeline.sweep.progress import in_words
from slipstream.pipeline.sweep.records import TrialHistory
from slipstream.pipeline.sweep.space import untyped_parameters, values_in_words
from slipstream.pipeline.sweep.store import SweepStore, best_trial
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import age, aligned_table

COLUMNS = ("trial", "loss", "epochs", "time", "settings", "result")
#: Maximum characters of a trial's result, such as a failure's reason.
LONGEST = 100


@click.command()
@click.argument("store")
def main(store: str) -> None:
    """List the trials of the sweep in STORE, a directory or an address on s3://, gs:// or abfs://.

    The sweep's report and log name STORE; it is sweep.store, if that is set.

    Example: slipstream sweep .slipstream/sweeps/623239eeadbcb57d1083f48e6359a9a7
    """
    identity = SweepStore(store, ()).identity()
    if identity is None:
        raise UserError(f"{store}: holds no sweep; expected a sweep store, as printed in its report and its log")
    trials = SweepStore(store, untyped_parameters(identity.space)).trials()
    best = best_trial(trials)
    if trials:
        left = ("trial", "settings", "result")
        click.echo(aligned_table(COLUMNS, [row(trial, best is trial) for trial in trials], left))
    states = [trial.ended.state if trial.ended else "unfinished" for trial in trials]
    counted = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    click.echo(f"{len(trials)} trials{': ' if counted else ''}{counted}")


def row(trial: TrialHistory, best: bool) -> list[str]:
    ended = trial.ended
    if ended is None:
        at = f"{trial.reports[-1].progress / 1000:.1f}" if trial.reports else "-"
        loss = f"{trial.reports[-1].best:.4g}" if trial.reports else "-"
        return [str(trial.number), loss, at, "-", values_in_words(trial.values), "has not ended"]
    loss = "-" if ended.loss is None else f"{ended.loss:.4g}"
    epochs = f"{ended.curve[-1].progress / 1000:.1f}" if ended.curve else "-"
    went = "complete, the best" if best else ended.state if ended.state != "failed" else in_words(ended)
    return [
        str(trial.number),
        loss,
        epochs,
        age(ended.seconds),
        values_in_words(trial.values),
        went[:LONGEST],
    ]
