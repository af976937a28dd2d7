"""Archives that unpack to more than a package holds are refused before they are unpacked."""

import gzip
import tarfile
from collections.abc import Iterable
from pathlib import Path

import pytest

from slipstream.operations.doctor.archive import read_package
from slipstream.shared.errors import UserError
from tests.support.limited import limited
from tests.support.mutations import size_text
from tests.support.proving import diagonal
from tests.support.small_package import small_package


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def negative(size: int) -> bytes:
    """A header whose size is below 0, which tarfile follows backwards."""
    whole = bytearray(header("a", 0))
    whole[124:136] = size_text(size)
    whole[148:156] = b" " * 8
    whole[148:156] = b"%06o\0 " % sum(whole)
    return bytes(whole)


#: Written out, each would take gigabytes, hours or a traceback.
ARCHIVES: dict[str, tuple[Iterable[bytes], str]] = {
    "a large protobuf": ([header("a_1.pb", 9 << 20), bytes(9 << 20)], "describes a task in 9437184 bytes"),
    "several": ([header("a_1.pb", 5 << 20), b"\n\0" * (5 << 19)] * 2, "describes tasks in more than 8 MiB"),
    "a large file": ([header("a", 1 << 30)], "holds a file of 1073741824 bytes"),
    "large files": ([header("a", 100 << 20), bytes(100 << 20)] * 3, "unpacks to more than 256 MiB"),
    "a large header": ([header("a", 1 << 32, b"x")], "describes tasks in more than 8 MiB"),
    "a long name": ([header("a", 1 << 32, b"L")], "describes tasks in more than 8 MiB"),
    "many files": ([header(f"a{number}", 0) for number in range(20_000)], "describes tasks in more than 8 MiB"),
    "a negative size": ([negative(-1024), bytes(1024)], "holds a file of -1024 bytes"),
    "a link": ([header("a_1.pb", 0, tarfile.SYMTYPE), bytes(1024)], "it describes no tasks"),
    "zeros": ([bytes(32 << 20)], "it describes no tasks"),
}


@pytest.mark.parametrize(("packed", "name"), diagonal([True, False], ARCHIVES))
def test_what_is_no_package_is_one_line(tmp_path: Path, name: str, packed: bool) -> None:
    parts, said = ARCHIVES[name]
    content = b"".join(parts)
    (tmp_path / "p").write_bytes(gzip.compress(content, compresslevel=1) if packed else content)
    with limited(), pytest.raises(UserError) as refused:
        read_package(tmp_path / "p")
    assert said in refused.value.message and str(tmp_path / "p") in refused.value.message


def test_a_package_is_read_packed_or_not(tmp_path: Path) -> None:
    small_package(tmp_path / "p.tar")
    (tmp_path / "p.tgz").write_bytes(gzip.compress((tmp_path / "p.tar").read_bytes()))
    plain, packed = (read_package(tmp_path / name) for name in ("p.tar", "p.tgz"))
    assert plain == packed and list(plain.tasks) == ["tasks.a"] and list(plain.launch_plans) == ["workflows.a"]
