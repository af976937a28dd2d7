"""Seeded changes of bytes, JSON, text that people write, arrays and archives, as accidents and attacks make them."""

import copy
import io
import json
import random
import re
import struct
import zipfile
from typing import Any

from tests.support.hostile_names import HOSTILE

#: The place of a value in JSON that Python cannot write.
PLACE = "a place of a raw value"
#: What takes the place of a value: wrong types, the ends of number types, what leads elsewhere, what is deep or long.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31 - 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), 10**30, 10**400),
    *(0.5, -0.0, 1e9, 1e15, 1e308, 1e-320, 5e-324, 1.7976931348623157e308),
    *("", " ", "0", "nan", "name", "\x1b[2J", "{{ 7 * 7 }}", "os:system", "torch:load", "a" * 5000, *HOSTILE),
    *([], {}, [[]], {"": None}, [None] * 50, {"__class__": "x"}, [{}], {"a": {"a": {"a": []}}}),
    PLACE,
)
#: What JSON's own rules leave to its readers.
RAW = (
    *(b"NaN", b"-Infinity", b"1e999", b"-0", b'"\\ud800"', b'"\\u0000"', b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe"),
    *(b"9" * 5000, b"1e400", b"0." + b"0" * 5000 + b"1"),
)
#: What takes the place of a word or a number in text: numbers at the ends of their types, the ends of the calendar,
#: digits, nesting, and other types.
WORDS = (
    *("0", "-1", "1", "2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "1e9", "1e15", "1e21"),
    *("999999999999999999999", "1e308", "1e-320", "5e-324", "1e400", "1e999999999999999999999", "inf", "-inf", "nan"),
    *("9" * 400, "9" * 5000, "0x" + "f" * 5000, "0." + "0" * 5000 + "1", "1" + "_0" * 3000, "-0.0", "true", '""', "[]"),
    *("0001-01-01T00:00:00+14:00", "0001-01-01", "9999-12-31T23:59:59-14:00", "9999-12-31", "1969-12-31", "2206-11-02"),
    *("2206-11-02T03:00", "-62135596800", "253402300800", "2026-11-02T01:00Z", "1600000000.5"),
    *("[" * 3000, "{a=" * 3000, "[" * 40 + "]" * 40, "(" * 3000, '["a"]', "{a = 1}", ".".join("a" * 20_000), "\x1b[2J"),
)
WORD = re.compile(r'"[^"\n]*"|[\w.+:-]+')
#: Headers of arrays that declare more than there is, or that NumPy cannot parse, and the starts of two versions.
HEADERS = (
    *(b"{'descr': '<f4', 'fortran_order': False, 'shape': (%d, 6)}" % rows for rows in (-1, 0, 10**9, 10**13, 2**62)),
    *(b"{'descr': '|O', 'fortran_order': False, 'shape': (16, 6)}", b"{'descr': " + b"-" * 9000 + b"1}", b"{(", b"{"),
)
NPY, NPY_2 = b"\x93NUMPY\1\0", b"\x93NUMPY\2\0\xff\xff"
#: Fields of a member's header in an archive: where each begins, and its length.
SIZE, KIND, SUM = (124, 12), (156, 1), (148, 8)
SIZES = (0, 1, 511, 2**20, 2**32, 2**33 - 1, 2**63, -1, -512, -1024)


def changed_bytes(draw: random.Random, data: bytes) -> bytes:
    """``data`` with some bits flipped, cut, doubled, zeroed or inserted."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(changed) + 1)
        to = min(len(changed), at + draw.choice([1, 1, 4, 64, 4096]))
        what = draw.randrange(6)
        if what == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            del changed[at:]
        elif what == 2:
            changed[at:to] = bytes(to - at)
        elif what == 3:
            changed[at:at] = changed[at:to]
        elif what == 4:
            del changed[at:to]
        else:
            changed[at:at] = draw.choice(RAW)
    return bytes(changed)


def changed_tree(draw: random.Random, tree: Any) -> Any:
    """A copy of a JSON value in which some values are others, have gone, are there twice, or have another name."""
    box = [copy.deepcopy(tree)]
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        holder: Any = box
        key: Any = 0
        while holder[key] and isinstance(holder[key], list | dict) and draw.random() < 0.85:
            holder = holder[key]
            key = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
        what = draw.random()
        if what < 0.6 or holder is box:
            holder[key] = copy.deepcopy(draw.choice(VALUES))
        elif what < 0.75:
            del holder[key]
        elif isinstance(holder, dict):
            name = draw.choice([*HOSTILE, "name", "", key + "_", key.upper()])
            holder[name] = copy.deepcopy(holder[key]) if what < 0.9 else holder.pop(key)
        else:
            holder.insert(key, copy.deepcopy(draw.choice([holder[key], *VALUES])))
    return box[0]


def changed_json(draw: random.Random, data: bytes) -> bytes:
    """A JSON file with another value, or with other bytes."""
    if draw.random() < 0.2:
        return changed_bytes(draw, data)
    tree = changed_tree(draw, json.loads(data))
    text = json.dumps(tree, ensure_ascii=draw.random() < 0.5).encode(errors="surrogatepass")
    return text.replace(json.dumps(PLACE).encode(), draw.choice(RAW))


def changed_text(draw: random.Random, data: bytes) -> bytes:
    """A file of CSV, TOML or YAML with some other words, or with other bytes."""
    if draw.random() < 0.2:
        return changed_bytes(draw, data)
    text = data.decode()
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if words := list(WORD.finditer(text)):
            at = draw.choice(words)
            text = text[: at.start()] + draw.choice(WORDS) + text[at.end() :]
    return text.encode()


def changed_arrays(draw: random.Random, data: bytes) -> bytes:
    """Return an ``.npz`` file with other bytes, or with another header or compression of an array."""
    if draw.random() < 0.4:
        return changed_bytes(draw, data)
    name, header = draw.choice([(name, content[10:].partition(b"}")[0] + b"}") for name, content in members_of(data)])
    changed = changed_text(draw, header) if draw.random() < 0.5 else draw.choice(HEADERS)
    return with_header(data, name, changed, draw.choice([NPY, NPY, NPY_2]), draw.choice([0, 0, 8, 12, 14]))


def members_of(data: bytes) -> list[tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def with_header(data: bytes, name: str, header: bytes, start: bytes = NPY, method: int = 0) -> bytes:
    """Return an ``.npz`` file in which the array ``name`` has another header, compressed by a method of zip."""
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", method) as archive:
        for each, content in members_of(data):
            values = content[10 + struct.unpack("<H", content[8:10])[0] :]
            changed = start + struct.pack("<H", len(header)) + header + values
            archive.writestr(each, changed if each == name else content)
    return sink.getvalue()


def size_text(size: int) -> bytes:
    """The size of a member as GNU's tar writes what octal digits cannot say."""
    content = size.to_bytes(SIZE[1], "big", signed=True)
    return bytes([content[0] | 0x80]) + content[1:]


def changed_archive(draw: random.Random, data: bytes) -> bytes:
    """Return a tar file with other bytes, or with another size or kind of a member."""
    if draw.random() < 0.3:
        return changed_bytes(draw, data)
    changed = bytearray(data)
    at = draw.choice([at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"])
    field, length = draw.choice([SIZE, KIND])
    new = draw.choice(b"0125LKxgS") if field == KIND[0] else size_text(draw.choice(SIZES))
    changed[at + field : at + field + length] = bytes([new]) if isinstance(new, int) else new
    header = bytes(changed[at : at + SUM[0]]) + b" " * SUM[1] + bytes(changed[at + sum(SUM) : at + 512])
    changed[at + SUM[0] : at + sum(SUM)] = b"%06o\0 " % sum(header)
    return bytes(changed)
