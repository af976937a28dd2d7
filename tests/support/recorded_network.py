"""A network namespace whose only way out ends at a recorder: ``python -m tests.support.recorded_network FILE COMMAND``.

Runs the command and writes what it sent beyond loopback to FILE: a JSON list of ``protocol address:port content``.
Needs Linux with unprivileged user namespaces and TUN devices, and iproute2; run it by :func:`recorded`.
"""

import fcntl
import ipaddress
import json
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
#: linux/if_tun.h: TUNSETIFF, IFF_TUN and IFF_NO_PI.
TUNSETIFF, TUN, BARE_PACKETS = 0x400454CA, 0x0001, 0x1000
DEVICE = "recorder"
#: Packets of processes; the kernel itself sends others (ICMPv6).
PROTOCOLS = {6: "TCP", 17: "UDP"}
INSIDE = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-m", "tests.support.recorded_network"]


def recorded(
    command: Sequence[str], directory: Path, environment: Mapping[str, str]
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How ``command`` ended in ``directory``, and what it sent beyond loopback."""
    sent = directory / "sent.json"
    ended = subprocess.run(
        [*INSIDE, str(sent), *command],
        cwd=directory,
        env={**environment, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=500,
    )
    return ended, json.loads(sent.read_text())


def impossible() -> str:
    """Why this machine has no such namespace; empty if it has."""
    if missing := [name for name in ("unshare", "ip") if not shutil.which(name)]:
        return f"{missing[0]} is not installed"
    tried = subprocess.run([*INSIDE, "/dev/null", "true"], cwd=REPOSITORY, capture_output=True, text=True)
    return f"no network namespace: {tried.stderr.strip().splitlines()[-1]}" if tried.returncode else ""


def open_device() -> int:
    """The device that all packets beyond loopback go to; what is read from it are bare IP packets."""
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), TUN | BARE_PACKETS))
    for line in (
        "link set lo up",
        f"address add 198.51.100.1/24 dev {DEVICE}",
        f"link set {DEVICE} up",
        f"route add default dev {DEVICE}",
        f"-6 route add default dev {DEVICE}",
    ):
        subprocess.run(["ip", *line.split()], check=True)
    return device


def described(packet: bytes) -> str | None:
    """A packet of a process as text: protocol, destination and content; None for the kernel's own."""
    if packet[0] >> 4 == 4:
        protocol, to, start = packet[9], packet[16:20], 4 * (packet[0] & 15)
    else:
        protocol, to, start = packet[6], packet[24:40], 40
    if protocol not in PROTOCOLS:
        return None
    port = int.from_bytes(packet[start + 2 : start + 4], "big")
    content = packet[start + 8 :].decode("ascii", "replace")
    return f"{PROTOCOLS[protocol]} {ipaddress.ip_address(to)}:{port} {content}"


def main(target: str, *command: str) -> int:
    device, sent = open_device(), []

    def record() -> None:
        while True:
            if text := described(os.read(device, 65536)):
                sent.append(text)

    threading.Thread(target=record, daemon=True).start()
    code = subprocess.run(command).returncode
    Path(target).write_text(json.dumps(sent))
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
