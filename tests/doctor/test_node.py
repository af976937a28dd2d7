"""Checks of a node on copies of other machines' /proc and /sys, with a made-up NVML."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.operations.doctor import node
from slipstream.operations.doctor.findings import NodeReading
from slipstream.shared.storage import s3
from tests.support.faulty_s3 import FaultyS3
from tests.support.wording import same_wording

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


class Nvml:
    """One GPU of 80 GiB, as NVML describes it."""

    class NVMLError(Exception):
        value = 3

    NVMLLibraryMismatchError = NotImplementedError
    NVML_ERROR_GPU_IS_LOST, NVML_ERROR_RESET_REQUIRED = 15, 16
    nvmlMemory_v2 = 0x02000028
    nvmlInit = nvmlShutdown = staticmethod(lambda: None)

    def __init__(self, used: int, processes: list[Any]) -> None:
        self.nvmlDeviceGetMemoryInfo = lambda handle, version: SimpleNamespace(total=80 * GIB, used=used)
        self.nvmlDeviceGetComputeRunningProcesses = lambda handle: processes
        self.nvmlSystemGetCudaDriverVersion_v2 = lambda: 12040
        self.nvmlSystemGetDriverVersion = lambda: "550.54.15"
        self.nvmlDeviceGetCount = lambda: 1
        self.nvmlDeviceGetHandleByIndex = lambda index: index
        self.nvmlDeviceGetName = lambda handle: "NVIDIA A100-SXM4-80GB"


#: The CUDA version of every build of torch that pip may install; None is the build for CPUs.
BUILDS = pytest.mark.parametrize("build", [None, "12.8", "13.0"])


@BUILDS
def test_a_free_gpu_and_one_that_another_process_holds(
    build: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    driver, free = node.nvidia_readings(tmp_path, Nvml(0, []), "12.4")
    assert driver.found == "550.54.15, CUDA up to 12.4" and not driver.problem
    assert free == NodeReading("GPU 0", "NVIDIA A100-SXM4-80GB, 80 GiB of 80 GiB free, held by no process")
    root = write(tmp_path, {"proc/7/comm": "python\n"})
    holders = [SimpleNamespace(pid=7, usedGpuMemory=20 * GIB), SimpleNamespace(pid=8, usedGpuMemory=None)]
    _, held = node.nvidia_readings(root, Nvml(20 * GIB, holders), "12.4")
    same_wording(held.found)
    same_wording(held.problem)


@BUILDS
def test_a_node_is_compared_with_the_build_of_torch_that_is_installed(
    build: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(0, []))
    found = {reading.what: reading for reading in node.read_node(root=tmp_path)}
    assert found["GPU 0"].found.startswith("NVIDIA A100-SXM4-80GB")
    assert ("built for CUDA 13.0" in found["NVIDIA driver"].problem) == (build == "13.0")


def test_a_gpu_whose_memory_is_the_hosts_is_listed(tmp_path: Path) -> None:
    unified = Nvml(0, [])

    def refuse(handle: object, version: int | None = None) -> Any:
        raise Nvml.NVMLError("Not Supported")

    unified.nvmlDeviceGetMemoryInfo = refuse
    _, found = node.nvidia_readings(tmp_path, unified, "12.4")
    same_wording(found.found)


def test_a_library_that_fails_halfway_leaves_what_was_read(tmp_path: Path) -> None:
    broken = Nvml(0, [])
    broken.nvmlDeviceGetCount = lambda: 1 // 0
    driver, why = node.safe_readings("NVIDIA driver", lambda: node.nvidia_readings(tmp_path, broken, ""))
    assert driver.found.startswith("550") and why.found.startswith("not read: ZeroDivisionError")


@pytest.mark.parametrize(("needed", "problem"), [("", False), ("12.8", False), ("11.8", False), ("13.0", True)])
def test_a_driver_serves_its_own_major_version_and_older_ones(needed: str, problem: bool) -> None:
    assert bool(node.driver_problem(12, needed)) == problem


def test_a_driver_that_is_too_old_is_told_how_new_it_has_to_be() -> None:
    same_wording(node.driver_problem(12, "13.0"))
    same_wording(node.driver_problem(11, "12.8"))
    same_wording(node.driver_problem(12, "99.0"))


def test_amd_gpus(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/module/amdgpu/version": "6.10.5\n",
            "sys/class/drm/card0/device/mem_info_vram_total": str(192 * GIB),
            "sys/class/drm/card0/device/mem_info_vram_used": str(96 * GIB),
            "sys/class/kfd/kfd/proc/9/vram_1": str(96 * GIB),
            "proc/9/comm": "python\n",
        },
    )
    driver, card = node.amd_readings(root)
    assert driver == NodeReading("AMD driver", "6.10.5")
    assert card.what == "card0" and card.problem
    same_wording(card.found)


def test_nccl_that_is_not_the_one_torch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = ['nvidia-nccl-cu13==2.28.9; platform_system == "Linux"', "numpy"]
    monkeypatch.setattr(node, "version", lambda package: "2.28.9")
    assert node.nccl_reading("NCCL", "2.28.9", wanted).problem == ""
    assert "LD_LIBRARY_PATH" in node.nccl_reading("NCCL", "2.21.5", wanted).problem
    monkeypatch.setattr(node, "version", lambda package: "2.27.0")
    same_wording(node.nccl_reading("NCCL", "2.28.9", wanted).problem)


def test_cores_that_are_seen_and_not_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "400000 100000\n"})
    (of_96,) = node.processor_readings(root, 96)
    same_wording(of_96.found)
    assert "96 threads on 4 CPUs" in of_96.problem
    (of_4,) = node.processor_readings(root, 4)
    assert not of_4.problem
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert not next(node.processor_readings(root, 96)).problem


def test_memory_numa_and_interfaces(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\nHugePages_Total: 0\n",
            "sys/fs/cgroup/memory.max": str(GIB // 2),
            "sys/devices/system/node/node0/cpulist": "0-47\n",
            "sys/devices/system/node/node1/cpulist": "48-95\n",
            "sys/class/net/eth0/operstate": "up\n",
            "sys/class/net/eth0/mtu": "9001\n",
            "sys/class/net/eth0/speed": "100000\n",
            "sys/class/infiniband/rdmap1s0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/rdmap1s0/ports/1/rate": "100 Gb/sec (4X EDR)\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec\n",
            "sys/bus/drivers/efa/bind": "",
        },
    )
    (root / "sys/class/infiniband/rdmap1s0/device").mkdir()
    (root / "sys/class/infiniband/rdmap1s0/device/driver").symlink_to(root / "sys/bus/drivers/efa")
    assert [r.found for r in node.memory_readings(root)] == ["512 MiB of 1 GiB available, cgroup limit 512 MiB"]
    assert [r.found for r in node.numa_readings(root)] == ["2 nodes: node0 has CPUs 0-47; node1 has CPUs 48-95"]
    assert [r.found for r in node.interface_readings(root)] == ["up, MTU 9001, 100000 Mbit/s"]
    down, efa = node.fabric_readings(root)
    assert down.what == "RDMA mlx5_0" and down.problem
    assert efa == NodeReading("EFA rdmap1s0", "port 1: 4: ACTIVE, 100 Gb/sec (4X EDR)")


@pytest.mark.parametrize(("mib", "problem"), [(64, True), (65536, False)])
def test_shared_memory(monkeypatch: pytest.MonkeyPatch, mib: int, problem: bool) -> None:
    state = SimpleNamespace(f_frsize=1 << 20, f_blocks=mib, f_bavail=mib)
    monkeypatch.setattr(node.os, "statvfs", lambda path: state)
    (reading,) = node.shared_memory(Path("/"))
    assert bool(reading.problem) == problem


def test_a_machine_without_anything_to_read_says_why_and_raises_nothing(tmp_path: Path) -> None:
    found = {reading.what: reading.found for reading in node.read_node("s3x://nowhere", "http://127.0.0.1:1", tmp_path)}
    for what in ("/dev/shm", "memory", "NUMA", "network", "store", "clock"):
        assert found[what].startswith("not read: "), what
    same_wording(found["store"])


@contextmanager
def endpoint(date: str | None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response_only(403)  # an endpoint that refuses has a clock, too
            if date is not None:
                self.send_header("Date", date)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_clocks() -> None:
    import time

    with endpoint(formatdate(time.time(), usegmt=True)) as right:
        (reading,) = node.clock_readings("", right)
        assert right in reading.found and not reading.problem
    with endpoint(formatdate(time.time() - 1000, usegmt=True)) as late:
        (reading,) = node.clock_readings("", late)
        assert reading.found.startswith(("+1000 s", "+999 s", "+1001 s")) and "NTP" in reading.problem
    with endpoint(None) as silent:
        assert "sent no Date" in next(node.clock_readings("", silent)).found


def test_a_store_on_s3_tells_its_speed_and_its_clock(store: FaultyS3) -> None:
    (speed,) = node.store_speed("s3://bucket/doctor")
    assert "16 MiB written at" in speed.found and not speed.problem
    assert not s3.client().list_objects_v2(Bucket="bucket", Prefix="doctor").get("Contents")
    (clock,) = node.clock_readings("s3://bucket/doctor", "")
    assert clock.found.endswith("s against s3://bucket/doctor") and not clock.problem
