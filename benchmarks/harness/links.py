"""Links of a known rate between ranks in their own network namespaces.

All namespaces belong to one user namespace, so no root is needed. They end with the keeper processes that hold them. A
veth pair joins each rank's ``eth0`` to a bridge. ``tc tbf`` limits the rate of a rank, and ``tc htb`` with a u32 filter
the rate between two ranks. ``netem`` is not used, because many kernels lack it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
#: ``PYTHONPATH`` with this project and its benchmarks.
SEARCH_PATH = f"{REPOSITORY / 'benchmarks'}:{REPOSITORY}"
#: Start method of ranks. It preloads no modules, because a list set here would replace the one of
#: :mod:`harness.processes`, which has the same fork server.
FORK = multiprocessing.get_context("forkserver")
INTERFACE, NETWORK = "eth0", "10.77.0"
#: Fraction of a link's rate that carries data in packets of 1,500 bytes: IP takes 20 bytes and TCP with timestamps 32,
#: and ``tc`` also counts the 14 of Ethernet.
PAYLOAD = 1448 / 1514
QUEUE = "burst 128k latency 400ms"
TIMEOUT_S, COMMAND_TIMEOUT_S = 240, 480
#: Rendezvous port, which is free because a namespace has no other processes.
PORT = 29500


@dataclass(frozen=True)
class Links:
    """Network namespaces of ranks, joined by a bridge.

    ``ranks`` are the process ids of the keepers of the ranks' namespaces, ``switch`` that of the bridge's keeper.
    """

    switch: int
    ranks: Sequence[int]

    def limit_sending(self, rank: int, mbit: float) -> None:
        """Limit the sending rate of ``rank`` to ``mbit`` Mbit/s."""
        # With a smaller burst, late wakeups of the CPU would limit the rate.
        self._in(self.ranks[rank], "tc", f"qdisc replace dev {INTERFACE} root tbf rate {mbit}mbit {QUEUE}")

    def limit_rank(self, rank: int, mbit: float) -> None:
        """Limit the sending and receiving rates of ``rank`` to ``mbit`` Mbit/s."""
        self.limit_sending(rank, mbit)
        self._in(self.switch, "tc", f"qdisc replace dev port{rank} root tbf rate {mbit}mbit {QUEUE}")

    def limit_pair(self, one: int, other: int, mbit: float) -> None:
        """Limit the rate between two ranks to ``mbit`` Mbit/s in each direction; other peers are not limited."""
        for sender, receiver in ((one, other), (other, one)):
            self._in(
                self.ranks[sender],
                "tc",
                f"qdisc replace dev {INTERFACE} root handle 1: htb default 10",
                f"class add dev {INTERFACE} parent 1: classid 1:10 htb rate 20gbit quantum 60000",
                f"class add dev {INTERFACE} parent 1: classid 1:20 htb rate {mbit}mbit quantum 60000",
                f"filter add dev {INTERFACE} parent 1: protocol ip u32 match ip dst {address(receiver)}/32 flowid 1:20",
            )

    def _in(self, keeper: int, tool: str, *commands: str) -> None:
        done = subprocess.run(
            [*entering(keeper), tool, "-batch", "-"],
            input="\n".join(commands),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise NotAllowed(f"{tool} {commands[0]}: {done.stderr.strip()}")

    def in_world(self, function: Callable[..., Any], *arguments: Any, world: int = 0) -> list[Any]:
        """Run ``function(*arguments)`` on every rank of a gloo group over the links and return the results by rank.

        ``world`` restricts the group to the first ranks; 0 means all. Raises ``AssertionError`` with the traceback of a
        rank that failed.
        """
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as running:
            found: dict[Connection, int] = {}
            for rank in range(world or len(self.ranks)):
                theirs, ours = FORK.Pipe(duplex=False)[::-1]
                what = (rank, world or len(self.ranks), self.ranks[rank], scratch, theirs)
                # Pickled separately: unpickling imports modules that may start threads, see enter_namespaces().
                work = pickle.dumps((function, arguments))
                process = FORK.Process(target=rank_main, args=(*what, work), daemon=True)
                process.start()
                theirs.close()
                running.callback(process.join)
                running.callback(process.kill)
                found[ours] = rank
            results: dict[int, Any] = {}
            while len(results) < len(found):
                ready = wait([end for end, rank in found.items() if rank not in results], TIMEOUT_S)
                assert ready, f"ranks {sorted(set(found.values()) - set(results))} say nothing for {TIMEOUT_S} seconds"
                for end in ready:
                    assert isinstance(end, Connection)
                    result, failure = end.recv()
                    assert not failure, f"rank {found[end]}: {failure}"
                    results[found[end]] = result
            return [results[rank] for rank in sorted(results)]

    def command(self, words: Sequence[str], directory: Path) -> list[tuple[int, str]]:
        """Run a command in ``directory`` on every rank with torchrun's environment; return exit codes and outputs."""
        here = {"WORLD_SIZE": len(self.ranks), "LOCAL_WORLD_SIZE": len(self.ranks), "MASTER_ADDR": address(0)}
        here |= {"MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONPATH": SEARCH_PATH}
        with ExitStack() as running:
            started = []
            for rank, keeper in enumerate(self.ranks):
                its = {name: str(value) for name, value in (here | {"RANK": rank, "LOCAL_RANK": rank}).items()}
                process = subprocess.Popen(
                    [*entering(keeper), *words],
                    cwd=directory,
                    env=os.environ | its,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                running.enter_context(process)
                running.callback(process.kill)
                started.append(process)
            said = [process.communicate(timeout=COMMAND_TIMEOUT_S)[0] for process in started]
            return [(process.returncode, output) for process, output in zip(started, said, strict=True)]


class NotAllowed(Exception):
    """Namespaces or rate limits cannot be set up on this machine; the message has the tool's error."""


@contextmanager
def linked(world: int, mbit: float = 0) -> Iterator[Links]:
    """Connect ``world`` ranks by one switch; every rank sends at most ``mbit`` Mbit/s (0 for no limit).

    Raises ``NotAllowed`` where namespaces or ``tc`` are missing or not allowed.
    """
    with ExitStack() as kept:
        links = build(world, kept)
        for rank in range(world if mbit else 0):
            links.limit_sending(rank, mbit)
        yield links


def build(world: int, kept: ExitStack) -> Links:
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NotAllowed(f"{' and '.join(missing)} not found; install util-linux and iproute2")
    switch = keeper(["unshare", "--user", "--map-root-user", "--net"], kept)
    inside = ["nsenter", "--target", str(switch), "--user", "--preserve-credentials", "unshare", "--net"]
    links = Links(switch, [keeper(inside, kept) for _ in range(world)])
    links._in(switch, "ip", "link add bridge0 type bridge", "link set bridge0 up")
    for rank, pid in enumerate(links.ranks):
        veth = f"link add port{rank} type veth peer name {INTERFACE} netns {pid}"
        links._in(switch, "ip", veth, f"link set port{rank} master bridge0 up")
        own = f"addr add {address(rank)}/24 dev {INTERFACE}"
        links._in(pid, "ip", own, f"link set {INTERFACE} up", "link set lo up")
        # A host's default may be BBR, which repeatedly sends below the link's rate to probe it. Every kernel has Reno,
        # which does not slow down on a link without drops.
        links._in(pid, "ip", f"route replace {NETWORK}.0/24 dev {INTERFACE} src {address(rank)} congctl reno")
    return links


def keeper(command: Sequence[str], kept: ExitStack) -> int:
    """Return the id of a new process that holds new namespaces open until ``kept`` closes or its parent ends."""
    process = subprocess.Popen(
        [*command, "sh", "-c", "echo kept; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    kept.enter_context(process)
    kept.callback(process.kill)
    assert process.stdout is not None
    said = process.stdout.readline().strip()
    if said != "kept":
        raise NotAllowed(said)
    return process.pid


def entering(keeper: int) -> list[str]:
    return ["nsenter", "--target", str(keeper), "--user", "--net", "--preserve-credentials"]


def address(rank: int) -> str:
    return f"{NETWORK}.{rank + 1}"


def rank_main(rank: int, world: int, keeper: int, scratch: str, end: Connection, work: bytes) -> None:
    """Run one rank in its keeper's namespaces and send ``(result, traceback)`` to ``end``."""
    try:
        enter_namespaces(keeper)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        import torch
        import torch.distributed as dist

        function, arguments = pickle.loads(work)
        torch.set_num_threads(1)
        store, timeout = f"file://{scratch}/store", timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timeout)
        result = function(*arguments)
        dist.barrier()
        dist.destroy_process_group()
        end.send((result, ""))
    except BaseException:
        end.send((None, traceback.format_exc()))


def enter_namespaces(keeper: int) -> None:
    """Enter the namespaces of the process ``keeper``.

    Only a process with a single thread may enter a user namespace; a newly forked one has a single thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    opened = [os.open(Path(f"/proc/{keeper}/ns/{kind}"), os.O_RDONLY) for kind in ("user", "net")]
    for descriptor in opened:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), f"setns({keeper})")
        os.close(descriptor)
