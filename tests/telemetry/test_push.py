"""Totals pushed to a gateway: content, and gateways that are dead, silent, or refuse."""

import base64
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from slipstream.operations.proofs.processes import free_port
from slipstream.shared.telemetry.push import push_totals
from slipstream.shared.telemetry.totals import NodeTotals, write_node, write_totals
from tests.support.sampler_process import LABELS, totals
from tests.support.wording import same_wording


class Gateway(BaseHTTPRequestHandler):
    code: ClassVar[int] = 200
    got: ClassVar[list[tuple[str, str]]] = []
    authorizations: ClassVar[list[str | None]] = []

    def do_PUT(self) -> None:
        self.authorizations.append(self.headers["Authorization"])
        self.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"])).decode()))
        # A gateway may repeat what it got.
        self.send_response(self.code, f"no {self.headers['Authorization']} {self.path}")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[str]:
    Gateway.code = 200
    Gateway.got.clear()
    Gateway.authorizations.clear()
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_node(tmp_path, NodeTotals(60, 120, {"GPU-0": 5.5}, {}, {"spot": 0.05}))
    write_totals(tmp_path, totals())
    return tmp_path


def test_the_gateway_gets_counters_of_this_attempt(
    gateway: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push_totals(gateway + "/", directory, LABELS)
    ((path, text),) = Gateway.got
    assert path == "/metrics/job/slipstream/execution/f1a2/task/train/attempt/1/node/node-7"
    values = [
        line.split()[-1] for line in text.splitlines() if "dollars_total{" in line or "gpu_seconds_total{" in line
    ]
    assert values == ["120", "0.05"]
    assert "slipstream_steps_total{" in text and "gauge" not in text
    assert capsys.readouterr().err == ""


def test_labels_that_are_no_part_of_a_path_are_encoded(gateway: str, directory: Path) -> None:
    push_totals(gateway, directory, replace(LABELS, execution="..", task="", node="ü ?"))
    ((path, _),) = Gateway.got
    name = base64.urlsafe_b64encode(b"..").decode()
    assert path == f"/metrics/job/slipstream/execution@base64/{name}/task@base64/=/attempt/1/node/%C3%BC%20%3F"


def test_without_totals_nothing_is_pushed(gateway: str, tmp_path: Path) -> None:
    push_totals(gateway, tmp_path, LABELS)
    assert not Gateway.got


def warning(url: str, directory: Path, capsys: pytest.CaptureFixture[str], within: float = 2.0) -> str:
    push_totals(url, directory, LABELS, within)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("telemetry    warning: SLIPSTREAM_PUSHGATEWAY")
    return line


@pytest.mark.parametrize(
    "url", ["gateway:9091", "ftp://gateway", "http://", "http://a:b", "http://[", "127.0.0.1:9091"]
)
def test_what_is_no_url_is_one_line(url: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    same_wording(warning(url, directory, capsys))


@pytest.mark.parametrize(
    ("before", "after", "authorization", "query"),
    [
        ("me:SECRET@", "", "me:SECRET", ""),
        ("me:SECRET%40%2F%3F%23%3A@", "/", "me:SECRET@/?#:", ""),
        ("SECRET@", "", "SECRET:", ""),
        (":SECRET@", "", ":SECRET", ""),
        ("m%C3%A9:SECRETé@", "", "mé:SECRETé", ""),
        ("", "?token=SECRET", "", "?token=SECRET"),
        ("me:SECRET@", "?token=SECRET%40&a=é", "me:SECRET", "?token=SECRET%40&a=%C3%A9"),
    ],
)
def test_secrets_travel_beside_the_address_and_reach_no_message(
    *,
    before: str,
    after: str,
    authorization: str,
    query: str,
    gateway: str,
    directory: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = gateway.replace("//", f"//{before}") + after
    push_totals(url, directory, LABELS)
    ((path, _),) = Gateway.got
    assert path.endswith(f"/node/node-7{query}") and "SECRET" not in path.removesuffix(query)
    header = f"Basic {base64.b64encode(authorization.encode()).decode()}" if authorization else None
    assert Gateway.authorizations == [header] and capsys.readouterr().err == ""
    for code in (401, 799):
        Gateway.code = code
        line = warning(url, directory, capsys)
        assert f"it refused ({code}" in line and f"SLIPSTREAM_PUSHGATEWAY={gateway}: " in line
        assert "SECRET" not in line and (header or "SECRET").split()[-1] not in line
    Gateway.code = 200
    dead = warning(f"http://{before}127.0.0.1:{free_port()}{after}", directory, capsys)
    assert "SECRET" not in dead
    same_wording(dead)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:SECRET",
        "http://me:SEC/RET@127.0.0.1:{port}",
        "http://me:12/SECRET@127.0.0.1:{port}",
        "http://me:12?SECRET@127.0.0.1:{port}",
        "http://me:12#SECRET@127.0.0.1:{port}",
        "http://me:SEC@RET@127.0.0.1:{port}",
        "http://me:SEC[RET@127.0.0.1:{port}",
        "http://me:SECRET @127.0.0.1:{port}",
        "http://me:SECRET\n@127.0.0.1:{port}",
        "http://127.0.0.1:{port}/a/SECRET@b",
        "http://127.0.0.1:{port}#SECRET",
        "http://127.0.0.1:{port}?token=SECRET@",
        "http://me:SECRET@127.0.0.1:port",
        "me:SECRET@127.0.0.1:{port}",
        "//me:SECRET@127.0.0.1:{port}",
    ],
)
def test_a_url_that_cannot_be_taken_apart_is_not_quoted(
    url: str, gateway: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = warning(url.replace("{port}", gateway.rpartition(":")[2]), directory, capsys)
    assert "percent-encode / and @" in line
    same_wording(line)
    assert not Gateway.got and not any(part in line for part in ("SEC", "RET", "127.0.0.1", "me:"))


def test_a_gateway_that_never_answers_is_one_line_after_a_while(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        line = warning(f"http://127.0.0.1:{silent.getsockname()[1]}", directory, capsys, within=0.3)
        assert "has not answered within 0.3 s" in line or "timed out" in line
        assert time.monotonic() - began < 5


def test_a_gateway_that_never_ends_its_answer_is_one_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of its bytes comes soon after the one before."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ended = threading.Event()

        def speak() -> None:
            client, _ = server.accept()
            with client:
                client.sendall(b"HTTP/1.1 200 OK\r\nX: ")
                while not ended.wait(0.05):
                    client.sendall(b"x")

        threading.Thread(target=speak, daemon=True).start()
        line = warning(f"http://127.0.0.1:{server.getsockname()[1]}", directory, capsys, within=0.4)
        ended.set()
        same_wording(line)


def test_a_gateway_that_speaks_something_else_is_one_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            client, _ = server.accept()
            client.sendall(b"SSH-2.0\r\n")
            client.close()

        threading.Thread(target=speak, daemon=True).start()
        warning(f"http://127.0.0.1:{server.getsockname()[1]}", directory, capsys)
