"""``python -m tests.support.cluster PROFILE`` rehearses the main workflow of a profile here, and draws it."""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path

from tasks.errors import UserError
from tasks.hardware.profile import load
from tests.support.cluster.acts import Acts
from tests.support.cluster.rehearsal import CONFIG, TARGET, literal, rehearsal, table
from tests.support.cluster.shrunk import difference, shrunk
from tests.support.cluster.timeline import write_page


def main() -> None:
    parser = argparse.ArgumentParser(prog="make rehearse", description=__doc__)
    parser.add_argument("profile", help="a name in tasks/hardware/profiles, or the path of a .toml")
    parser.add_argument("--kills", type=int, default=8, help="how many pods are lost (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="by which they are drawn (%(default)s)")
    parser.add_argument("--page", type=Path, default=Path("runs/rehearsal.html"), help="the drawing (%(default)s)")
    options = parser.parse_args()
    if options.kills < 0:
        parser.error(f"--kills: {options.kills}; expected none or more")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        whole = load(options.profile)
    except UserError as error:
        parser.error(error.message)
    small = shrunk(whole)
    lead = difference(whole, small)
    say(lead)
    with tempfile.TemporaryDirectory(prefix="rehearsal-") as workdir, rehearsal(Path(workdir), small) as place:
        inputs = {"data": literal(table(place.bucket)), "target": literal(TARGET), "config": literal(CONFIG)}
        acts = Acts(place, inputs, say)
        try:
            acts.undisturbed()
            acts.again()
            acts.disturbed(options.seed, options.kills)
        finally:
            options.page.parent.mkdir(parents=True, exist_ok=True)
            records = {name: execution.record for name, execution in acts.executions.items()}
            write_page(options.page, f"Rehearsal of {whole.name}", lead, records, acts.found)
            say(f"\nTimeline  {options.page}")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
