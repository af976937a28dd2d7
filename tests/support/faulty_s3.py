"""An S3 on loopback with injected faults: moto's server behind a proxy."""

from __future__ import annotations

import base64
import http.client
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from moto.server import ThreadedMotoServer

#: Found nowhere but in the environment.
SECRET = "a-secret-key-of-the-tests"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}


class FaultyS3(ThreadingHTTPServer):
    """Forwards requests to moto. ``plan`` holds faults still to come, for requests of a method; ``fired`` those done.

    Faults: "403", "500" and "503" answer so, and "409 OperationAborted" with this code; "kept TEXT CODE" answers 200 to
    a request for deletion, but says CODE of each key that contains TEXT, and keeps it;
    "reset" hangs up before anything is done, "lost" after it was done;
    "truncate" sends half of the answer; "stall" sends half and then nothing for ``stall_s`` seconds; "corrupt" flips a
    bit of the request's body, or of the answer's if the request has none; "cut" stores half of it; "pass" is no
    fault, to skip a request.
    A body that does not match its CRC is refused, as S3 does and moto does not.
    ``slow`` maps parts of paths to seconds by which matching writes are delayed.
    ``down_until`` (``time.monotonic``) makes every connection end at once without an answer, ``silent_until`` makes it
    stay without one until the client ends it.
    ``ignores_conditions`` drops the condition of a write, as some services do; ``fired`` names each such write.
    ``clock_ahead_s`` moves the date of all answers.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, upstream: tuple[str, int], handler: type[Handler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.upstream = upstream
        self.plan: list[tuple[str, str]] = []
        self.fired: list[tuple[str, str]] = []
        self.refused = 0
        self.requests: list[str] = []
        #: Connections that were accepted.
        self.connections = 0
        self.down_until = self.silent_until = 0.0
        self.ignores_conditions = False
        self.clock_ahead_s = 0.0
        self.slow: dict[str, float] = {}
        self.stall_s = 1.0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def inject(self, method: str, *faults: str) -> None:
        """Let the next requests of ``method`` go wrong, one fault each."""
        with self.lock:
            self.plan += [(method, fault) for fault in faults]

    def next_fault(self, method: str) -> str | None:
        with self.lock:
            for index, (wanted, fault) in enumerate(self.plan):
                if wanted == method:
                    self.fired.append(self.plan.pop(index))
                    return fault
        return None

    def get_request(self) -> tuple[socket.socket, Any]:
        self.connections += 1
        return super().get_request()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is part of the play."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyS3

    def log_message(self, format: str, *args: object) -> None:
        pass

    def forward(self) -> None:
        server = self.server
        if time.monotonic() < server.down_until:
            server.refused += 1
            return self.hang_up()
        if time.monotonic() < server.silent_until:
            server.refused += 1
            while self.connection.recv(1 << 16):
                pass
            return self.hang_up()
        body = self.read_body()
        with server.lock:
            server.requests.append(f"{self.command} {self.path} {self.headers.get('Range', '')}".strip())
        fault = server.next_fault(self.command)
        if fault == "reset":
            return self.hang_up()
        if fault in ("403", "500", "503"):
            code = {"403": "AccessDenied", "500": "InternalError", "503": "SlowDown"}[fault]
            return self.error(int(fault), code)
        if fault and re.fullmatch(r"\d{3} \w+", fault):
            return self.error(int(fault[:3]), fault[4:])
        kept = re.fullmatch(r"kept (\S+) (\w+)", fault or "")
        refused = b""
        if kept:
            body, refused = without(body, *kept.groups())
        if fault == "corrupt" and body:
            body = flipped(body)
        path, headers = self.path, {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        if server.ignores_conditions:
            path = self.drop_condition(path, headers)
        elif refusal := None if kept else self.refusal(body):
            return self.error(*refusal)
        if fault == "cut":
            body = body[: len(body) // 2]
        if self.command == "PUT":
            time.sleep(max((seconds for text, seconds in server.slow.items() if text in self.path), default=0.0))
        connection = http.client.HTTPConnection(*server.upstream, timeout=60)
        headers.pop("Transfer-Encoding", None)
        if body:
            headers["Content-Length"] = str(len(body))
        connection.request(self.command, path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        skipped = ("transfer-encoding", "connection", "content-length")
        answered = [(name, value) for name, value in answer.getheaders() if name.lower() not in skipped]
        if server.clock_ahead_s:
            date = formatdate(time.time() + server.clock_ahead_s, usegmt=True)
            answered = [(name, date if name.lower() == "date" else value) for name, value in answered]
        size = int(answer.getheader("Content-Length") or len(data))
        if refused:
            data = data.replace(b"</DeleteResult>", refused + b"</DeleteResult>")
            size = len(data)
        if fault == "corrupt" and not body:
            data = flipped(data)
        if fault == "lost":
            return self.hang_up()
        if fault in ("truncate", "stall"):
            self.answer(answer.status, answered, data[: len(data) // 2], size)
            time.sleep(server.stall_s if fault == "stall" else 0)
            return self.hang_up()
        return self.answer(answer.status, answered, data, size)

    def do_GET(self) -> None:
        self.forward()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET

    def drop_condition(self, path: str, headers: dict[str, str]) -> str:
        """Remove the condition of a write from the headers. Returns the path without one."""
        for name in [name for name in headers if name.lower() == "if-none-match"]:
            del headers[name]
            self.server.fired.append((self.command, f"ignored the condition of {path}"))
        return path

    def refusal(self, body: bytes) -> tuple[int, str] | None:
        """Status and code with which the store answers a request that its stand-in would accept."""
        sent = self.headers.get("x-amz-checksum-crc32")
        if sent is None or base64.b64decode(sent) == zlib.crc32(body).to_bytes(4, "big"):
            return None
        return 400, "BadDigest"

    def error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.answer(status, [("Content-Type", "application/xml")], text, len(text))

    def read_body(self) -> bytes:
        if self.headers.get("Expect", "").lower() == "100-continue":
            pass  # BaseHTTPRequestHandler has already sent "100 Continue".
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return body

    def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, size: int) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        self.wfile.flush()

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.close()


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def without(body: bytes, text: str, code: str) -> tuple[bytes, bytes]:
    """A request for deletion without the keys that contain ``text``, and what the answer says of these."""
    objects = re.findall(rb"<Object>.*?<Key>(.*?)</Key>.*?</Object>", body, re.DOTALL)
    kept = [key for key in objects if text.encode() in key]
    left = b"".join(b"<Object><Key>%b</Key></Object>" % key for key in objects if key not in kept)
    errors = b"".join(b"<Error><Key>%b</Key><Code>%b</Code></Error>" % (key, code.encode()) for key in kept)
    # Of nothing at all the stand-in makes an error.
    left = left or b"<Object><Key>nothing/of/this/name</Key></Object>"
    return b'<Delete xmlns="http://s3.amazonaws.com/doc/2006-03-01/">%b<Quiet>true</Quiet></Delete>' % left, errors


@contextmanager
def faulty(upstream: tuple[str, int], handler: type[Handler] = Handler) -> Iterator[FaultyS3]:
    """The proxy before a store that listens at ``upstream``."""
    proxy = FaultyS3(upstream, handler)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    try:
        with faulty(moto.get_host_and_port()) as proxy:
            yield proxy
    finally:
        moto.stop()
