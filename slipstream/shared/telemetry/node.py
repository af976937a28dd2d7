"""Facts about this node: name, instance type, spot capacity.

They come from the cloud's metadata server, otherwise from the placement. All clouds are queried in parallel, for at
most one second. Sources: AWS "Instance metadata categories" (instance-life-cycle, instance-type, local-hostname),
Google "About VM metadata" (instance/machine-type, name, scheduling/preemptible; some servers also give
provisioning-model), Azure "Instance Metadata Service" (compute: priority, vmSize, osProfile.computerName).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from slipstream.shared.artifacts.records import decode_plain, to_plain_json
from slipstream.shared.machine.description import (
    GOOGLE,
    LINK_LOCAL,
    AwsMetadata,
    MetadataUnavailable,
    http_request,
    parse_mapping,
)

#: Timeout of all queries together, in seconds.
WITHIN_S = 1.0
#: Valid names and types; other values from a server are ignored.
NAME = re.compile(r"[A-Za-z0-9._:/-]{1,253}")
SPOT, TYPE, NODE = "spot", "type", "node"
#: Key (``SPOT``, ``TYPE`` or ``NODE``) and value; the value of SPOT is "yes" or "no".
Answer = tuple[str, str]
Asker = Callable[[], Iterator[Answer]]


@dataclass(frozen=True)
class NodeFacts:
    """Facts about the node of an attempt."""

    #: Start of the stage, in a pod of its process; seconds since 1970, UTC.
    started_at: float
    node: str
    #: "aws", "gcp" or "azure"; "" if no metadata server answered.
    cloud: str
    #: The cloud's instance type, such as "p5.48xlarge"; "" if unknown.
    instance_type: str
    spot: bool
    #: True if ``spot`` comes from metadata; False if it is the placement's request.
    spot_is_certain: bool


def process_age() -> float:
    """Return the seconds since this process started; 0 if the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
    except (OSError, AttributeError, ValueError, IndexError):
        return 0.0


def node_facts(asked_spot: bool, askers: Mapping[str, Asker] | None = None) -> NodeFacts:
    """Return the facts of this node within a second, whatever the state of the network.

    ``asked_spot`` is the placement's request; ``askers`` are the cloud queries by name (default: all).
    """
    started_at = time.time()
    cloud, said = first_cloud(ASKERS if askers is None else askers)
    return NodeFacts(
        started_at,
        said.get(NODE) or socket.gethostname(),
        cloud,
        said.get(TYPE, ""),
        said[SPOT] == "yes" if SPOT in said else asked_spot,
        SPOT in said,
    )


def first_cloud(askers: Mapping[str, Asker]) -> tuple[str, dict[str, str]]:
    """Return the first cloud that answers completely, else the one with most answers in time, and its answers."""
    until = time.monotonic() + WITHIN_S
    answers: SimpleQueue[tuple[str, Answer | None]] = SimpleQueue()
    for cloud, asker in askers.items():
        threading.Thread(
            target=query_cloud, args=(cloud, asker, answers), name=f"{cloud} metadata", daemon=True
        ).start()
    said: dict[str, dict[str, str]] = defaultdict(dict)
    unfinished = set(askers)
    while unfinished:
        try:
            cloud, answer = answers.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            break
        if answer is not None:
            said[cloud].update([answer])
            continue
        unfinished.discard(cloud)
        if cloud in said:
            break
    return max(said.items(), key=lambda item: len(item[1]), default=("", {}))


def query_cloud(cloud: str, asker: Asker, answers: SimpleQueue[tuple[str, Answer | None]]) -> None:
    """Put a cloud's valid answers into the queue, then None."""
    with suppress(MetadataUnavailable):
        for what, value in asker():
            if NAME.fullmatch(value):
                answers.put((cloud, (what, value)))
    answers.put((cloud, None))


def yes(spot: bool) -> Answer:
    return SPOT, "yes" if spot else "no"


def ask_aws(base: str = LINK_LOCAL) -> Iterator[Answer]:
    server = AwsMetadata(base, timeout=WITHIN_S)
    if life_cycle := text(server.get("/latest/meta-data/instance-life-cycle")):
        yield yes(life_cycle == "spot")
    yield TYPE, text(server.get("/latest/meta-data/instance-type"))
    yield NODE, text(server.get("/latest/meta-data/local-hostname"))


def ask_gcp(base: str = GOOGLE) -> Iterator[Answer]:
    def get(path: str) -> str:
        url = f"{base}/computeMetadata/v1/instance/{path}"
        status, body, headers = http_request(url, {"Metadata-Flavor": "Google"}, timeout=WITHIN_S)
        if headers.get("Metadata-Flavor") != "Google" and status != 404:
            raise MetadataUnavailable(f"{url}: status {status}")
        return text(body).rpartition("/")[2] if status == 200 else ""

    preemptible = get("scheduling/preemptible")
    if preemptible in ("TRUE", "FALSE"):
        yield yes(preemptible == "TRUE" or get("scheduling/provisioning-model") == "SPOT")
    yield TYPE, get("machine-type")
    yield NODE, get("name")


def ask_azure(base: str = LINK_LOCAL) -> Iterator[Answer]:
    url = f"{base}/metadata/instance?api-version=2021-02-01"
    status, body, _ = http_request(url, {"Metadata": "true"}, timeout=WITHIN_S)
    compute = parse_mapping(body, url).get("compute") if status == 200 else None
    if not isinstance(compute, dict):
        raise MetadataUnavailable(f"{url}: status {status}")
    # Empty for machines without an explicit priority.
    if priority := str(compute.get("priority") or ""):
        yield yes(priority in ("Spot", "Low"))
    yield TYPE, str(compute.get("vmSize") or "")
    # In a scale set the name of the machine differs from that of the node.
    system = compute.get("osProfile")
    yield NODE, str((system.get("computerName") if isinstance(system, dict) else "") or compute.get("name") or "")


def text(body: bytes | None) -> str:
    return (body or b"").decode("ascii", errors="replace").strip()


ASKERS: dict[str, Asker] = {"aws": ask_aws, "gcp": ask_gcp, "azure": ask_azure}


# Facts are also a file next to the pod's samples, so that ranks need no queries of their own

FACTS = "facts.json"


def write_facts(directory: Path, facts: NodeFacts) -> None:
    """Write the facts to ``directory``.

    Raises ``OSError`` on failure.
    """
    (directory / FACTS).write_bytes(to_plain_json(facts))


def read_facts(directory: Path) -> NodeFacts | None:
    """Return the facts in ``directory``; None if missing or damaged."""
    with suppress(OSError):
        return decode_plain((directory / FACTS).read_bytes(), NodeFacts)
    return None
