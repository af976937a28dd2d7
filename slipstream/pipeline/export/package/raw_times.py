"""ONNX graph under construction, and parsing of dates and times in it.

They are parsed as ISO 8601, as by :func:`slipstream.shared.source.columns.times.parse_iso`. The operators on texts need
opset 20. A graph cannot raise an error, so texts that are no date become NaN. Dates whose day or month comes first are
none: the order of their parts is a setting of the preparation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from slipstream.shared.source.columns.value_types import TEXT, TIME


@dataclass
class GraphBuilder:
    """ONNX graph under construction; ``taken`` are the names in use."""

    taken: set[str]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)

    def name(self, wanted: str) -> str:
        """Return ``wanted``, with a number appended if it is in use."""
        name, number = wanted, 2
        while name in self.taken or not name:
            name, number = f"{wanted}_{number}", number + 1
        self.taken.add(name)
        return name

    def constant(self, value: npt.ArrayLike, dtype: npt.DTypeLike = np.float64) -> str:
        name = self.name("encode/constant")
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def add(self, operator: str, *inputs: str, named: str = "", domain: str = "", **attributes: Any) -> str:
        """Append a node and return the name of its output."""
        output = named or self.name(f"encode/{operator.lower()}")
        self.nodes.append(helper.make_node(operator, inputs, [output], name=output, domain=domain, **attributes))
        return output


#: First opset with operators on texts.
TEXT_OPSET = 20
MONTH, DAY_OF_MONTH = "(?:0?[1-9]|1[0-2])", r"(?:0?[1-9]|[12]\d|3[01])"
SECONDS = r"(?::?[0-5]\d(?:[.,]\d+)?)?"
CLOCK = rf"(?:(?:[01]\d|2[0-3])(?::?[0-5]\d{SECONDS})?|\d:[0-5]\d{SECONDS})"
ZONE = r"(?: ?(?:Z|UTC|[+-](?:[01]\d|2[0-3])(?::?[0-5]\d)?))?"
COMPACT = r"\d{4}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
DATE = "|".join([*(rf"\d{{4}}{mark}{MONTH}{mark}{DAY_OF_MONTH}" for mark in ("-", "/", r"\.")), COMPACT])
#: Texts that are times, except days that their month lacks.
TIME_TEXT = rf"\d{{4}}(?:-{MONTH})?|(?:{DATE})(?:[T ]{CLOCK}{ZONE}| UTC)?"
EPOCH = "1970-01-01"
DAYS_OF_MONTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
#: Days from the first of March of the year -400 to 1970.
DAYS_BEFORE = 719_468 + 146_097


def input_dtype(kind: str, opset: int) -> str:
    """Return the dtype of a raw column of type ``kind``."""
    return "string" if kind == TEXT or (kind == TIME and opset >= TEXT_OPSET) else "float64"


class TextParser:
    """Operators on texts ``[rows, columns]`` and whole numbers of a graph."""

    def __init__(self, graph: GraphBuilder) -> None:
        self.graph, self.add = graph, graph.add

    def matches(self, texts: str, pattern: str) -> str:
        return self.add("RegexFullMatch", texts, pattern=pattern)

    def text(self, value: str) -> str:
        return self.graph.constant(value, np.str_)

    def where(self, matched: tuple[str, str], chosen: str, other: str) -> str:
        """Append a choice by whether (texts, pattern) match."""
        return self.add("Where", self.matches(*matched), chosen, other)

    def join(self, *texts: str) -> str:
        joined, *others = texts
        for other in others:
            joined = self.add("StringConcat", joined, other)
        return joined

    def split(self, texts: str, mark: str, parts: int) -> list[str]:
        """Append a division at ``mark`` and return its first ``parts`` texts, "" where there are fewer."""
        # Without its own marks, the shape would depend on the texts.
        marked = self.join(texts, self.text(mark * (parts - 1)))
        found, counts = (self.graph.name("encode/split") for _ in range(2))
        self.graph.nodes.append(helper.make_node("StringSplit", [marked], [found, counts], name=found, delimiter=mark))
        return [self.add("Gather", found, self.whole(part), axis=2) for part in range(parts)]

    def whole(self, value: int | list[int]) -> str:
        return self.graph.constant(value, np.int64)

    def number(self, texts: str) -> str:
        """Append digits as int64; "" is 0."""
        return self.add("Cast", self.join(self.text("0"), texts), to=TensorProto.INT64)

    def sum(self, *numbers: str) -> str:
        added, *others = numbers
        for other in others:
            added = self.add("Add", added, other)
        return added

    def times(self, number: str, factor: int) -> str:
        return self.add("Mul", number, self.whole(factor))

    def divided(self, number: str, divisor: int) -> str:
        """Append the quotient of numbers that are not negative."""
        return self.add("Div", number, self.whole(divisor))

    def rest(self, number: str, divisor: int) -> str:
        return self.add("Mod", number, self.whole(divisor))


def parse_times(graph: GraphBuilder, texts: str, columns: int, missing: Sequence[str] = ()) -> str:
    """Append float64 seconds since 1970 (UTC) of texts ``[batch, columns]``, NaN where they are no time.

    Texts of ``missing`` that are both a year or date and a number, such as 9999, are no times either.
    """
    parser = TextParser(graph)
    add, whole = parser.add, parser.whole
    # A batch without rows has no texts to divide, hence a first row of its own.
    first = graph.constant([[EPOCH] * columns], np.str_)
    given = add("Concat", first, texts, axis=0)
    valid = parser.matches(given, TIME_TEXT)
    if numbers := [mark for mark in missing if re.fullmatch("[0-9]{4}|[0-9]{8}", mark)]:
        valid = add("And", valid, add("Not", parser.matches(given, "|".join(numbers))))
    known = add("Where", valid, given, parser.text(EPOCH))
    for zone in ("UTC", "Z"):
        known = parser.split(known, zone, 2)[0]
    head, *after = parser.split(known, " ", 3)
    date, clock = parser.split(head, "T", 2)
    days, exists = days_of(parser, date)
    clock, ahead = zone_of(parser, parser.join(clock, *after))
    seconds, microseconds = clock_of(parser, clock)
    since = parser.sum(parser.times(days, 86_400), seconds, ahead)
    exact = add("Cast", parser.sum(parser.times(since, 1_000_000), microseconds), to=TensorProto.DOUBLE)
    found = add("Div", exact, graph.constant(1e6))
    held = add("Where", add("And", valid, exists), found, graph.constant(np.nan))
    return add("Slice", held, whole([1]), whole([np.iinfo(np.int64).max]), whole([0]))


def days_of(parser: TextParser, date: str) -> tuple[str, str]:
    """Append the days since 1970, and whether the month has that day. Uses H. Hinnant's ``days_from_civil``."""
    add, whole = parser.add, parser.whole
    compact = (date, r"\d{8}")
    for mark in ("/", "."):
        date = parser.join(*(part for text in parser.split(date, mark, 3) for part in (text, parser.text("-"))))
    first, month_text, day_text = parser.split(date, "-", 3)
    joined = parser.matches(*compact)
    value, one = parser.number(first), whole(1)
    year = add("Where", joined, parser.divided(value, 10_000), value)
    month = add("Where", joined, parser.rest(parser.divided(value, 100), 100), parser.number(month_text))
    day = add("Where", joined, parser.rest(value, 100), parser.number(day_text))
    month, day = (add("Max", each, one) for each in (month, day))
    zero = whole(0)
    multiple = {number: add("Equal", parser.rest(year, number), zero) for number in (4, 100, 400)}
    leap = add("Or", add("And", multiple[4], add("Not", multiple[100])), multiple[400])
    extra = add("And", leap, add("Equal", month, whole(2)))
    lengths = add("Gather", whole(list(DAYS_OF_MONTHS)), month)
    exists = add("LessOrEqual", day, add("Add", lengths, add("Cast", extra, to=TensorProto.INT64)))
    early = add("Cast", add("LessOrEqual", month, whole(2)), to=TensorProto.INT64)
    shifted = add("Sub", add("Add", year, whole(400)), early)
    of_era = parser.rest(shifted, 400)
    since_march = parser.rest(add("Add", month, whole(9)), 12)
    in_year = parser.sum(parser.divided(add("Add", parser.times(since_march, 153), whole(2)), 5), day, whole(-1))
    leaps = add("Sub", parser.divided(of_era, 4), parser.divided(of_era, 100))
    eras = parser.times(parser.divided(shifted, 400), 146_097)
    return parser.sum(eras, parser.times(of_era, 365), leaps, in_year, whole(-DAYS_BEFORE)), exists


