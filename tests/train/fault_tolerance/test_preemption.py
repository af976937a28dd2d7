"""Preemption notices over real HTTP; no behaviour of a metadata server can end a healthy run."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import pytest

from slipstream.pipeline.train.fault_tolerance import notices
from slipstream.pipeline.train.fault_tolerance.consensus import Consensus, StopDecision
from slipstream.pipeline.train.fault_tolerance.notices import (
    AwsNotices,
    AzureNotices,
    GcpNotices,
    MetadataServer,
    NoticeWatcher,
    PreemptionNotice,
)
from slipstream.shared.distributed.process_group import Peers
from slipstream.shared.machine.description import AwsMetadata, MetadataUnavailable
from tests.support.metadata_server import metadata_server
from tests.support.proving import diagonal, first_few

CLOUDS: dict[str, Callable[[str], MetadataServer]] = {"aws": AwsNotices, "gcp": GcpNotices, "azure": AzureNotices}
#: What each cloud says of the time left, in seconds, when its server was told 60.
EXPECTED_S = {"aws": 60, "gcp": 30, "azure": 60}


def wait_for(condition: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.01)


@pytest.mark.parametrize("cloud", first_few(CLOUDS, 1))
def test_a_notice_arrives_with_its_deadline(cloud: str) -> None:
    with (
        metadata_server(cloud) as server,
        NoticeWatcher([CLOUDS[cloud](server.url)], grace_s=None, period_s=0.02) as watcher,
    ):
        wait_for(lambda: len(server.statuses) > 6)
        assert watcher.notice is None
        server.event = 60
        wait_for(lambda: watcher.notice)
        notice = watcher.notice
        assert notice is not None and notice.source == cloud and notice.deadline is not None
        assert notice.deadline - time.monotonic() == pytest.approx(EXPECTED_S[cloud], abs=3)


@pytest.mark.parametrize(("mood", "cloud"), diagonal(["garbage", "500", "hang"], CLOUDS))
def test_a_server_that_misbehaves_is_no_notice_and_is_asked_again(
    cloud: str, mood: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.1)
    monkeypatch.setattr(notices.http_request, "__kwdefaults__", {"method": "GET", "timeout": 0.1})
    monkeypatch.setattr(notices, "AwsMetadata", partial(AwsMetadata, timeout=0.1))
    monkeypatch.setattr(AzureNotices, "FIRST_TIMEOUT_S", 0.1)
    with metadata_server(cloud) as server:
        asked = CLOUDS[cloud](server.url)
        assert asked.present()
        assert asked.ask() is None
        server.mood = mood
        with pytest.raises(MetadataUnavailable):
            asked.ask()
        server.mood, server.event = "", 60
        notice = asked.ask()
        assert notice is not None and notice.source == cloud


def test_an_expired_token_is_renewed() -> None:
    with metadata_server("aws") as server:
        aws = AwsNotices(server.url)
        assert aws.present() and aws.ask() is None
        server.expire_tokens()
        server.event = 100
        assert aws.ask() is not None
        assert 401 in server.statuses


def test_no_server_is_no_notice() -> None:
    with pytest.raises(MetadataUnavailable):
        AwsNotices("http://127.0.0.1:9").present()
    with metadata_server("azure") as server, pytest.raises(MetadataUnavailable):
        GcpNotices(server.url).present()


def test_the_cloud_is_found_by_itself() -> None:
    with metadata_server("azure") as server:
        server.event = 60
        servers = [make(server.url) for make in CLOUDS.values()]
        with NoticeWatcher(servers, grace_s=None, period_s=0.02) as watcher:
            wait_for(lambda: watcher.notice)
            assert watcher.notice is not None and watcher.notice.source == "azure"


def test_sigterm_is_a_notice_with_the_grace_that_kubernetes_gives() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with NoticeWatcher([], grace_s=25) as watcher:
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: watcher.notice)
        assert watcher.notice is not None and watcher.notice.deadline is not None
        assert watcher.notice.deadline - time.monotonic() == pytest.approx(25, abs=1)
    assert signal.getsignal(signal.SIGTERM) == before


def test_advice_asks_for_a_save_and_only_a_certain_notice_for_an_end() -> None:
    with (
        metadata_server("aws") as server,
        NoticeWatcher([AwsNotices(server.url)], grace_s=None, period_s=0.02) as watcher,
    ):
        consensus = Consensus(watcher, Peers.connect(timedelta(minutes=1)))
        assert not consensus.exchange().advised
        server.rebalance = True
        wait_for(lambda: watcher.notice)
        advised = consensus.exchange()
        assert advised.advised and advised.stop is None
        server.event = 90
        wait_for(lambda: watcher.notice and watcher.notice.deadline)
        stop = consensus.exchange().stop
        assert stop is not None and "spot terminate" in stop.why
        assert stop.seconds_left == pytest.approx(90, abs=3)


def test_what_cannot_finish_is_not_begun() -> None:
    assert StopDecision("x", 30).time_to_save(10)
    assert not StopDecision("x", 16).time_to_save(10)


def test_the_most_urgent_notice_counts() -> None:
    watcher = NoticeWatcher([], grace_s=None)
    for deadline, kept in ((100.0, 100.0), (200.0, 100.0), (50.0, 50.0), (None, 50.0)):
        watcher._take(PreemptionNotice("test", "test", deadline))
        assert watcher.notice is not None and watcher.notice.deadline == kept
