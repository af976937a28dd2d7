"""Requests with deadlines: one for all attempts together, and a fresh connection for every attempt."""

import time
from collections.abc import Callable, Iterator

import pytest

from slipstream.shared.storage import Storage, StorageUnavailable, azure, call_within, gcs, open_reader, s3, storage_for
from slipstream.shared.storage.retry import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, current_limit
from tests.support.faulty_s3 import CREDENTIALS
from tests.support.faulty_stores import REMOTE, Remote, connection_string
from tests.support.proving import first_few
from tests.support.silent_endpoint import SilentEndpoint, silent_endpoint
from tests.support.wording import refuses

CLIENTS: dict[str, Callable[[], object]] = {
    "s3": s3.client,
    "gs": gcs.client,
    "abfs": lambda: azure.client("").fresh_service,
}
REQUESTS: dict[str, Callable[[Storage], object]] = {
    "put": lambda storage: storage.put("key", b"heartbeat"),
    "list": lambda storage: storage.list("claims/"),
    "read": lambda storage: open_reader(f"{storage.base}/key"),
}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]) -> Iterator[SilentEndpoint]:
    with silent_endpoint() as endpoint:
        yield from instead_of_stores(endpoint, monkeypatch, forgotten)


@pytest.fixture
def trickling(monkeypatch: pytest.MonkeyPatch, forgotten: Callable[[], None]) -> Iterator[SilentEndpoint]:
    with silent_endpoint(every_s=0.2) as endpoint:
        yield from instead_of_stores(endpoint, monkeypatch, forgotten)


def instead_of_stores(
    endpoint: SilentEndpoint, monkeypatch: pytest.MonkeyPatch, forget: Callable[[], None]
) -> Iterator[SilentEndpoint]:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint.url)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", endpoint.url)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", connection_string(endpoint.url))
    forget()
    yield endpoint
    forget()


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        pytest.param(kind, way, marks=[] if first == second else pytest.mark.prove)
        for first, kind in enumerate(REMOTE)
        for second, way in enumerate(REQUESTS)
    ],
)
def test_all_tries_end_at_an_endpoint_that_never_answers(silent: SilentEndpoint, kind: str, way: str) -> None:
    """A data request would wait for 20 s, twelve times."""
    storage = storage_for(f"{kind}://bucket/base")
    call_within(60, CLIENTS[kind])
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match=r"within 2\.4 s"):
        call_within(2.4, lambda: REQUESTS[way](storage))
    assert 2.0 < time.monotonic() - started < 8.0
    wait_until_closed(silent)
    time.sleep(0.2)
    assert len(silent.connections) >= 2, "it was tried once"
    assert all(received.count(b" HTTP/1.1\r\n") == 1 for received in silent.connections), "a connection was used again"


@pytest.mark.parametrize("kind", first_few(REMOTE))
def test_an_answer_that_trickles_is_not_waited_for(trickling: SilentEndpoint, kind: str) -> None:
    """Each byte of it renews the timeout of a socket."""
    call_within(60, CLIENTS[kind])
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match=r"within 1\.2 s"):
        call_within(1.2, lambda: storage_for(f"{kind}://bucket/base").list("claims/"))
    assert time.monotonic() - started < 8.0 and trickling.connections


def wait_until_closed(endpoint: SilentEndpoint) -> None:
    """Wait until the client has ended all its connections."""
    end = time.monotonic() + 10
    while endpoint.closed < len(endpoint.connections):
        assert time.monotonic() < end, "a try has not ended"
        time.sleep(0.02)


def test_every_request_within_a_limit_has_a_connection_of_its_own(remote: Remote) -> None:
    storage, proxy = remote.storage, remote.proxy
    storage.put("key", b"data")

    def connections(work: Callable[[], object]) -> tuple[int, int]:
        opened, asked = proxy.connections, len(proxy.requests)
        work()
        return proxy.connections - opened, len(proxy.requests) - asked

    def heartbeat() -> None:
        storage.put("key", b"heartbeat")
        storage.list("claims/")

    def data_requests() -> None:
        for _ in range(3):
            storage.put("key", b"data")

    opened, asked = connections(lambda: call_within(20.0, heartbeat))
    assert opened == asked >= 3
    opened, asked = connections(data_requests)
    assert opened <= 1 and asked >= 6, "data requests share connections"
    proxy.inject(remote.write, "503", "reset", "500")
    opened, asked = connections(lambda: call_within(20.0, heartbeat))
    assert opened == asked >= 6 and len(proxy.fired) == 3


def test_data_requests_keep_their_limits(store: object) -> None:
    config = s3.client().meta.config
    assert (config.connect_timeout, config.read_timeout) == (CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
    assert current_limit() is None and call_within(9, current_limit) is not None and current_limit() is None


def test_a_limit_within_another_ends_with_it() -> None:
    started = time.monotonic()
    with pytest.raises(StorageUnavailable, match=r"within 0\.3 s"):
        call_within(0.3, lambda: call_within(30, lambda: time.sleep(3)))
    assert time.monotonic() - started < 2


def test_results_and_errors_are_those_of_the_work() -> None:
    def fail() -> None:
        raise TimeoutError("of the work")

    assert call_within(5, lambda: 7) == 7
    with refuses(TimeoutError):
        call_within(5, fail)


def test_without_a_thread_a_request_fails_as_if_the_store_were_away(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("threading.Thread.start", refuse)
    with refuses(StorageUnavailable):
        call_within(5, lambda: 7)
