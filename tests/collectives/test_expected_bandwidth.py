"""Grades of networks with made-up bandwidths."""

import pytest

from slipstream.pipeline.collectives.findings import PUBLISHED, grade_bandwidth
from slipstream.shared.interconnect.profile import Fingerprint, Host, Launch, Measurement, NetworkProfile, Topology

GIB = 1 << 30


def profile(
    busbw: float, size: int, interfaces: tuple[str, ...], transports: tuple[str, ...], backend: str = "gloo"
) -> NetworkProfile:
    """Eight processes whose all_reduce reaches ``busbw`` GB/s."""
    seconds = size * 2 * 7 / 8 / (busbw * 1e9)
    measured = Measurement("all_reduce", "float32", "sum", size, 8, "loop", True, (Launch((seconds,)),))
    device = "NVIDIA H100 80GB HBM3" if backend == "nccl" else "a CPU"
    fingerprint = Fingerprint(8, 1, backend, (device,) * 8, interfaces, "", {})
    host = Host(tuple(range(8)), "cpu", 64, 1, links=("NVLink (NV18): 28 pairs",))
    return NetworkProfile(fingerprint, 0.0, (measured,), Topology((host,), transports))


NETWORK = ("eth0 (10.0.0.1)", "eth0 (10.0.0.2)")
ETHERNET = ("eth0: 10000 Mbit/s, MTU 1500", "ib0: 100000 Mbit/s, MTU 2044")


@pytest.mark.parametrize(("busbw", "word"), [(1.15, "normal"), (0.8, "low"), (0.3, "far too low")])
def test_an_ethernet_is_graded_by_the_rate_of_the_interface_that_is_used(busbw: float, word: str) -> None:
    said = list(grade_bandwidth(profile(busbw, 4 << 20, ETHERNET, NETWORK)))
    assert said[0].startswith(f"{word}: all_reduce at 4194304 bytes reaches")
    assert "of the 1.18 GB/s of its slowest interface" in said[0]
    assert len(said) == (1 if word == "normal" else 2)


def test_a_speed_that_nobody_knows_is_not_graded() -> None:
    assert not list(grade_bandwidth(profile(1.0, 4 << 20, ("eth0: speed unknown, MTU 1500",), NETWORK)))


@pytest.mark.parametrize("address", ["lo (127.0.0.1)", "eth0 (10.0.0.1)"])
def test_what_never_leaves_the_machine_is_not_graded_by_its_interface(address: str) -> None:
    assert not list(grade_bandwidth(profile(8.0, 4 << 20, ETHERNET, (address,))))


def test_gpus_are_graded_at_large_sizes_only() -> None:
    small, large = (list(grade_bandwidth(profile(200, size, (), ("P2P/CUMEM",), "nccl"))) for size in (1 << 20, GIB))
    assert small == [
        "not graded: set collectives.largest to 268435456 or more, as NVLink reaches its bandwidth only there"
    ]
    assert large[0].startswith("far too low: all_reduce at 1073741824 bytes reaches 43% of the 460 GB/s of eight H100")
    assert "nvidia-smi nvlink" in large[1]


def test_every_published_figure_has_its_source() -> None:
    assert all(known.source.startswith("https://") and known.busbw > 0 for known in PUBLISHED)
