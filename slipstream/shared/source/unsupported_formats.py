"""Unsupported formats of files and directories, with hints for converting them to a table."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

SPREADSHEET = "is a spreadsheet; save the sheet as CSV, or read it with pandas.read_excel and write it with to_parquet"
ARCHIVE = "is an archive of files; unpack it, and give the directory"
DATABASE = "is a database; write the table with pandas.read_sql and to_parquet"
PANDAS = "is in a table format that is not supported; write it with to_parquet of pandas"
PICKLE = "is a pickle, which may run code when it is read; write its content with to_parquet of pandas"
JSON = (
    "is JSON: if there is one object on each line, set data.format to json; if it is one list of objects, write one on "
    "each line (jq -c '.[]' < file.json > file.jsonl)"
)

EXTENSIONS = {
    **dict.fromkeys((".xlsx", ".xls", ".xlsm", ".xlsb", ".ods", ".numbers"), SPREADSHEET),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), ARCHIVE),
    **dict.fromkeys((".db", ".sqlite", ".sqlite3", ".duckdb"), DATABASE),
    **dict.fromkeys((".h5", ".hdf5", ".orc", ".avro", ".dta", ".sav", ".sas7bdat", ".npy"), PANDAS),
    **dict.fromkeys((".pkl", ".pickle"), PICKLE),
    ".json": JSON,
}
COMPRESSED = "is compressed, but its name has no extension for that; add {} to its name"
#: First bytes of formats, checked under any file name. Current spreadsheets are ZIP archives, older ones OLE documents.
BEGINNINGS = {
    b"PK\x03\x04": "is a spreadsheet or an archive; save the sheet as CSV, or unpack it and give the directory",
    b"\xd0\xcf\x11\xe0": SPREADSHEET,
    b"SQLite format 3\0": DATABASE,
    b"\x89HDF": PANDAS,
    b"Obj\x01": PANDAS,
    b"ORC": PANDAS,
    b"PAR1": "is Parquet; rename it to .parquet, or set data.format to parquet",
    b"ARROW1": "is an Arrow file; rename it to .arrow, or set data.format to arrow",
    b"FEA1": "is Feather of version 1; write it again with pyarrow.feather.write_feather",
    b"\xff\xff\xff\xff": "is an Arrow stream; write it as an Arrow file (pyarrow.ipc.new_file) or as Parquet",
    b"\x1f\x8b": COMPRESSED.format(".gz"),
    **dict.fromkeys((b"BZh%d1AY&SY" % level for level in range(1, 10)), COMPRESSED.format(".bz2")),
    b"\x28\xb5\x2f\xfd": COMPRESSED.format(".zst"),
    b"\xff\xfe": 'is UTF-16; set data.encoding to "utf-16"',
    b"\xfe\xff": 'is UTF-16; set data.encoding to "utf-16"',
}
#: Number of first bytes from which a format is recognised.
MOST_BEGINNING = 32
#: Control characters, which occur in files of these formats but not in text.
CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f]")


def unsupported_extension(name: str) -> str:
    """Return the error text for an unsupported file extension, with a hint; "" for other extensions."""
    return next((EXTENSIONS[s] for s in map(str.lower, reversed(Path(name).suffixes[-2:])) if s in EXTENSIONS), "")


def unsupported_beginning(data: bytes) -> str:
    """Return the error text for an unsupported file that starts with ``data``, with a hint; "" if unknown.

    A signature of letters only may start a column name (ORC in ORCID), so ``data`` must also have a control character.
    """
    found = next((mark for mark in BEGINNINGS if data.startswith(mark)), b"")
    return "" if found.isalnum() and not CONTROL.search(data) else BEGINNINGS.get(found, "")


#: Tables whose own log says which files hold their rows, by a name in their directory, and how to read them.
LOGGED = {
    "_delta_log": ("a Delta Lake table", "deltalake.DeltaTable(...).to_pandas()"),
    ".hoodie": ("a Hudi table", 'Spark and its format "hudi"'),
    "metadata": ("an Iceberg table", "pyiceberg"),
    "_spark_metadata": ("written by a Spark stream", "spark.read.parquet(...)"),
}
IN_LOGGED = re.compile(r"(.*?)/(_delta_log/|\.hoodie/|_spark_metadata/|metadata/[^/]*\.metadata\.json\Z)", re.DOTALL)


def logged_table(files: Iterable[str], listed: Iterable[str]) -> str:
    """Return the error text for a file in a table with a log, found in the ``listed`` URIs; "" if there is none."""
    found = {inside[1]: inside[2].split("/")[0] for inside in map(IN_LOGGED.match, listed) if inside}
    tables = (table for file in files for table in found if file.startswith(f"{table}/")) if found else ()
    return next((refusal(table, found[table]) for table in tables), "")


def logged_table_on_disk(root: Path, folders: Iterable[Path]) -> str:
    """Return the error text if one of ``folders``, at or below ``root``, is in a table with a log; "" if none is."""
    for folder in folders_up_to(root.absolute(), [folder.absolute() for folder in folders]):
        for mark in LOGGED:
            pattern = "metadata/*.metadata.json" if mark == "metadata" else mark
            if next(folder.glob(pattern), None):
                return refusal(str(folder), mark)
    return ""


# The log of a table may be in the parent of the given folder, or above folders such as ``year=2020``.
def folders_up_to(root: Path, folders: Iterable[Path]) -> Iterator[Path]:
    seen: set[Path] = set()
    for folder in folders:
        while folder not in seen:
            seen.add(folder)
            yield folder
            if folder.is_relative_to(root) or "=" in folder.name:
                folder = folder.parent


def refusal(table: str, mark: str) -> str:
    kind, reader = LOGGED[mark]
    return (
        f"{table}: is {kind} ({mark}), so some of its files may hold outdated rows; read it with {reader} and write "
        "the rows as Parquet to another directory"
    )
