"""Metrics over HTTP: responses, and addresses that cannot be bound."""

import contextlib
import socket
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream.operations.proofs.processes import free_port
from slipstream.shared.telemetry.sampler import server
from slipstream.shared.telemetry.sampler.server import listen_for_requests, serve_metrics
from tests.support.sampler_process import until
from tests.support.wording import same_wording


@pytest.fixture(scope="module")
def port() -> int:
    """Where the text "metrics" is served."""
    port = free_port()
    serve_metrics(f"127.0.0.1:{port}", lambda: "metrics é\n")
    until(lambda: answers(port))
    return port


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def ask(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_the_metrics_are_served_and_nothing_else(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(port, "/metrics") == ask(port, "/metrics?name=a") == (200, "metrics é\n")
    for path in ("/", "/metrics/", "/metric", "/../metrics", "/etc/passwd"):
        assert ask(port, path) == (404, "")
    for method in ("POST", "PUT", "HEAD", "DELETE"):
        assert ask(port, "/metrics", method) == (404, "")
    assert capsys.readouterr().err == ""


def test_a_client_that_says_nothing_or_nonsense_keeps_nobody_waiting_for_long(
    port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert ask(port, "/metrics") == (200, "metrics é\n")
    assert capsys.readouterr().err == ""


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> float:
    """Connections are closed after a second."""
    assert server.CONNECTION_S == 5.0
    monkeypatch.setattr(server, "CONNECTION_S", 1.0)
    return 1.0


def closed_after(client: socket.socket, every_s: float = 0.1) -> float:
    """Send a byte of a request after another, until the server has closed the connection; return the seconds."""
    started = time.monotonic()
    client.settimeout(every_s)
    with contextlib.suppress(ConnectionError):
        while time.monotonic() - started < 10:
            client.sendall(b"G")
            with contextlib.suppress(TimeoutError):
                if not client.recv(1):
                    break
    return time.monotonic() - started


def test_a_client_that_sends_a_byte_at_a_time_blocks_nobody_and_is_cut_off(port: int, short: float) -> None:
    with socket.create_connection(("127.0.0.1", port)) as slow, ThreadPoolExecutor(1) as pool:
        lasted = pool.submit(closed_after, slow)
        time.sleep(0.3)
        assert ask(port, "/metrics") == (200, "metrics é\n") and not lasted.done()
        assert short - 0.5 < lasted.result() < short + 3


def test_of_many_clients_eight_are_served_at_a_time_and_the_others_wait(
    port: int, short: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: set[server.MetricsHandler] = set()
    most, begin, end = [0], server.MetricsHandler.setup, server.MetricsHandler.finish

    def begin_noted(handler: server.MetricsHandler) -> None:
        served.add(handler)
        most[0] = max(most[0], len(served))
        begin(handler)

    def end_noted(handler: server.MetricsHandler) -> None:
        end(handler)
        served.discard(handler)

    monkeypatch.setattr(server.MetricsHandler, "setup", begin_noted)
    monkeypatch.setattr(server.MetricsHandler, "finish", end_noted)
    with contextlib.ExitStack() as stack:
        for _ in range(server.MOST_CONNECTIONS + 2):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        until(lambda: len(served) == server.MOST_CONNECTIONS == 8)
        started = time.monotonic()
        assert ask(port, "/metrics") == (200, "metrics é\n")  # as soon as the first ones are cut off
        assert time.monotonic() - started > short / 4 and most == [server.MOST_CONNECTIONS]


def test_a_client_that_does_not_read_its_answer_is_cut_off(short: float) -> None:
    port, large = free_port(), 64 << 20
    serve_metrics(f"127.0.0.1:{port}", lambda: "x" * large)
    until(lambda: answers(port))
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        time.sleep(short + 1)
        client.settimeout(5)
        received = 0
        with contextlib.suppress(ConnectionError):
            while data := client.recv(1 << 20):
                received += len(data)
    assert 0 < received < large


def warning(address: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that listening at an address ends with."""
    thread = threading.Thread(target=listen_for_requests, args=(address, str), daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"telemetry    warning: SLIPSTREAM_METRICS={address}: ")
    assert line.endswith("; the sampler serves no metrics")
    return line


@pytest.mark.parametrize(
    "address", ["9400", ":9400", "localhost", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "http://127.0.0.1:9400"]
)
def test_a_malformed_address_is_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    same_wording(warning(address, capsys))


def test_an_occupied_port_is_one_line(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    same_wording(warning(f"127.0.0.1:{port}", capsys))


@pytest.mark.parametrize("address", ["192.0.2.1:9400", "[2001:db8::1]:9400", f"{'x' * 64}.invalid:9400"])
def test_a_foreign_address_is_one_line(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot be used for listening (" in warning(address, capsys)
