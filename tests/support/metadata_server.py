"""The metadata servers of three clouds on loopback, over real HTTP, with the ways in which they misbehave."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class MetadataServer(ThreadingHTTPServer):
    """Answers for one ``cloud``. ``event`` is the seconds of notice it gives, None while nothing is to happen."""

    daemon_threads = True

    def __init__(self, cloud: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.cloud = cloud
        self.event: float | None = None
        self.rebalance = False
        #: What it says of its machine; "" is not said.
        self.spot, self.type, self.node = "", "", ""
        #: Azure's other name of it, and what Google says besides "preemptible".
        self.computer, self.model = "", ""
        #: One of "", "garbage", "500", "hang", and "stranger", which has an answer to anything.
        self.mood = ""
        self.tokens = {"token-1"}
        self.issued = 1
        self.statuses: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def expire_tokens(self) -> None:
        self.issued += 1
        self.tokens = {f"token-{self.issued}"}


class Handler(BaseHTTPRequestHandler):
    server: MetadataServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def answer(self, status: int, body: str = "", **headers: str) -> None:
        self.server.statuses.append(status)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def misbehaves(self) -> bool:
        mood = self.server.mood
        if mood == "hang":
            time.sleep(30)
        elif mood == "500":
            self.answer(500, "oops")
        elif mood == "stranger":
            self.answer(200, "TRUE")
        elif mood == "garbage":
            self.answer(200, "\x00<html>{not: json", Metadata_Flavor="Google")
        return bool(mood)

    def do_PUT(self) -> None:
        if self.server.cloud != "aws" or self.path != "/latest/api/token":
            return self.answer(404)
        if not self.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
            return self.answer(400)
        if self.misbehaves():
            return None
        return self.answer(200, next(iter(self.server.tokens)))

    def do_GET(self) -> None:
        if self.misbehaves():
            return None
        return getattr(self, f"get_{self.server.cloud}")()

    def get_aws(self) -> None:
        if self.headers.get("X-aws-ec2-metadata-token") not in self.server.tokens:
            return self.answer(401)
        if self.path == "/latest/meta-data/spot/instance-action" and self.server.event is not None:
            moment = datetime.now(UTC) + timedelta(seconds=self.server.event)
            return self.answer(200, json.dumps({"action": "terminate", "time": f"{moment:%Y-%m-%dT%H:%M:%SZ}"}))
        if self.path == "/latest/meta-data/events/recommendations/rebalance" and self.server.rebalance:
            return self.answer(200, '{"noticeTime": "2030-01-01T00:00:00Z"}')
        facts = {"instance-life-cycle": "spot", "instance-type": "type", "local-hostname": "node"}
        return self.fact(facts.get(self.path.removeprefix("/latest/meta-data/"), ""))

    def fact(self, name: str, **headers: str) -> None:
        said = getattr(self.server, name, "")
        return self.answer(200 if said else 404, said, **headers)

    def get_gcp(self) -> None:
        if self.headers.get("Metadata-Flavor") != "Google":
            return self.answer(403)
        what = self.path.removeprefix("/computeMetadata/v1/instance/")
        facts = {"scheduling/preemptible": "spot", "machine-type": "type", "name": "node"}
        facts["scheduling/provisioning-model"] = "model"
        if what != "preempted":
            return self.fact(facts.get(what, ""), Metadata_Flavor="Google")
        return self.answer(200, "FALSE" if self.server.event is None else "TRUE", Metadata_Flavor="Google")

    def get_azure(self) -> None:
        if self.headers.get("Metadata") != "true":
            return self.answer(400)
        if self.path.startswith("/metadata/instance"):
            facts = {"priority": self.server.spot, "vmSize": self.server.type, "name": self.server.node}
            system = {"osProfile": {"computerName": self.server.computer}} if self.server.computer else {}
            return self.answer(200, json.dumps({"compute": {**facts, **system}}))
        if not self.path.startswith("/metadata/scheduledevents"):
            return self.answer(404)
        events = [{"EventType": "Freeze", "NotBefore": ""}]
        if self.server.event is not None:
            moment = datetime.now(UTC) + timedelta(seconds=self.server.event)
            events.append({"EventType": "Preempt", "NotBefore": format_datetime(moment, usegmt=True)})
        return self.answer(200, json.dumps({"DocumentIncarnation": 1, "Events": events}))


@contextmanager
def metadata_server(cloud: str) -> Iterator[MetadataServer]:
    server = MetadataServer(cloud)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
