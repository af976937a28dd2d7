"""Times on the command line and in output."""

from __future__ import annotations

import re
from typing import Any

import click

from slipstream.shared.errors import UserError

TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|min|h|d)?")
#: Longest time in seconds: a hundred years.
LONGEST_S = 100 * 365 * 86400.0
SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


class TimeParam(click.ParamType):
    """Parameter type for times such as 20ms, 90min or 8h, converted to ``unit``, which is also the default unit."""

    name = "time"

    def __init__(self, unit: str, such_as: str) -> None:
        self.unit, self.such_as = unit, such_as

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        match = TIME.fullmatch(str(value).strip())
        number, unit = (float(match[1]), match[2] or self.unit) if match else (0.0, self.unit)
        if not 1e-9 <= number * SECONDS[unit] <= LONGEST_S:
            option = param.opts[0] if param else "time"
            raise UserError(f"{option} {value}: expected a time above 0, such as {self.such_as}, up to 100 years")
        return number * (SECONDS[unit] / SECONDS[self.unit])


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