def zone_of(parser: TextParser, clock: str) -> tuple[str, str]:
    """Append the clock without its zone, and the seconds to add for UTC."""
    clock, east = parser.split(clock, "+", 2)
    clock, west = parser.split(clock, "-", 2)

    def seconds(zone: str) -> str:
        digits = parser.join(*parser.split(zone, ":", 2))
        number = parser.number(parser.where((digits, r"\d\d"), parser.join(digits, parser.text("00")), digits))
        return parser.sum(parser.times(parser.divided(number, 100), 3600), parser.times(parser.rest(number, 100), 60))

    return clock, parser.add("Sub", seconds(west), seconds(east))


def clock_of(parser: TextParser, clock: str) -> tuple[str, str]:
    """Append the seconds of the day, and the microseconds; further digits are dropped."""
    add = parser.add
    clock = parser.where((clock, r"\d:.*"), parser.join(parser.text("0"), clock), clock)
    clock, point = parser.split(clock, ".", 2)
    clock, comma = parser.split(clock, ",", 2)
    digits = parser.join(*parser.split(clock, ":", 3))
    for length, zeros in ((4, "00"), (2, "0000")):
        digits = parser.where((digits, rf"\d{{{length}}}"), parser.join(digits, parser.text(zeros)), digits)
    number = parser.number(digits)
    hours, minutes = parser.divided(number, 10_000), parser.rest(parser.divided(number, 100), 100)
    seconds = parser.sum(parser.times(hours, 3600), parser.times(minutes, 60), parser.rest(number, 100))
    fraction = add("Cast", parser.join(parser.text("0."), point, comma, parser.text("0")), to=TensorProto.DOUBLE)
    # The least step is 1; the error of a fraction times a million is below 1e-10.
    exact = add("Add", add("Mul", fraction, parser.graph.constant(1e6)), parser.graph.constant(1e-9))
    return seconds, add("Cast", add("Floor", exact), to=TensorProto.INT64)
