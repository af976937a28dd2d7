"""How the work on raw data is divided among machines, which is decided once it is listed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.prepare.config import DataConfig
from slipstream.prepare.engine import find_new_files
from slipstream.prepare.images import holds_images
from slipstream.prepare.sharded.request import Division
from slipstream.prepare.source.files import Listing, SourceFile
from slipstream.prepare.source.tables import TEXT_TABLES, one_format
from slipstream.prepare.source.text.folders import as_table


def divide(data: Listing, target: str, config: DataConfig) -> Division:
    """Raises ``UserError`` for what the list of files shows to be wrong."""
    if not data.address or holds_images(data, config):
        return Division.NONE
    with TemporaryDirectory() as scratch:
        files, config = files_to_read(data, target, config, Path(scratch))
    if not files:
        return Division.NONE
    return Division.FILES if one_format(data, config, files) in TEXT_TABLES else Division.UNITS


def files_to_read(data: Listing, target: str, config: DataConfig, scratch: Path) -> tuple[list[SourceFile], DataConfig]:
    """The files of a table that are not empty and, with ``data.earlier``, are new; and the settings to read them."""
    if config.earlier:
        new = find_new_files(data, target, config, scratch)
        return new.files, new.config
    _, config = as_table(data, target, config)
    return data.filled, config
