"""Preemption notices from cloud metadata servers and from SIGTERM.

A thread polls the metadata server and a signal handler receives SIGTERM; both only store a notice and its deadline. All
ranks decide together, between two steps, how to react (:mod:`slipstream.pipeline.train.fault_tolerance.consensus`).

Sources: AWS spot ``instance-action`` and rebalance recommendation over IMDSv2 (docs.aws.amazon.com, "Spot Instance
interruption notices"), GCP ``instance/preempted`` (cloud.google.com, "Spot VMs"), Azure scheduled events
(learn.microsoft.com, "Azure Metadata Service: Scheduled Events").
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import FrameType
from typing import Protocol

from slipstream.shared.machine.description import (
    GOOGLE,
    LINK_LOCAL,
    TIMEOUT_S,
    AwsMetadata,
    MetadataUnavailable,
    http_request,
    parse_mapping,
)

#: Seconds between polls. AWS gives notice two minutes before the end, other clouds thirty seconds.
PERIOD_S = 5.0
#: Number of times that every cloud's metadata server is tried before giving up.
SEARCH_ROUNDS = 3


@dataclass(frozen=True)
class PreemptionNotice:
    """Preemption notice of this machine.

    ``deadline`` is on the clock of ``time.monotonic``; None if the preemption is not certain.
    """

    source: str
    what: str
    deadline: float | None


class MetadataServer(Protocol):
    """Metadata server of one cloud."""

    name: str

    def present(self) -> bool:
        """Return True if this machine runs in that cloud.

        Raises ``MetadataUnavailable`` if the server does not answer.
        """

    def ask(self) -> PreemptionNotice | None:
        """Return the current notice; None without a notice.

        Raises ``MetadataUnavailable``.
        """


def monotonic_deadline(moment: datetime) -> float:
    """Convert a date and time (UTC if naive) to the clock of ``time.monotonic``."""
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return time.monotonic() + (moment - datetime.now(UTC)).total_seconds()


class AwsNotices:
    """AWS metadata: spot instance actions, and rebalance recommendations, which come earlier."""

    name = "aws"

    def __init__(self, base: str = LINK_LOCAL) -> None:
        self._metadata = AwsMetadata(base)

    def present(self) -> bool:
        self._metadata.renew()
        return True

    def ask(self) -> PreemptionNotice | None:
        action = self._get("/latest/meta-data/spot/instance-action")
        if action is not None:
            try:
                deadline = monotonic_deadline(datetime.fromisoformat(str(action["time"])))
            except (KeyError, ValueError):
                raise MetadataUnavailable("spot/instance-action: its time cannot be parsed") from None
            what = str(action.get("action", "terminate"))
            # Hibernation starts at once, whatever time the notice contains.
            return PreemptionNotice(self.name, f"spot {what}", time.monotonic() if what == "hibernate" else deadline)
        if self._get("/latest/meta-data/events/recommendations/rebalance") is not None:
            return PreemptionNotice(self.name, "rebalance recommendation", None)
        return None

    def _get(self, path: str) -> dict[str, object] | None:
        body = self._metadata.get(path)
        return None if body is None else parse_mapping(body, path)


class GcpNotices:
    """Google metadata: ``instance/preempted`` turns TRUE 30 seconds before the end."""

    name = "gcp"
    NOTICE_S = 30.0

    def __init__(self, base: str = GOOGLE) -> None:
        self._url = base + "/computeMetadata/v1/instance/preempted"

    def present(self) -> bool:
        self._get()
        return True

    def ask(self) -> PreemptionNotice | None:
        if self._get() == b"FALSE":
            return None
        return PreemptionNotice(self.name, "preempted", time.monotonic() + self.NOTICE_S)

    def _get(self) -> bytes:
        status, body, headers = http_request(self._url, {"Metadata-Flavor": "Google"})
        value = body.strip().upper()
        if status != 200 or headers.get("Metadata-Flavor") != "Google" or value not in (b"TRUE", b"FALSE"):
            raise MetadataUnavailable(f"{self._url}: status {status}")
        return value


class AzureNotices:
    """Azure metadata: scheduled events of type ``Preempt``; the first response may take two minutes."""

    name = "azure"
    NOTICE_S = 30.0
    FIRST_TIMEOUT_S = 120.0

    def __init__(self, base: str = LINK_LOCAL) -> None:
        self._events = base + "/metadata/scheduledevents?api-version=2020-07-01"
        self._instance = base + "/metadata/instance?api-version=2021-02-01"
        self._timeout = self.FIRST_TIMEOUT_S

    def present(self) -> bool:
        status, body, _ = http_request(self._instance, {"Metadata": "true"})
        if status != 200 or "compute" not in parse_mapping(body, self._instance):
            raise MetadataUnavailable(f"{self._instance}: status {status}")
        return True

    def ask(self) -> PreemptionNotice | None:
        status, body, _ = http_request(self._events, {"Metadata": "true"}, timeout=self._timeout)
        if status != 200:
            raise MetadataUnavailable(f"{self._events}: status {status}")
        self._timeout = TIMEOUT_S
        events = parse_mapping(body, self._events).get("Events", [])
        if not isinstance(events, list):
            raise MetadataUnavailable(f"{self._events}: not a list of events")
        preempts = (each for each in events if isinstance(each, dict) and each.get("EventType") == "Preempt")
        event = next(preempts, None)
        return (
            PreemptionNotice(self.name, "preempt", self._deadline(str(event.get("NotBefore", "")))) if event else None
        )

    def _deadline(self, not_before: str) -> float:
        # Blank once the event has started: the remaining time is unknown, so assume none.
        if not not_before:
            return time.monotonic()
        try:
            return monotonic_deadline(parsedate_to_datetime(not_before))
        except ValueError:
            return time.monotonic() + self.NOTICE_S


CLOUDS: dict[str, Callable[[], MetadataServer]] = {"aws": AwsNotices, "gcp": GcpNotices, "azure": AzureNotices}


class NoticeWatcher:
    """Watcher for preemption notices, in a background thread.

    It polls the first of the metadata ``servers`` that answers. Unless ``grace_s`` is None, SIGTERM counts as a notice
    with that many seconds left: Kubernetes sends it before it kills a pod. Use as a context manager, from the main
    thread.
    """

    def __init__(self, servers: Sequence[MetadataServer], *, grace_s: float | None, period_s: float = PERIOD_S) -> None:
        self._servers = list(servers)
        self._grace_s = grace_s
        self._period_s = period_s
        #: Most urgent notice so far; None without any.
        self.notice: PreemptionNotice | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="preemption", daemon=True)
        self._handler_before: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> NoticeWatcher:
        if (grace_s := self._grace_s) is not None:

            def take_sigterm(*_: object) -> None:
                self._take(PreemptionNotice("signal", "SIGTERM", time.monotonic() + grace_s))

            self._handler_before = signal.signal(signal.SIGTERM, take_sigterm)
        if self._servers:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._handler_before is not None:
            signal.signal(signal.SIGTERM, self._handler_before)

    def has_notice(self) -> bool:
        """Return True if there is a notice with a deadline."""
        return self.notice is not None and self.notice.deadline is not None

    def lose_home(self, why: str) -> None:
        """Stop this attempt at once, because another attempt has taken over the checkpoint directory."""
        self._take(PreemptionNotice("lease", why, time.monotonic()))

    def _take(self, notice: PreemptionNotice) -> None:
        """Store ``notice`` if it is more urgent than the stored one; any deadline is more urgent than none."""
        before = self.notice
        if before is None or before.deadline is None or (notice.deadline or before.deadline) < before.deadline:
            self.notice = notice

    def _watch(self) -> None:
        server = self._find()
        while server is not None and not self._over.is_set():
            with suppress(MetadataUnavailable):
                if notice := server.ask():
                    self._take(notice)
            self._over.wait(self._period_s)

    def _find(self) -> MetadataServer | None:
        for _ in range(SEARCH_ROUNDS):
            for server in self._servers:
                with suppress(MetadataUnavailable):
                    if server.present():
                        return server
            if self._over.wait(self._period_s):
                return None
        return None


def metadata_servers(cloud: str) -> list[MetadataServer]:
    """Return the metadata servers to try: one for a cloud's name, all for "auto", none for "none"."""
    return [make() for name, make in CLOUDS.items() if cloud in (name, "auto")]
