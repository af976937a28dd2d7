"""Connections on one machine need no name server; all other names are looked up as usual."""

import os
import socket
import sys
from pathlib import Path

import pytest

from slipstream.shared.distributed import names
from slipstream.shared.distributed.names import DEFAULT, host_name_sources, is_here, names_of_this_machine
from tests.support.recorded_network import impossible, recorded

STORES = """
import datetime, socket
from contextlib import nullcontext
from torch.distributed import TCPStore
from slipstream.shared.distributed.names import names_of_this_machine
minute = datetime.timedelta(minutes=1)
with {block}:
    server = TCPStore("localhost", 0, None, True, minute, wait_for_workers=False)
    TCPStore("localhost", server.port, None, False, minute, wait_for_workers=False).set("a", "b")
"""


@pytest.mark.parametrize(
    ("block", "asks"),
    [pytest.param("nullcontext()", "in-addr", marks=pytest.mark.prove), ('names_of_this_machine("localhost")', "")],
)
def test_torchs_sockets_ask_no_name_server(block: str, asks: str, tmp_path: Path) -> None:
    """Without the block they do, which shows that the recorder sees it."""
    if reason := impossible():
        pytest.skip(reason)
    ended, sent = recorded([sys.executable, "-c", STORES.format(block=block)], tmp_path, os.environ)
    assert ended.returncode == 0, ended.stdout
    if asks:
        assert sent and all(asks in packet for packet in sent)
    else:
        assert sent == []


RANKS = """
import os, socket, subprocess, sys, time
{imports}
def rank_of_two():
    {body}
if __name__ == "__main__":
    if "RANK" in os.environ:
        sys.exit(rank_of_two())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}}
    ranks = [{{**os.environ, **world, "RANK": str(rank), "LOCAL_RANK": str(rank)}} for rank in range(2)]
    processes = [subprocess.Popen([sys.executable, *sys.argv], env=rank) for rank in ranks]
    sys.exit(max(process.wait() for process in processes))
"""
MEETING = (
    "from slipstream.shared.distributed.process_group import meeting_store, process_group",
    """
    with process_group(store=meeting_store()):
        pass
""",
)
#: Rank 0 hosts the store that the other's workers connect to, and comes to the second launch later.
LAUNCHES = (
    "from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup",
    """
    group = WorkerGroup.from_environment(os.environ, 60)
    with group.exit_barrier():
        group.rendezvous({})
        group.launch(bool)
        time.sleep(5 * group.is_leader)
        group.launch(bool)
""",
)


@pytest.mark.prove
@pytest.mark.parametrize(("imports", "body"), [MEETING, LAUNCHES], ids=["process group", "launches"])
def test_ranks_that_meet_on_one_machine_ask_no_name_server(imports: str, body: str, tmp_path: Path) -> None:
    if reason := impossible():
        pytest.skip(reason)
    (tmp_path / "ranks.py").write_text(RANKS.format(imports=imports, body=body))
    ended, sent = recorded([sys.executable, "ranks.py"], tmp_path, os.environ)
    assert (ended.returncode, sent) == (0, []), ended.stdout


@pytest.mark.prove
@pytest.mark.parametrize("host", ["localhost", "a-name.invalid"])
def test_other_names_are_looked_up_after_the_block_and_in_it_if_the_host_is_elsewhere(
    host: str, tmp_path: Path
) -> None:
    if reason := impossible():
        pytest.skip(reason)
    look = 'import socket\ntry: socket.getaddrinfo("other.invalid", 1)\nexcept OSError: pass'
    inside = look.replace("other", "inside").replace("\n", "\n    ")
    code = f"with names_of_this_machine({host!r}):\n    {inside}\n{look}"
    code = f"from slipstream.shared.distributed.names import *\n{code}"
    ended, sent = recorded([sys.executable, "-c", code], tmp_path, os.environ)
    assert ended.returncode == 0, ended.stdout
    assert any("other" in packet for packet in sent)
    assert any("inside" in packet for packet in sent) is (host != "localhost")


def test_hosts_of_this_machine() -> None:
    assert is_here("127.0.0.1") and is_here("localhost")
    assert not is_here("192.0.2.1")  # of RFC 5737's addresses for documentation
    with names_of_this_machine("localhost"):
        assert socket.getaddrinfo("localhost", 1)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "passwd: files\nhosts:  files mdns4_minimal [NOTFOUND=return] dns # as usual\n",
            "files mdns4_minimal [NOTFOUND=return] dns",
        ),
        ("#hosts: files\n", DEFAULT),
        (None, DEFAULT),
    ],
)
def test_the_usual_sources_are_read(
    text: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "SOURCES", tmp_path / "nsswitch.conf")
    if text is not None:
        (tmp_path / "nsswitch.conf").write_text(text)
    assert host_name_sources() == found
