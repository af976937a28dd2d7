"""Parsers of the logs and tables that NVIDIA, AMD and AWS publish."""

from pathlib import Path

import pytest

from slipstream.pipeline.collectives.launch.measurements import measure_group
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.fingerprint import refuse_unknown_interfaces
from slipstream.shared.interconnect.topology import (
    amd_links,
    nccl_log_environment,
    numa_nodes,
    nvidia_links,
    parse_nccl_log,
    rdma_devices,
    transport_fallbacks,
)
from tests.support.wording import same_wording
from tests.support.worker_groups import in_group

#: As NVIDIA's documentation and issues of NCCL print them.
SOCKETS = """
ip-10-0-0-7:55:55 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.7<0>
ip-10-0-0-7:55:55 [0] NCCL INFO NET/Plugin : No plugin found (libnccl-net.so), using internal implementation
ip-10-0-0-7:55:60 [0] NCCL INFO NET/IB : No device found.
ip-10-0-0-7:55:60 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.7<0>
ip-10-0-0-7:55:60 [0] NCCL INFO Using network Socket
ip-10-0-0-7:55:60 [0] NCCL INFO Channel 00/02 :    0   1
ip-10-0-0-7:55:60 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
ip-10-0-0-7:55:60 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
EFA = """
compute-1:1:10 [0] NCCL INFO NET/OFI Selected Provider is efa (found 32 nics)
compute-1:1:10 [0] NCCL INFO Using network AWS Libfabric
compute-1:1:10 [0] NCCL INFO Channel 00/0 : 0[53000] -> 1[64000] via P2P/CUMEM
compute-1:1:10 [0] NCCL INFO Channel 00/0 : 8[53000] -> 0[53000] [receive] via NET/AWS Libfabric/0/GDRDMA
compute-1:1:10 [0] NCCL INFO Channel 01/0 : 8[53000] -> 0[53000] [receive] via NET/AWS Libfabric/1/GDRDMA
"""
INFINIBAND = """
node01:42:99 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB ib0:10.1.0.1<0>
node01:42:99 [0] NCCL INFO Using network IB
node01:42:99 [0] NCCL INFO Channel 00 : 0[1b000] -> 1[1c000] via P2P/IPC
node01:42:99 [0] NCCL INFO Channel 00 : 15[dd000] -> 0[1b000] [receive] via NET/IB/0
"""
EFA_DEVICES = ["rdmap0s0: EFA, 100 Gb/sec (4X EDR)"]


def test_what_nccl_really_uses() -> None:
    assert parse_nccl_log(SOCKETS) == ("NET/Socket on [0]eth0:10.0.0.7<0>", "network Socket", "NET/Socket")
    assert parse_nccl_log(EFA) == (
        "libfabric provider efa",
        "network AWS Libfabric",
        "P2P/CUMEM",
        "NET/AWS Libfabric/GDRDMA",
    )
    assert parse_nccl_log(INFINIBAND)[1:] == ("network IB", "P2P/IPC", "NET/IB")
    assert parse_nccl_log("") == ()


def test_a_fall_back_to_sockets_beside_efa_is_a_loud_finding() -> None:
    (said,) = transport_fallbacks(parse_nccl_log(SOCKETS), EFA_DEVICES)
    same_wording(said)
    (said,) = transport_fallbacks(parse_nccl_log(SOCKETS), ["mlx5_0: InfiniBand, 400 Gb/sec (4X NDR)"])
    same_wording(said)
    assert transport_fallbacks(parse_nccl_log(SOCKETS), []) == ()  # a machine that has nothing else
    assert transport_fallbacks(parse_nccl_log(EFA), EFA_DEVICES) == ()


def test_rdma_without_gpudirect_is_a_finding() -> None:
    (said,) = transport_fallbacks(parse_nccl_log(INFINIBAND), ["mlx5_0: InfiniBand"])
    same_wording(said)


def test_the_log_goes_where_it_can_be_read_unless_the_user_has_one() -> None:
    assert nccl_log_environment("/logs", {})["NCCL_DEBUG_FILE"] == "/logs/nccl-%h-%p.log"
    assert "NCCL_DEBUG" not in nccl_log_environment("/logs", {"NCCL_DEBUG": "WARN"})


NVIDIA_SMI = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV12\tSYS\tSYS\tPXB\t0-31\t0
GPU1\tNV12\t X \tSYS\tSYS\tPXB\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV12\tSYS\t32-63\t1
GPU3\tSYS\tSYS\tNV12\t X \tSYS\t32-63\t1
NIC0\tPXB\tPXB\tSYS\tSYS\t X

Legend:
  X    = Self
"""
ROCM_SMI = """
============================ ROCm System Management Interface ============================
=============================== Link Type between two GPUs ===============================
       GPU0         GPU1         GPU2
GPU0   0            XGMI         PCIE
GPU1   XGMI         0            XGMI
GPU2   PCIE         XGMI         0
"""


