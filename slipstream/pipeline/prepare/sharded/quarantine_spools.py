"""Spools of quarantined rows, which travel between machines with the values that count the rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from slipstream.pipeline.prepare.table import FittedTable, OpenedTable
from slipstream.shared.artifacts import exchange
from slipstream.shared.source.quarantine import QuarantinedRows
from slipstream.shared.untrusted_files import link_or_copy


def link_spools(bad: QuarantinedRows, directory: Path, name: str) -> QuarantinedRows:
    def linked(number: int, path: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        there = Path(f"{name}-{number:06d}.bad")
        link_or_copy(path.parent, path.name, directory / there)
        return there

    return bad.moved(linked)


def find_spools(bad: QuarantinedRows, directory: Path) -> QuarantinedRows:
    return bad.moved(lambda _, path: exchange.path_in(directory, path))


def write_opened(directory: Path, opened: OpenedTable) -> Path:
    return exchange.write_part(directory, with_linked(opened, directory))


def read_opened(directory: Path) -> OpenedTable:
    return with_found(exchange.read_part(directory, OpenedTable), directory)


def write_fitted(directory: Path, fitting: FittedTable) -> None:
    scanned = replace(fitting.scanned, bad=link_spools(fitting.scanned.bad, directory, "scanned"))
    exchange.write_part(directory, replace(fitting, opened=with_linked(fitting.opened, directory), scanned=scanned))


def read_fitted(directory: Path) -> FittedTable:
    fitting = exchange.read_part(directory, FittedTable)
    scanned = replace(fitting.scanned, bad=find_spools(fitting.scanned.bad, directory))
    return replace(fitting, opened=with_found(fitting.opened, directory), scanned=scanned)


def with_linked(opened: OpenedTable, directory: Path) -> OpenedTable:
    return replace(opened, input=replace(opened.input, bad=link_spools(opened.input.bad, directory, "opened")))


def with_found(opened: OpenedTable, directory: Path) -> OpenedTable:
    return replace(opened, input=replace(opened.input, bad=find_spools(opened.input.bad, directory)))
