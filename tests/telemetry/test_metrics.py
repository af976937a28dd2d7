"""Prometheus metrics: names, labels and values, checked by a linter and a server."""

import json
import re
import shutil
import subprocess
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from slipstream.operations.proofs.processes import free_port
from slipstream.shared.telemetry.metrics import METRICS, MetricLabels, metrics_exposition
from slipstream.shared.telemetry.records import DeviceReading
from slipstream.shared.telemetry.totals import NodeTotals, write_totals
from tests.support.fake_nvml import FakeNvml
from tests.support.sampler_process import LABELS, device, sample, sampling, totals, until

NODE = NodeTotals(60, 120, {"GPU-0": 5.5}, {"GPU-0": {"sw_power_cap": 2.0}}, {"spot": 0.05})


def all_metrics(labels: MetricLabels = LABELS) -> str:
    return metrics_exposition(sample(8.0, device()), NODE, [totals(0), totals(1)], labels)


def families(text: str) -> list[str]:
    return [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]


def test_every_name_is_there_once_with_its_labels() -> None:
    text = all_metrics()
    assert sorted(families(text)) == sorted(metric.name for metric in METRICS)
    for metric in METRICS:
        lines = [line for line in text.splitlines() if line.startswith(tuple(f"{name}{{" for name in metric.series))]
        found = {tuple(sorted(re.findall(r'(\w+)="', line))) for line in lines}
        parts = {(*metric.labels, "le"), metric.labels} if metric.kind == "histogram" else {metric.labels}
        assert found == {tuple(sorted(labels)) for labels in parts}, metric.name


COMMON = 'execution="f1a2",task="train",attempt="1",node="node-7"'


@pytest.mark.parametrize(
    "line",
    [
        f'slipstream_gpu_busy_ratio{{{COMMON},gpu_uuid="GPU-0"}} 0.5',
        f'slipstream_gpu_up{{{COMMON},gpu_uuid="GPU-0"}} 1',
        f'slipstream_gpu_info{{{COMMON},gpu_uuid="GPU-0",index="0",name="A \\"100\\""}} 1',
        f'slipstream_gpu_io_bytes_total{{{COMMON},gpu_uuid="GPU-0",link="pcie",direction="in"}} 1000000000000.0',
        f'slipstream_gpu_energy_joules_total{{{COMMON},gpu_uuid="GPU-0"}} 5.5',
        f'slipstream_gpu_throttled_seconds_total{{{COMMON},gpu_uuid="GPU-0",reason="sw_power_cap"}} 2.0',
        f'slipstream_cost_dollars_total{{{COMMON},price="spot"}} 0.05',
        f"slipstream_memory_used_bytes{{{COMMON}}} 5000000001",
        f"slipstream_cpu_wait_seconds_total{{{COMMON}}} 1.0",
        f'slipstream_steps_total{{{COMMON},rank="1",gpu_uuid="GPU-1"}} 20',
        f'slipstream_step_seconds_bucket{{{COMMON},le="0.1",rank="0",gpu_uuid="GPU-0"}} 0',
        f'slipstream_step_seconds_bucket{{{COMMON},le="0.2",rank="0",gpu_uuid="GPU-0"}} 20',
        f'slipstream_step_seconds_bucket{{{COMMON},le="+Inf",rank="0",gpu_uuid="GPU-0"}} 20',
        f'slipstream_step_seconds_count{{{COMMON},rank="0",gpu_uuid="GPU-0"}} 20',
        f'slipstream_bottleneck_ratio{{{COMMON},cause="data"}} 0.25',
    ],
)
def test_a_series(line: str) -> None:
    assert line in all_metrics().splitlines()


def test_a_steps_time_is_the_sum_of_its_phases_without_what_lies_between_steps() -> None:
    (line,) = [line for line in all_metrics().splitlines() if "step_seconds_sum" in line and 'rank="0"' in line]
    assert float(line.split()[-1]) == pytest.approx(20 * 0.15)


def test_what_is_not_known_is_left_out() -> None:
    down = DeviceReading("GPU-0", 0, "A 100", up=False)
    assert [
        name for name in families(metrics_exposition(sample(8.0, down), NodeTotals(), [], LABELS)) if "gpu" in name
    ] == ["slipstream_gpu_up", "slipstream_gpu_info"]
    assert metrics_exposition(None, NodeTotals(), [], LABELS) == ""


def test_without_gauges_all_counters_are_there() -> None:
    text = metrics_exposition(None, NODE, [totals()], LABELS, counters_only=True)
    assert families(text) == [
        "slipstream_gpu_energy_joules_total",
        "slipstream_gpu_throttled_seconds_total",
        "slipstream_gpu_seconds_total",
        "slipstream_cost_dollars_total",
        "slipstream_phase_seconds_total",
        "slipstream_steps_total",
        "slipstream_samples_total",
        "slipstream_step_seconds",
    ]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
@pytest.mark.parametrize("labels", [LABELS, MetricLabels('a\n"b"\\', "é{},=", -1, "")], ids=["plain", "hostile"])
def test_promtool_finds_nothing_to_mend(labels: MetricLabels) -> None:
    check = subprocess.run(["promtool", "check", "metrics"], input=all_metrics(labels), capture_output=True, text=True)
    assert (check.returncode, check.stdout, check.stderr) == (0, "", "")


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus: apt-get install prometheus")
def test_a_prometheus_server_scrapes_a_sampler(nvml: FakeNvml, tmp_path: Path) -> None:
    served, own = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "500ms"},
        "scrape_configs": [{"job_name": "pods", "static_configs": [{"targets": [f"127.0.0.1:{served}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    write_totals(tmp_path / "telemetry", totals())
    address = f"--web.listen-address=127.0.0.1:{own}"
    files = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    environment = nvml.environment() | {"SLIPSTREAM_METRICS": f"127.0.0.1:{served}"}
    with (
        (tmp_path / "log").open("w") as log,
        sampling(tmp_path / "telemetry", environment),
        subprocess.Popen(["prometheus", address, *files], stderr=log) as server,
    ):
        try:
            until(lambda: asked(own, "slipstream_gpu_busy_ratio") == {"0.6", "0.61"})
            assert asked(own, f"slipstream_steps_total{{{COMMON}}}") == {"20"}
            assert asked(own, "histogram_quantile(1, slipstream_step_seconds_bucket)") == {"0.2"}
        finally:
            server.kill()


def asked(port: int, query: str) -> set[str]:
    """The values that a Prometheus server answers a query with; none if it does not answer yet."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return {series["value"][1] for series in json.load(answer)["data"]["result"]}
    except OSError:
        return set()