def test_links_between_gpus() -> None:
    assert nvidia_links(NVIDIA_SMI) == {"NVLink (NV12)": 2, "PCIe, between NUMA nodes": 4}
    assert amd_links(ROCM_SMI) == {"xGMI": 2, "PCIe": 1}
    assert not nvidia_links("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n")


def test_rdma_devices_and_numa_nodes(tmp_path: Path) -> None:
    for name, driver, layer, rate in (
        ("rdmap0s0", "efa", "Unspecified", "100 Gb/sec (4X EDR)"),
        ("mlx5_0", "mlx5_core", "InfiniBand", "400 Gb/sec (4X NDR)"),
        ("mlx5_1", "mlx5_core", "Ethernet", "100 Gb/sec (4X EDR)"),
    ):
        port = tmp_path / name / "ports/1"
        port.mkdir(parents=True)
        (tmp_path / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "device").mkdir()
        (tmp_path / name / "device/driver").symlink_to(tmp_path / "drivers" / driver)
        (port / "link_layer").write_text(layer + "\n")
        (port / "rate").write_text(rate + "\n")
    found = [line for line in rdma_devices(tmp_path) if not line.startswith("drivers")]
    assert found == [
        "mlx5_0: InfiniBand, 400 Gb/sec (4X NDR)",
        "mlx5_1: RoCE, 100 Gb/sec (4X EDR)",
        "rdmap0s0: EFA, 100 Gb/sec (4X EDR)",
    ]
    (tmp_path / "node0").mkdir()
    (tmp_path / "node1").mkdir()
    assert numa_nodes(tmp_path) == 2 and numa_nodes(tmp_path / "none") == 1


def test_an_interface_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match=r"^GLOO_SOCKET_IFNAME=nowhere0: .*'nowhere0'.* lo\b"):
        refuse_unknown_interfaces({"GLOO_SOCKET_IFNAME": "nowhere0"})
    with pytest.raises(UserError, match=r"^NCCL_SOCKET_IFNAME==lo1: "):
        refuse_unknown_interfaces({"NCCL_SOCKET_IFNAME": "=lo1"})
    for fine in ({"GLOO_SOCKET_IFNAME": "lo,lo"}, {"NCCL_SOCKET_IFNAME": "l"}, {"NCCL_SOCKET_IFNAME": "^docker"}, {}):
        refuse_unknown_interfaces(fine)


def seen_over_loopback(worker: WorkerContext, settings: str) -> list[object]:
    from slipstream.pipeline.collectives.config import CollectivesConfig

    config = CollectivesConfig.from_json(settings)
    profile = measure_group(worker, config)
    return [profile.topology, profile.fingerprint, len(profile.pairs), len(profile.overlaps)]


def test_the_interface_that_gloo_uses_is_read_from_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    small = '{"operations": ["all_reduce"], "largest": 4096, "budget": 0.001, "modes": ["loop"]}'
    topology, fingerprint, pairs, overlaps = in_group(2, seen_over_loopback, small)
    assert topology.transports == ("lo (127.0.0.1)",)
    (host,) = topology.hosts
    assert host.ranks == (0, 1) and host.cores >= 1
    assert fingerprint.interfaces[0].startswith("lo: ") and fingerprint.world == 2
    assert (pairs, overlaps) == (1, 1)
