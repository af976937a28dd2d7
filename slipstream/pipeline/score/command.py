"""``slipstream score``: list published tables and copy the newest."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from slipstream.pipeline.score.publish import DamagedTable, fetch_table, list_publications, read_scored, verify_table
from slipstream.shared.artifacts.results.scoring import DriftFigures, ScoredTable
from slipstream.shared.artifacts.workspaces import put_in_place
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import numbered_line
from slipstream.shared.storage import cannot_write


@click.command()
@click.argument("output")
@click.option(
    "--fetch", "fetched", type=click.Path(path_type=Path), help="Fetch the newest table into this new directory."
)
@click.option("--verify", is_flag=True, help="Read and verify all bytes of the newest table.")
def main(output: str, fetched: Path | None, verify: bool) -> None:
    """List the scored tables in OUTPUT, the newest last.

    OUTPUT is a directory, or a store's address. The files of the newest table are checked.

    Example: slipstream score s3://scores/churn --fetch scored/
    """
    tables = list_publications(output)
    if not tables:
        raise UserError(f"{output}: no scored table was published yet; expected an output that scoring has filled")
    for number, publication in enumerate(tables, start=1):
        try:
            table = described(read_scored(output, publication))
        except DamagedTable as damage:
            table = (publication.key, f"model {publication.model}", f"damaged: {damage}")
        click.echo(numbered_line(number, (publication.at, *table)))
    verify_table(output, tables[-1], verify)
    if fetched:
        if fetched.exists():
            raise UserError(f"--fetch: {fetched} already exists; expected a directory that does not")
        try:
            fetched.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=fetched.parent, prefix=".fetch-") as scratch:
                put_in_place(fetch_table(output, tables[-1], Path(scratch, "table")).directory, fetched)
        except OSError as error:
            raise cannot_write(fetched.parent, error) from None
        click.echo(f"newest: {fetched}")


def described(table: ScoredTable) -> tuple[str, str, str]:
    aside = f", {table.set_aside:,} quarantined" if table.set_aside else ""
    return table.key, f"model {table.model}", f"{table.scored:,} rows{aside}; {in_words(table.drift)}"


def in_words(drift: DriftFigures) -> str:
    if drift.why_unknown:
        return "drift unknown"
    return f"drift in {', '.join(each.name for each in drift.alarms)}" if drift.alarms else "no drift"
