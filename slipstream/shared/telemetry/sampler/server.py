"""HTTP server for metrics, in a thread: ``GET /metrics`` at ``SLIPSTREAM_METRICS=host:port``."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any

from slipstream.shared.logs import logger

VARIABLE = "SLIPSTREAM_METRICS"
ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(?P<port>[0-9]{1,5})")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Connections served at a time; others wait until one closes.
MOST_CONNECTIONS = 8
#: Seconds after which a connection is closed, whatever its client does.
CONNECTION_S = 5.0
log = logger("telemetry")


def serve_metrics(address: str, text: Callable[[], str]) -> None:
    """Serve the result of ``text`` in a new thread.

    An address that cannot be bound causes one warning.
    """
    threading.Thread(target=listen_for_requests, args=(address, text), name="metrics", daemon=True).start()


def listen_for_requests(address: str, text: Callable[[], str]) -> None:
    match = ADDRESS.fullmatch(address)
    if not match or not 0 < int(match["port"]) < 1 << 16:
        warn(address, "expected an address of this machine and a port, such as 127.0.0.1:9400")
        return
    try:
        family, *_, where = socket.getaddrinfo(
            match["host"].strip("[]"), int(match["port"]), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = MetricsServer(where, family, text)
    except (OSError, UnicodeError) as error:  # UnicodeError: invalid host name
        warn(address, f"cannot be used for listening ({getattr(error, 'strerror', None) or error}); choose another one")
        return
    server.serve_forever()


def warn(address: str, problem: str) -> None:
    log.warning("%s=%s: %s; the sampler serves no metrics", VARIABLE, address, problem)


class MetricsServer(ThreadingHTTPServer):
    """HTTP server with a bounded number of connections, each in its own thread."""

    #: Backlog: the system drops further connections, and their clients retry after a second.
    request_queue_size = 64

    def __init__(self, where: Any, family: socket.AddressFamily, text: Callable[[], str]) -> None:
        self.address_family = family
        self.text = text
        self.free = threading.Semaphore(MOST_CONNECTIONS)
        super().__init__(where, MetricsHandler)

    def get_request(self) -> tuple[socket.socket, Any]:
        self.free.acquire()
        try:
            return super().get_request()
        except OSError:
            self.free.release()
            raise

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        self.free.release()

    def server_bind(self) -> None:
        """Bind without ``HTTPServer``'s DNS lookup."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = "", 0  # unused

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect."""


class MetricsHandler(BaseHTTPRequestHandler):
    """Handler of one connection."""

    server: MetricsServer

    def setup(self) -> None:
        super().setup()
        self.limit = threading.Timer(CONNECTION_S, self.hang_up)
        self.limit.daemon = True
        self.limit.start()

    def hang_up(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def finish(self) -> None:
        self.limit.cancel()
        super().finish()

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404)
            return
        content = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer unsupported methods with 404 instead of 501."""
        super().send_error(404 if code == 501 else code, message, explain)

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""
