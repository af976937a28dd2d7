"""Export of an attempt's totals to a Prometheus Pushgateway, ``SLIPSTREAM_PUSHGATEWAY=URL``.

A gateway never forgets a metric, so only counters are pushed: gauges do not stay true after the attempt.
"""

from __future__ import annotations

import base64
import threading
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from slipstream.shared.logs import logger
from slipstream.shared.telemetry.metrics import MetricLabels, metrics_exposition
from slipstream.shared.telemetry.totals import read_node, read_totals

VARIABLE = "SLIPSTREAM_PUSHGATEWAY"
JOB = "slipstream"
WITHIN_S = 2.0
#: Characters that stay unquoted in path and query; others, such as umlauts, are percent-encoded.
SAFE = "!$%&'()*+,/:;=?@[]~-._"
log = logger("telemetry")


@dataclass(frozen=True)
class PushGateway:
    """Address of a Pushgateway for messages, and its secrets in separate fields."""

    address: str
    query: str = field(repr=False)
    #: Value of the header Authorization; "" for none.
    authorization: str = field(repr=False)

    @classmethod
    def of(cls, url: str) -> PushGateway:
        """Parse a URL.

        Raises ``ValueError``, whose message may quote the URL, if it is not a gateway's. An unquoted / or ? in a
        password would end the host name and show the remainder as a path. Therefore an @ is allowed only directly
        before the host.
        """
        parts = urlsplit(url)
        user, at, _ = parts.netloc.rpartition("@")
        if (
            parts.scheme not in ("http", "https")
            or not parts.hostname
            or parts.port == 0
            or "#" in url
            or url.count("@") > len(at)
            or any(each.isspace() or not each.isprintable() for each in url)
        ):
            raise ValueError("not the URL of a gateway")
        host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        port = f":{parts.port}" if parts.port else ""
        address = f"{parts.scheme}://{host}{port}{quote(parts.path.rstrip('/'), safe=SAFE)}"
        name, _, password = user.partition(":")
        pair = f"{unquote(name)}:{unquote(password)}".encode()
        authorization = f"Basic {base64.b64encode(pair).decode()}" if at else ""
        return cls(address, quote(parts.query, safe=SAFE), authorization)


def push_totals(url: str, directory: Path, labels: MetricLabels, within: float = WITHIN_S) -> None:
    """Replace the gateway's totals of these labels by those in ``directory``.

    Failure or timeout is logged as one warning.
    """
    try:
        gateway = PushGateway.of(url)
    except ValueError:
        log.warning(
            "%s: cannot be parsed; expected the URL of a gateway, such as http://pushgateway:9091; percent-encode / "
            "and @ in user, password and query; the attempt's totals were not sent",
            VARIABLE,
        )
        return
    text = metrics_exposition(None, read_node(directory), read_totals(directory), labels, counters_only=True)
    problem = put_metrics(gateway, path_of(labels), text.encode(), within) if text else ""
    if problem:
        log.warning("%s=%s: %s; the attempt's totals were not sent", VARIABLE, gateway.address, problem)


def path_of(labels: MetricLabels) -> str:
    """Return the URL path of the labels; values with "/" and empty ones are in base64."""
    parts = ["/metrics/job", JOB]
    for name, value in asdict(labels).items():
        text = str(value)
        plain = "/" not in text and text not in ("", ".", "..")
        parts += [name, quote(text, safe="")] if plain else [f"{name}@base64", encoded(text)]
    return "/".join(parts)


def encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode() or "="


def put_metrics(gateway: PushGateway, path: str, content: bytes, within: float) -> str:
    """Send ``content`` and return a description of the failure; "" on success.

    A thread that is still waiting after ``within`` seconds is abandoned.
    """
    answers: list[str] = []
    url = f"{gateway.address}{path}{'?' if gateway.query else ''}{gateway.query}"
    headers = {"Content-Type": "text/plain; version=0.0.4"}
    if gateway.authorization:
        headers["Authorization"] = gateway.authorization

    def ask() -> None:
        request = urllib.request.Request(url, content, headers, method="PUT")
        try:
            with urllib.request.urlopen(request, timeout=within):
                answers.append("")
        except urllib.error.HTTPError as error:
            answers.append(f"it refused ({error.code}{phrase_of(error.code)})")
        except OSError as error:
            answers.append(f"it does not answer ({getattr(error, 'reason', error)})")
        except Exception as error:  # its message may quote the URL or the server's answer
            answers.append(f"it does not speak HTTP ({type(error).__name__})")

    thread = threading.Thread(target=ask, name="push", daemon=True)
    thread.start()
    thread.join(within)
    return answers[0] if answers else f"it has not answered within {within:g} s"


def phrase_of(code: int) -> str:
    """Return the standard phrase of a status; the server's own phrase may repeat a secret."""
    return f" {HTTPStatus(code).phrase}" if code in set(HTTPStatus) else ""
