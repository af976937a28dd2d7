"""Installed benchmarks: parsers of their output, and errors of binaries that fail."""

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.other_benchmarks import (
    compare_with_installed,
    installed_benchmarks,
    read_nccl_tests,
    read_osu,
)
from tests.support.network_profiles import network_profile

#: As the READMEs of nccl-tests and of the OSU micro-benchmarks print them.
NCCL = """
# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float     sum      -1    33.51    0.03    0.05      0    33.09    0.03    0.05      0
     1048576        262144     float     sum      -1    61.01   17.19   30.08      0    60.63   17.29   30.26      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 15.07
"""
OSU = """
# OSU MPI Allreduce Latency Test v7.3
# Datatype: MPI_CHAR.
# Size       Avg Latency(us)
1024                  301.21
1048576              1200.00
"""


def test_what_they_print_is_read() -> None:
    assert read_nccl_tests(NCCL) == {1024: pytest.approx(33.51e-6), 1048576: pytest.approx(61.01e-6)}
    assert read_osu(OSU) == {1024: pytest.approx(301.21e-6), 1048576: pytest.approx(1200e-6)}
    assert read_nccl_tests("") == read_osu("nothing\n") == {}


def install(directory: Path, name: str, script: str) -> None:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_osu_runs_beside_gloo_and_the_difference_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    profile, config = network_profile(2), CollectivesConfig(largest=1 << 20)
    assert installed_benchmarks("gloo", 2, config) == [] and compare_with_installed(profile, config) == ()
    install(tmp_path, "mpirun", 'echo "$@" > "$0.called"; shift 2; exec "$@"')
    install(tmp_path, "osu_allreduce", f"cat <<'E'\n{OSU}\nE")
    install(tmp_path, "osu_bcast", "echo no network >&2; exit 3")
    said = compare_with_installed(profile, config)
    assert said[0] == "OSU all_reduce of 1024 bytes: 301.2 us, ours 300.8 us (-0 %)"
    assert said[1].startswith("OSU all_reduce of 1048576 bytes: 1200.0 us, ours ")
    assert said[2:] == ("OSU broadcast: exit code 3: no network",)
    called = (tmp_path / "mpirun.called").read_text().split()
    assert called[:2] == ["-np", "2"] and called[-2:] == ["-m", "1024:1048576"]
    several = replace(profile, fingerprint=replace(profile.fingerprint, nodes=2))
    assert compare_with_installed(several, config) == ()


def test_the_command_of_nccl_tests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    install(tmp_path, "all_reduce_perf", "")
    install(tmp_path, "alltoall_perf", "")
    found = installed_benchmarks("nccl", 8, CollectivesConfig(operations=["all_reduce", "all_gather"], largest=1 << 27))
    (only,) = found
    assert only.command == (
        *(str(tmp_path / "all_reduce_perf"), "-b", "1024", "-e", "134217728", "-f", "8", "-g", "8", "-d", "float"),
    )
