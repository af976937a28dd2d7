"""Check of propeller's configuration: pods on demand must not run on spot nodes."""

from __future__ import annotations

import json
from collections.abc import Sequence

from slipstream.operations.doctor.archive import TaskUse
from slipstream.operations.doctor.findings import DoctorReport, Finding
from slipstream.operations.doctor.propeller import ConfigCheck, Propeller, Settings, last_setting
from slipstream.shared.profiles.needs import ON_DEMAND_ENTRY, ON_DEMAND_ONLY, about_spot

SELECTOR, TOLERATIONS = "k8s.interruptible-node-selector", "k8s.interruptible-tolerations"
CONSEQUENCE = "with --interruptible false, and in Flyte's last attempt, a pod may still run on a spot node"


def capacity_check(uses: Sequence[TaskUse]) -> ConfigCheck:
    """Return the check that propeller keeps pods on demand off spot nodes.

    Either it excludes the nodes, or it adds their toleration to interruptible pods only. Both are void for pods that
    select spot nodes themselves.
    """
    spot = [use for use in uses if use.interruptible]

    def check(propeller: Propeller, files: Sequence[Settings]) -> DoctorReport:
        if not spot:
            return DoctorReport()
        is_set = [key for key in (ON_DEMAND_ENTRY, TOLERATIONS) if last_setting(files, "plugins", *key.split("."))]
        checked = f"plugins.{' and '.join(is_set) or ON_DEMAND_ENTRY + ', not set,'} by the ConfigMaps of "
        report = DoctorReport(checked=(checked + propeller.where,))
        if selecting := [use for use in spot if spot_selectors(use)]:
            return report + DoctorReport(tuple(selects_spot(use, propeller) for use in selecting))
        tolerating = any(
            about_spot(*map(str, each.values())) for use in spot for each in use.pod.get("tolerations") or []
        )
        if ON_DEMAND_ENTRY in is_set or (is_set and not tolerating):
            return report
        return report + DoctorReport((not_excluded(spot, propeller),))

    return check


def spot_selectors(use: TaskUse) -> dict[str, str]:
    return {key: value for key, value in (use.pod.get("nodeSelector") or {}).items() if about_spot(key, value)}


def selects_spot(use: TaskUse, propeller: Propeller) -> Finding:
    selectors = spot_selectors(use)
    return Finding(
        "warning",
        use.where,
        f"the pod's own node selector asks for spot ({', '.join(selectors)})",
        CONSEQUENCE,
        f"leave node_selector and tolerations of spot nodes out of the profile; set "
        f"{propeller.chart_value('plugins', SELECTOR)} to {json.dumps(selectors)}, and "
        f"{TOLERATIONS.removeprefix('k8s.')} to the tolerations",
    )


def not_excluded(spot: Sequence[TaskUse], propeller: Propeller) -> Finding:
    text = json.dumps([use.pod.get("tolerations") for use in spot])
    requirement = next((each for each in ON_DEMAND_ONLY.values() if str(each["key"]) in text), ON_DEMAND_ONLY["aws"])
    return Finding(
        "warning",
        propeller.where,
        f"plugins.{ON_DEMAND_ENTRY} is not set, and {spot[0].where} runs on spot nodes",
        CONSEQUENCE,
        f"set {propeller.chart_value('plugins', ON_DEMAND_ENTRY)} to {json.dumps(requirement)}, or to your "
        "spot nodes' label",
    )
