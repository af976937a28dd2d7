"""Rules and dashboard query only exported metrics; every rule fires when it should, and only then."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.shared.telemetry.metrics import METRICS
from tests.support.monitoring import MONITORING, dashboard, panels

OURS = {series: metric for metric in METRICS for series in metric.series}
#: Of NVIDIA's DCGM exporter; the last one has to be switched on in it.
DCGM = {
    *("DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_PROF_GR_ENGINE_ACTIVE", "DCGM_FI_DEV_FB_USED", "DCGM_FI_DEV_FB_FREE"),
    *("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_THERMAL_VIOLATION"),
}
#: Words of PromQL that the expressions use.
WORDS = {
    *("rate", "avg_over_time", "changes", "histogram_quantile", "clamp_min", "time", "sum", "avg"),
    *("by", "on", "without", "group_left", "and", "or"),
}
#: Labels that Prometheus and the DCGM exporter add.
OTHER_LABELS = {"le", "UUID", "GPU_I_ID"}
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed (apt: prometheus)")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"]
    return [rule for group in groups for rule in group["rules"]]


def variables() -> list[dict[str, Any]]:
    return dashboard()["templating"]["list"]


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    yield from (target["expr"] for panel in panels() for target in panel["targets"])


EXPRESSIONS = list(expressions())


def metrics_of(expression: str) -> set[str]:
    """The words of an expression outside of selectors, ranges and lists of labels."""
    bare = re.sub(r'\{(?:[^}"]|"[^"]*")*\}|\[[^\]]*\]', " ", expression)
    bare = re.sub(r"\b(by|on|without|group_left)\s*\([^)]*\)", " ", bare)
    return set(re.findall(rf"(?<![\w.]){NAME}", bare)) - WORDS


def labels_of(expression: str) -> Iterator[tuple[str, set[str]]]:
    """The labels by which each metric is selected; those by which series are joined or summed belong to none."""
    for name, selector in re.findall(rf'({NAME})\{{((?:[^}}"]|"[^"]*")*)\}}', expression):
        yield name, set(re.findall(rf"({NAME})\s*(?:=~|!~|!=|=)", selector))
    for labels in re.findall(r"\b(?:by|on|without|group_left)\s*\(([^)]*)\)", expression):
        yield "", {label.strip() for label in labels.split(",")}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_only_metrics_that_are_shown_are_asked_for(expression: str) -> None:
    found = metrics_of(expression)
    assert found and found <= OURS.keys() | DCGM


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_only_labels_that_they_have_are_asked_for(expression: str) -> None:
    every = {label for metric in METRICS for label in metric.labels} | OTHER_LABELS
    for name, labels in labels_of(expression):
        assert labels <= (set(OURS[name].labels) | {"le"} if name else every)


def test_of_counters_and_histograms_only_growth_is_asked_for() -> None:
    """But of what is a sum of its pods so far, and of a histogram since its pod began."""
    since_they_began = ("slipstream_cost_dollars_total", "slipstream_gpu_energy_joules_total")
    for expression in EXPRESSIONS:
        for name in metrics_of(expression) & OURS.keys() - set(since_they_began):
            if OURS[name].kind == "counter":
                assert re.search(rf"rate\({name}", expression), expression


def test_the_names_are_prometheus_own() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"slipstream_[a-z_]+", metric.name) and metric.help.endswith(".")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert len(set(metric.labels)) == len(metric.labels)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_every_metric_is_on_the_dashboard() -> None:
    shown = " ".join(target["expr"] for panel in panels() for target in panel["targets"])
    assert not [metric.name for metric in METRICS if metric.name not in shown]


def test_every_query_of_a_panel_has_a_name_and_every_panel_a_number() -> None:
    for panel in panels():
        names = [target["refId"] for target in panel["targets"]]
        assert names and all(names) and len(set(names)) == len(names), panel["title"]
    numbers = [panel["id"] for panel in panels()]
    assert len(set(numbers)) == len(numbers) > 15 and all(numbers)


def test_the_choices_are_labels_of_a_metric() -> None:
    queries = [each["query"] for each in variables() if each["type"] == "query"]
    asked = [re.fullmatch(rf"label_values\(({NAME})(?:\{{.*\}})?, ({NAME})\)", query) for query in queries]
    assert [match and match[2] in OURS[match[1]].labels for match in asked] == [True, True]


def test_the_dashboard_is_what_its_code_makes() -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="needs the extra `monitoring`")
    from monitoring.dashboard import FILE, render

    assert FILE.read_text(encoding="utf-8") == render()


def test_the_pods_that_prometheus_looks_for_can_be_had_from_a_profile() -> None:
    text = (MONITORING / "podmonitor.yaml").read_text(encoding="utf-8")
    spec = yaml.safe_load(text)["spec"]
    ((label, value),) = spec["selector"]["matchLabels"].items()
    assert f'labels = {{ {label} = "{value}" }}' in text
    port = re.search(r'SLIPSTREAM_METRICS = "0\.0\.0\.0:(\d+)"', text)
    assert port and spec["podMetricsEndpoints"][0]["relabelings"][0]["replacement"] == f"$1:{port[1]}"


def promtool(*arguments: str, cwd: Path = MONITORING, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *arguments], cwd=cwd, input=given, capture_output=True, text=True, timeout=60)


@needs_promtool
def test_prometheus_finds_no_fault_with_names_types_and_helps() -> None:
    lines = list[str]()
    for metric in METRICS:
        lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}"]
        labels = ", ".join(f'{label}="x"' for label in metric.labels)
        bound = ', le="+Inf"'
        lines += [f"{each}{{{labels}{bound if each.endswith('_bucket') else ''}}} 1" for each in metric.series]
    checked = promtool("check", "metrics", given="\n".join(lines) + "\n")
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
    wrong = promtool("check", "metrics", given="\n".join(lines).replace("_seconds_total", "_milliseconds") + "\n")
    assert wrong.returncode != 0


@needs_promtool
def test_prometheus_takes_the_rules_and_each_fires_as_it_should() -> None:
    checked = promtool("check", "rules", "alerts.yaml")
    assert checked.returncode == 0, checked.stdout + checked.stderr
    tested = promtool("test", "rules", "alerts_test.yaml")
    assert tested.returncode == 0, tested.stdout + tested.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "broken"),
    [
        pytest.param(rule["alert"], broken, id=f"{rule['alert']}, {name}", marks=[] if kept else pytest.mark.prove)
        for number, rule in enumerate(rules())
        for other, (name, broken) in enumerate({"never": "vector(1) < 0", "always": "vector(1)"}.items())
        for kept in [number < 4 and number % 2 == other]
    ],
)
def test_a_rule_that_never_fires_or_always_does_is_found(alert: str, broken: str, tmp_path: Path) -> None:
    data = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
    (rule,) = [rule for group in data["groups"] for rule in group["rules"] if rule["alert"] == alert]
    rule["expr"] = broken
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(data))
    shutil.copy(MONITORING / "alerts_test.yaml", tmp_path)
    tested = promtool("test", "rules", "alerts_test.yaml", cwd=tmp_path)
    assert tested.returncode == 1 and alert in tested.stdout + tested.stderr


@needs_promtool
@pytest.mark.parametrize(
    "alert",
    [
        pytest.param(rule["alert"], marks=[] if number < 1 else pytest.mark.prove)
        for number, rule in enumerate(rule for rule in rules() if "for" in rule)
    ],
)
def test_a_rule_that_does_not_wait_is_found(alert: str, tmp_path: Path) -> None:
    data = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))
    (rule,) = [rule for group in data["groups"] for rule in group["rules"] if rule["alert"] == alert]
    del rule["for"]
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(data))
    shutil.copy(MONITORING / "alerts_test.yaml", tmp_path)
    assert promtool("test", "rules", "alerts_test.yaml", cwd=tmp_path).returncode == 1


@needs_promtool
def test_prometheus_takes_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    found = [target["expr"] for panel in panels() for target in panel["targets"]]
    asked = [{"record": f"panel:{n}", "expr": expr.replace("$__rate_interval", "1m")} for n, expr in enumerate(found)]
    (tmp_path / "panels.yaml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": asked}]}))
    checked = promtool("check", "rules", "panels.yaml", cwd=tmp_path)
    assert checked.returncode == 0, checked.stdout + checked.stderr
