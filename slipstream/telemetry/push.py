"""An attempt's totals to a Prometheus Pushgateway, at ``SLIPSTREAM_PUSHGATEWAY=URL``.

A gateway shows what it got for ever. So it gets counters, which stay true; the gauges of an ended attempt would not.
"""

from __future__ import annotations

import base64
import re
import threading
import urllib.error
import urllib.request
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote, urlsplit

from slipstream.logs import logger
from slipstream.telemetry.metrics import Labels, exposition
from slipstream.telemetry.totals import read_node, read_totals

VARIABLE = "SLIPSTREAM_PUSHGATEWAY"
JOB = "slipstream"
WITHIN_S = 2.0
log = logger("telemetry")


def push(url: str, directory: Path, labels: Labels, within: float = WITHIN_S) -> None:
    """Put the totals in ``directory`` in the place of those of these labels. Whatever fails, or takes longer than
    ``within`` seconds, is one warning."""
    problem = check(url)
    if not problem:
        text = exposition(None, read_node(directory), read_totals(directory), labels, counters_only=True)
        problem = put(url.rstrip("/") + path_of(labels), text.encode(), within) if text else ""
    if problem:
        log.warning("%s=%s: %s; the attempt's totals are not there", VARIABLE, shown(url), problem)


def check(url: str) -> str:
    """What is wrong with a URL, empty if nothing is."""
    try:
        parts = urlsplit(url)
        is_right = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_right = False
    return "" if is_right else "expected the URL of a gateway, such as http://pushgateway:9091"


def shown(url: str) -> str:
    """The URL without a password."""
    return re.sub(r"//[^/@]*@", "//", url)


def path_of(labels: Labels) -> str:
    """The path of the totals' group; what a path cannot hold is in base64."""
    parts = ["/metrics/job", JOB]
    for name, value in asdict(labels).items():
        text = str(value)
        plain = "/" not in text and text not in ("", ".", "..")
        parts += [name, quote(text, safe="")] if plain else [f"{name}@base64", encoded(text)]
    return "/".join(parts)


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode() or "="


def put(url: str, content: bytes, within: float) -> str:
    """What went wrong, empty if nothing did. A thread is left behind that still waits: names and connections each have
    limits of their own."""
    answers: list[str] = []

    def ask() -> None:
        request = urllib.request.Request(url, content, {"Content-Type": "text/plain; version=0.0.4"}, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=within):
                answers.append("")
        except urllib.error.HTTPError as error:
            answers.append(f"it refuses ({error.code} {error.reason})")
        except (OSError, ValueError) as error:
            answers.append(f"it does not answer ({getattr(error, 'reason', error)})")
        except Exception as error:
            answers.append(f"it does not speak HTTP ({error})")

    thread = threading.Thread(target=ask, name="push", daemon=True)
    thread.start()
    thread.join(within)
    return answers[0] if answers else f"it has not answered within {within:g} s"
