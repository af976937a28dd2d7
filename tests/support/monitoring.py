"""The dashboard as a file."""

import json
from typing import Any

from slipstream.shared.artifacts.versions import ROOT

MONITORING = ROOT / "monitoring"


def dashboard() -> dict[str, Any]:
    return json.loads((MONITORING / "dashboard.json").read_text(encoding="utf-8"))


def panels() -> list[dict[str, Any]]:
    """Without the rows that group them."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
