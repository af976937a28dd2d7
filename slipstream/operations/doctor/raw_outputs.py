"""Lifetime of raw outputs: the bucket's lifecycle rules against the age up to which Flyte's cache names outputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slipstream.operations.doctor.archive import TaskUse
from slipstream.operations.doctor.findings import DoctorReport, Finding
from slipstream.operations.doctor.propeller import ConfigCheck, Propeller, Settings, duration_s, last_setting
from slipstream.shared.errors import UserError
from slipstream.shared.storage import S3, StorageUnavailable, call_within, lifecycle_rules

PREFIX, AGE = "rawoutput-prefix", "max-cache-age"
DAY_S = 86400.0
#: Seconds for reading the rules.
TRY_S = 10.0


def lifetime_check(uses: Sequence[TaskUse]) -> ConfigCheck:
    """Return the check that the lifecycle rules of propeller's raw outputs delete none that the cache still names.

    An execution may start with the oldest output, and read it after its longest task.
    """
    longest_s = max((use.timeout_s for use in uses), default=0)

    def check(propeller: Propeller, files: Sequence[Settings]) -> DoctorReport:
        uri = last_setting(files, "propeller", PREFIX)
        if not isinstance(uri, str) or not uri.startswith(S3):
            return DoctorReport(unchecked=(f"lifecycle rules of raw outputs at {uri}: only those of S3 are read",))
        age_s = duration_s(f"catalog-cache.{AGE}", last_setting(files, "catalog-cache", AGE), 0.0) or math.inf
        try:
            rules = call_within(TRY_S, lambda: lifecycle_rules(uri))
        except (UserError, StorageUnavailable) as error:
            return DoctorReport(unchecked=(f"lifecycle rules of {uri} (s3:GetLifecycleConfiguration): {error}",))
        checked = f"lifecycle rules of {uri} against propeller's {AGE}, {in_words(age_s)}"
        findings = tuple(
            too_early(propeller, uri, rule, days, age_s)
            for rule in rules
            for days in expiry_days(rule, uri)
            if days * DAY_S < age_s + longest_s
        )
        return DoctorReport(findings, (checked,))

    return check


def expiry_days(rule: Mapping[str, Any], uri: str) -> Iterator[float]:
    """Yield the days after which a rule deletes objects below ``uri``; 0 for a fixed date.

    Filters by tags and sizes are ignored.
    """
    kind = rule.get("Filter", {})
    start = rule.get("Prefix", kind.get("Prefix", kind.get("And", {}).get("Prefix", "")))
    below = uri.removeprefix(S3).partition("/")[2]
    if rule.get("Status") == "Enabled" and (below.startswith(start) or start.startswith(below)):
        expiry = rule.get("Expiration", {})
        if "Days" in expiry or "Date" in expiry:
            yield float(expiry.get("Days", 0))


def too_early(propeller: Propeller, uri: str, rule: Mapping[str, Any], days: float, age_s: float) -> Finding:
    name, when = rule.get("ID", "without a name"), f"after {days:g} days" if days else "at a fixed date"
    return Finding(
        "warning",
        propeller.where,
        f"the lifecycle rule {name} deletes raw outputs below {uri} {when}, but Flyte's cache names them "
        f"{in_words(age_s)} ({AGE})",
        "tasks fail whose cached inputs are gone, until an execution with --overwrite-cache makes them again",
        f"keep them longer, or set {propeller.chart_value('catalog-cache', AGE)} below their lifetime in the chart's "
        "values",
    )


def in_words(age_s: float) -> str:
    return "without end" if math.isinf(age_s) else f"for {age_s / DAY_S:.3g} days"
