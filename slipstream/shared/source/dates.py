"""Addresses of data with the date of a scheduled run."""

from __future__ import annotations

import re
from datetime import datetime, timedelta

from slipstream.shared.cron import utc
from slipstream.shared.errors import UserError

#: Placeholder of an address for the date of a scheduled run, or of a number of days before it.
DATE = re.compile(r"\{date(?:-([1-9][0-9]{0,3}))?\}")


def has_date(address: str) -> bool:
    """Return True if the address has a placeholder for a date, valid or not."""
    return "{date" in address


def dated_address(name: str, address: str, kickoff: datetime | None) -> str:
    """Return the address with ``{date}`` as the UTC date of ``kickoff`` (YYYY-MM-DD) and ``{date-N}`` as N days before.

    ``name`` is the setting for messages. Raises ``UserError`` without a kickoff time, and for other placeholders.
    """
    if not has_date(address):
        return address
    if has_date(DATE.sub("", address)):
        raise UserError(f"{name}: {address}: expected {{date}} or a number of days before it, such as {{date-1}}")
    if kickoff is None:
        raise UserError(
            f"{name}: {address}: only a scheduled run has a kickoff time for {{date}}; give the address of one day"
        )
    day = utc(kickoff).date()
    return DATE.sub(lambda match: (day - timedelta(days=int(match[1] or 0))).isoformat(), address)
