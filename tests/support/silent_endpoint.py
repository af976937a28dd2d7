"""An endpoint on loopback that accepts connections and never answers, or only by one byte after another."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class SilentEndpoint:
    """``connections`` holds the bytes that came over every connection; ``closed`` counts those that the client ended.

    With ``every_s`` an answer trickles: a byte of it after that many seconds.
    """

    listener: socket.socket
    every_s: float = 0.0
    connections: list[bytearray] = field(default_factory=list)
    closed: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                received = bytearray()
                self.connections.append(received)
                threading.Thread(target=self.receive, args=(connection, received), daemon=True).start()
                if self.every_s:
                    threading.Thread(target=self.trickle, args=(connection,), daemon=True).start()

    def receive(self, connection: socket.socket, received: bytearray) -> None:
        with suppress(OSError), connection:
            while data := connection.recv(1 << 16):
                received += data
        self.closed += 1

    def trickle(self, connection: socket.socket) -> None:
        with suppress(OSError):
            for byte in b"HTTP/1.1 200 OK\r\n" + b"x" * 10_000:
                connection.sendall(bytes([byte]))
                time.sleep(self.every_s)


@contextmanager
def silent_endpoint(every_s: float = 0.0) -> Iterator[SilentEndpoint]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        endpoint = SilentEndpoint(listener, every_s)
        threading.Thread(target=endpoint.accept, daemon=True).start()
        yield endpoint
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
