"""``slipstream telemetry``: live view of a stage's devices, host, ranks and bottlenecks."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from slipstream.shared.artifacts.workspaces import STORE
from slipstream.shared.errors import UserError, one_line
from slipstream.shared.formatting import age
from slipstream.shared.telemetry.ring import newest_sample
from slipstream.shared.telemetry.view.page import TelemetrySnapshot, page_lines
from slipstream.shared.telemetry.watch import SAMPLES

REFRESH_S = 1.0
#: Terminal codes: move to the upper left corner, clear to the end of the line, clear to the end of the screen.
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


@dataclass(frozen=True)
class StageSamples:
    """Sample directory of a stage; ``at`` is the time of its last sample, seconds since 1970, UTC."""

    directory: Path
    at: float


def stages_in(directory: Path) -> list[StageSamples]:
    """Return the stages with samples, newest first.

    These are ``directory`` itself if it has samples, else its subdirectories. Raises ``UserError`` if none has samples.
    """
    expected = "expected one stage's samples, or a directory of such: .slipstream/telemetry where a workflow was run"
    if not directory.is_dir():
        what = "is no directory" if directory.exists() else "does not exist"
        raise UserError(f"{directory} {what}; {expected}")
    own = newest_sample(directory)
    if own:
        return [StageSamples(directory, own.at)]
    try:
        below = [path for path in directory.iterdir() if path.is_dir()]
    except OSError as error:
        raise UserError(f"{directory} cannot be read: {error.strerror}; {expected}") from None
    found = [StageSamples(path, sample.at) for path in below if (sample := newest_sample(path))]
    if not found:
        raise UserError(f"{directory} has no samples; {expected}")
    return sorted(found, key=lambda stage: -stage.at)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), default=STORE / SAMPLES)
def main(directory: Path) -> None:
    """Show devices, host, ranks and bottlenecks of a stage.

    On a terminal the page is refreshed every second until the stage has ended; otherwise it is printed once.

    DIRECTORY holds the samples of one stage, or of several stages; the newest is shown. The default is
    .slipstream/telemetry, where workflows on this machine write. In a pod the samples lie in the task's working
    directory, whose name only Flyte knows; find it with kubectl exec -it POD -- sh -c and the example in quotes.

    Example: slipstream telemetry /tmp/flyte*/sandbox/local_flytekit/*/telemetry
    """
    stage, *others = stages_in(directory)
    if sys.stdout.isatty():
        follow_stage(stage, others)
        return
    shown = look_at(stage)
    click.echo("\n".join([*page_lines(shown), *listed(others, shown.now)]))


def follow_stage(stage: StageSamples, others: Sequence[StageSamples]) -> None:
    """Redraw the stage's page in place until the stage has ended, or until Ctrl-C."""
    try:
        while not draw_page(stage, others):
            time.sleep(REFRESH_S)
    except KeyboardInterrupt:
        click.echo()


def draw_page(stage: StageSamples, others: Sequence[StageSamples]) -> bool:
    """Draw the current page and return True if the stage has ended.

    A running stage's page is cut to the terminal's size, so that it does not scroll.
    """
    shown, size = look_at(stage), shutil.get_terminal_size()
    lines = [*page_lines(shown, size.columns), *listed(others, shown.now)]
    if not shown.has_ended:
        lines = [line[: size.columns] for line in lines[: size.lines - 1]]
    sys.stdout.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW)
    sys.stdout.flush()
    return shown.has_ended


def look_at(stage: StageSamples) -> TelemetrySnapshot:
    """Return a current snapshot.

    Raises ``UserError`` if the samples were removed meanwhile.
    """
    shown = TelemetrySnapshot.of(stage.directory, time.time())
    if not shown.samples:
        raise UserError(f"{stage.directory} has no samples any more, as only those of the last runs are kept")
    return shown


def listed(others: Sequence[StageSamples], now: float) -> list[str]:
    names = [f"  {one_line(stage.directory.name)}  {age(now - stage.at)} ago" for stage in others]
    return ["", "older:", *names] if names else []
