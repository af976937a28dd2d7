"""``slipstream plan serve``: replicas and dollars from an exported model and recorded requests."""

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from slipstream.operations.manifests.triton import read_plan
from slipstream.operations.plan.command import main
from slipstream.operations.plan.estimate import ONE_RUN
from slipstream.operations.plan.serving.decide import (
    COOLDOWN_S,
    MONTHS,
)
from slipstream.operations.plan.serving.load import MONTH_S, load_of, read_load
from slipstream.operations.plan.serving.model import service_times
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.operations.plan.serving.recorded_queue import RecordedQueue
from slipstream.shared.formatting import duration
from tests.support.exported_models import FP32, INT8, ON_CPU, report, variant, write_exported
from tests.support.recorded_loads import steady_p99
from tests.support.wording import line_with, same_wording

MINE = """
[sources.mine]
{date}
address = "https://example.com"

[cpu_instances.mine]
cpu = "8481C"
cores = 3
region = "here"
on_demand = 0.3
source = "mine"
"""
DATED = MINE.format(date="date = 2026-11-01")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_exported(tmp_path_factory.mktemp("runs") / "one", training=ON_CPU)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 requests a second by night, 20,000 at noon, for a day."""
    return hourly(tmp_path_factory.mktemp("load") / "load.csv", [30.0] * 8 + [5_000.0] * 4 + [20_000.0] + [200.0] * 11)


def hourly(path: Path, rates: list[float]) -> Path:
    lines = (f"2026-11-02T{hour:02}:00,{3600 * rate}\n" for hour, rate in enumerate(rates))
    path.write_text("time,requests\n" + "".join(lines))
    return path


def called(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["serve", *(str(argument) for argument in arguments)])


def planned(*arguments: object) -> dict[str, Any]:
    ran = called(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    found: dict[str, Any] = json.loads(ran.output)
    return found


def test_a_name_among_the_prices_forges_no_line(model: str, load: Path, tmp_path: Path) -> None:
    forged = DATED.replace("[cpu_instances.mine]", '[cpu_instances."mine\\n▸ fp32 \\u001b[2J"]')
    (tmp_path / "prices.toml").write_text(forged)
    ran = called(model, "--load", load, "--p99", "0.3ms", "--prices", tmp_path / "prices.toml")
    assert ran.exit_code == 0 and "mine" in ran.output, ran.output
    assert all(line.isprintable() for line in ran.output.split("\n")), ran.output
    assert not [line for line in ran.output.split("\n") if line.startswith("▸ fp32")]


def row(found: dict[str, Any], variant: str, instance: str) -> dict[str, Any]:
    return next(each for each in found["rows"] if (each["variant"], each["instance"]) == (variant, instance))


def test_what_is_printed_says_what_to_take_and_why(model: str, load: Path) -> None:
    ran = called(model, "--load", load, "--p99", "1ms")
    assert ran.exit_code == 0, ran.output
    for said in (
        "▸  onnx-int8  c3d-highcpu-4 (9B14) ",
        "Take onnx-int8 on c3d-highcpu-4: 1 to 4 replicas",
        "Measured: onnx-int8 on c3-highcpu-4, $",
        "per million requests",
        "If predictions may be a day old",
        "Scaling to zero pays from an idle share of 0.49% on",
        "An instance more is needed from",
        "times measured: 8481C",
        "times predicted from Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz, by operations alone: 9B14",
        "onnx-int8: not planned on A100-40GB",
        "p99 and dollars exclude the time of server and network",
        "08:00 to 12:00  5,000 to 5,000         2          1",
        "load.csv: 4,647,180,000 requests a month by 24 hours recorded; 20,000 requests/s in the busiest minute",
    ):
        assert said in ran.output, ran.output


def test_replicas_and_dollars_are_those_of_the_queue(model: str, load: Path, tmp_path: Path) -> None:
    """By hand, of a file of prices of one's own: three replicas fit an instance."""
    (tmp_path / "prices.toml").write_text(DATED)
    found = planned(model, "--load", load, "--p99", "0.3ms", "--prices", tmp_path / "prices.toml")
    its = row(found, FP32, "mine")
    service = service_times(variant(report(), FP32).latency_ms["1"])
    assert service and its["time"] == "measured" and its["replicas_of_each"] == 3
    service = service.times_as_long(1 + ONE_RUN)
    for hour, rate in ((0, 30.0), (8, 5_000.0), (12, 20_000.0), (20, 200.0)):
        replicas = its["planned"]["replicas"][hour]
        assert steady_p99(rate, service, replicas) <= 0.3e-3
        assert replicas == 1 or steady_p99(rate, service, replicas - 1) > 0.3e-3
    longest = max(
        steady_p99(rate, service, its["planned"]["replicas"][hour])
        for hour, rate in ((0, 30.0), (8, 5_000.0), (12, 20_000.0), (20, 200.0))
    )
    assert its["planned"]["p99"] == pytest.approx(longest, rel=1e-6)
    instances = [-(-each // 3) for each in its["planned"]["replicas"]]
    assert its["planned"]["instances"] == instances and max(instances) > 1
    # Each that starts in the course of the day is paid 2 minutes before.
    started = max(instances) - min(instances)
    assert its["dollars_a_month"] == pytest.approx((sum(instances) + started / 30) * 0.3 * 365 / 12)
    requests = 3600 * (8 * 30 + 4 * 5_000 + 20_000 + 11 * 200) * 365 / 12
    assert its["dollars_per_million"] == pytest.approx(its["dollars_a_month"] / requests * 1e6)
    assert its["at_worst"] == its["planned"]


def test_scoring_each_night_takes_one_instance_for_a_while(model: str, load: Path) -> None:
    its = row(planned(model, "--load", load, "--p99", "1ms", "--cold-start", "10min"), FP32, "c3-highcpu-8")
    rows_a_day = 3600 * (8 * 30 + 4 * 5_000 + 20_000 + 11 * 200)
    best = max(variant(report(), FP32).rows_per_second.values())
    assert its["nightly_dollars_a_month"] == pytest.approx(
        (rows_a_day / (4 * best) + 600) / 3600 * its["dollars_per_hour"] * 365 / 12
    )


def test_a_number_alone_is_milliseconds_of_a_p99_and_seconds_of_a_start(model: str, load: Path) -> None:
    asked = (model, "--load", load, "--instance", "c3-highcpu-4")
    same = [
        planned(*asked, "--p99", p99_, "--cold-start", start) for p99_, start in (("1", "90"), ("0.001s", "1.5min"))
    ]
    assert same[0] == same[1] == planned(*asked, "--p99", "1ms", "--cold-start", "90s")


def test_the_cheapest_that_keeps_the_p99_is_taken(model: str, load: Path) -> None:
    found = planned(model, "--load", load, "--p99", "1ms")
    kept = [each for each in found["rows"] if each["at_worst"]]
    cheapest = min(kept, key=lambda each: each["dollars_a_month"])
    assert found["take"] == f"{cheapest['variant']} on {cheapest['instance']}"
    dollars = [each["dollars_a_month"] for each in found["rows"] if each["planned"]]
    assert dollars == sorted(dollars) and found["rows"][-1]["planned"] is None, "GPUs take a millisecond at least"


def test_what_might_not_keep_the_p99_is_not_taken_if_something_else_does(model: str, load: Path) -> None:
    """A prediction that is cheaper, and too slow if it is off by as much as any was."""
    found = planned(model, "--load", load, "--p99", "0.45ms")
    cheapest = found["rows"][0]
    assert cheapest["planned"] and cheapest["at_worst"] is None and cheapest["instance"] not in found["take"]
    alone = called(model, "--load", load, "--p99", "0.45ms", "--instance", cheapest["instance"]).output
    assert f"Take {cheapest['variant']} on {cheapest['instance']}" in alone
    assert "no number of replicas keeps the p99" in alone


def test_without_a_run_only_its_own_cpu_is_known(tmp_path: Path, load: Path) -> None:
    alone = write_exported(tmp_path / "alone", report(cpu="Unknown CPU 9"))
    for place in (alone, f"{alone}/model"):
        ran = called(place, "--load", load, "--p99", "1ms")
        assert ran.exit_code == 1
        same_wording(ran.output)
    (tmp_path / "prices.toml").write_text(DATED.replace("8481C", "9"))
    found = planned(alone, "--load", load, "--p99", "1ms", "--prices", tmp_path / "prices.toml")
    assert [(each["instance"], each["time"]) for each in found["rows"]] == [("mine", "measured")] * 2


def test_a_run_of_another_version_is_told_as_the_reason(tmp_path: Path, load: Path) -> None:
    place = write_exported(tmp_path / "old", report(cpu="Unknown CPU 9"), ON_CPU)
    summary = tmp_path / "old" / "summary.json"
    summary.write_text(summary.read_text().replace('"gpu"', '"card"'))
    ran = called(place, "--load", load, "--p99", "1ms")
    assert ran.exit_code == 1 and f"{summary}: " in ran.output and "card" in ran.output
    assert len(ran.output.strip().splitlines()) == 1


@pytest.mark.parametrize("verdict", ["can't tell", "slower", "over budget"])
def test_variants_that_the_export_rejected_are_not_served(tmp_path: Path, load: Path, verdict: str) -> None:
    its = report()
    worse = replace(variant(its, INT8), chosen=False, verdict=verdict)
    kept = [replace(each, chosen=each.name == FP32) for each in its.variants if each.name != INT8]
    place = write_exported(tmp_path / "worse", replace(its, variants=[*kept, worse], chosen=FP32), ON_CPU)
    ran = called(place, "--load", load, "--p99", "1ms")
    assert "Take onnx-fp32" in ran.output
    same_wording(line_with("onnx-int8", ran.output))


def test_an_optimisation_pays_if_six_months_save_more_than_it_costs(model: str, tmp_path: Path) -> None:
    busy = hourly(tmp_path / "busy.csv", [60_000.0] * 24)
    found = planned(model, "--load", busy, "--p99", "1ms")
    fp32, int8 = (row(found, name, "c3-highcpu-4")["dollars_a_month"] for name in (FP32, INT8))
    # FP32 may be cheaper elsewhere, but not predicted so.
    saved = (
        min(each["dollars_a_month"] for each in found["rows"] if each["variant"] == FP32 and each["at_worst"]) - int8
    )
    assert found["take"].startswith(INT8) and 0 < saved <= fp32 - int8
    rate = MONTHS * saved / 10
    for hours, said in ((9.9, "it pays"), (10.1, "it does not pay")):
        text = called(model, "--load", busy, "--p99", "1ms", "--engineer-hours", hours, "--engineer-rate", rate).output
        assert f"in 6 months ${MONTHS * saved:,.0f}" in text or f"in 6 months ${MONTHS * saved:.2f}" in text
        assert said in text
    assert "--engineer-hours, --engineer-rate" in called(model, "--load", busy, "--p99", "1ms").output


def test_a_load_that_one_instance_serves_has_nothing_to_optimise(model: str, tmp_path: Path) -> None:
    quiet = hourly(tmp_path / "quiet.csv", [1.0] * 24)
    ran = called(model, "--load", quiet, "--p99", "1ms", "--instance", "c3-highcpu-4")
    assert "A faster model saves nothing there: one instance, the minimum, is enough." in ran.output


def test_requests_that_go_to_replicas_at_random_wait_longer(model: str, load: Path, tmp_path: Path) -> None:
    """Of Poisson arrivals at replicas that share nothing, each is an M/G/1 queue."""
    (tmp_path / "prices.toml").write_text(DATED)
    asked = (model, "--load", load, "--p99", "0.3ms", "--prices", tmp_path / "prices.toml", "--instance", "mine")
    taken = planned(*asked)["rows"][0]
    service = service_times(variant(report(), taken["variant"]).latency_ms["1"])
    assert service
    rates = read_load(load).rates
    longest = max(
        steady_p99(rate / replicas, service.times_as_long(1 + ONE_RUN), 1)
        for rate, replicas in zip(rates, taken["planned"]["replicas"], strict=True)
    )
    assert longest > taken["planned"]["p99"]
    assert f"to one of them at random, the p99 is {duration(longest)}." in called(*asked).output


def test_what_a_coarse_recording_does_not_show_is_said(model: str, load: Path) -> None:
    same_wording(line_with("random (Poisson)", called(model, "--load", load, "--p99", "1ms").output))
    assert "random (Poisson)" not in called(model, "--load", load, "--p99", "4000s").output


def spells(path: Path, idle: timedelta) -> Path:
    """A request a second for a day, but for two spells."""
    begin, lines = datetime(2026, 11, 2), ["time"]
    for at in range(86_400):
        if not any(timedelta(0) <= timedelta(seconds=at - hour * 3600) < idle for hour in (2, 14)):
            lines.append((begin + timedelta(seconds=at)).isoformat())
    path.write_text("\n".join(lines))
    return path


@pytest.mark.prove
@pytest.mark.parametrize(
    ("minutes", "pays"),
    [
        pytest.param(3, False, marks=pytest.mark.prove),
        pytest.param(6, False, marks=pytest.mark.prove),
        pytest.param(7, False, marks=pytest.mark.prove),
        (9, True),
        pytest.param(120, True, marks=pytest.mark.prove),
    ],
)
def test_scaling_to_zero_pays_for_spells_that_outlast_the_cooldown_and_a_start(
    model: str, tmp_path: Path, minutes: int, pays: bool
) -> None:
    path = spells(tmp_path / "spells.csv", timedelta(minutes=minutes))
    found = planned(model, "--load", path, "--p99", "1ms", "--cold-start", "2min")
    zero = found["scale_to_zero"]
    assert zero["idle"] == pytest.approx(2 * minutes / 1440)
    assert (zero["saves"] > 0) == pays
    if minutes * 60 > COOLDOWN_S:
        per_hour = next(each for each in found["rows"])["dollars_per_hour"]
        saved = 2 * (minutes * 60 - COOLDOWN_S - 120) / 86_400 * MONTH_S / 3600 * per_hour
        assert zero["saves"] == pytest.approx(saved) and zero["pays_from"] == pytest.approx(2 * 420 / 86_400)
        requests = 86_400 - 2 * minutes * 60
        assert zero["late"] == pytest.approx(2 * (1 + 120) / requests, rel=0.01)
    else:
        assert zero["spells"] == 0 and zero["pays_from"] == pytest.approx(420 / 86_400), "of one idle period a day"
    text = called(model, "--load", path, "--p99", "1ms").output
    assert (f"the load is idle for {zero['idle']:.2%}: it saves" in text) == pays


def test_it_is_said_whether_requests_that_wait_for_a_start_break_the_p99(model: str, tmp_path: Path) -> None:
    path = spells(tmp_path / "spells.csv", timedelta(hours=2))
    for start, said in (("1min", "are late, which keeps the p99"), ("30min", "which does not keep the p99")):
        assert said in called(model, "--load", path, "--p99", "1ms", "--cold-start", start).output


def test_a_start_counts_until_its_backlog_is_gone(tmp_path: Path) -> None:
    """Of two days by minutes, idle from 0 to 8 h; by a fluid computation in steps of a second."""
    counts = np.random.default_rng(0).poisson(23_300 * 60, 2880).astype(float)
    counts[np.arange(2880) % 1440 < 480] = 0
    load = load_of("two days", {60 * minute: each for minute, each in enumerate(counts.tolist())}, 60)
    mean, start, left, late, gone = 0.87 / 23_300, 120, 0.0, 0.0, 0
    for second, rate in enumerate(np.repeat(counts[480:1440] / 60, 60)):
        left = max(0.0, left + rate - (second >= start) / mean)
        late += rate * (left > 0)
        gone = second + 1 if left and gone == second else gone
    queue = RecordedQueue(load.arrivals, ServiceTimes.of([mean]))
    starts = np.where(load.idle_before > COOLDOWN_S, float(start), 0.0)
    assert np.count_nonzero(starts) == 2
    found, until = queue.late_after_starts(np.full(24, 1), starts, 0.001)
    assert until == pytest.approx(gone, rel=0.05) and gone == pytest.approx(923, rel=0.05)
    assert found == pytest.approx(late / counts[:1440].sum(), rel=0.05) and found > 0.015


def test_what_is_to_be_taken_is_printed_though_many_cost_less(model: str, load: Path, tmp_path: Path) -> None:
    """Twenty that are cheaper and may not keep the p99."""
    head, entry = DATED.replace("8481C", "9B14").replace("0.3", "0.1").split("[cpu_instances.mine]")
    entries = "".join(f"[cpu_instances.risky-{number}]{entry}" for number in range(20))
    (tmp_path / "prices.toml").write_text(head + entries)
    text = called(model, "--load", load, "--p99", "0.45ms", "--prices", tmp_path / "prices.toml").output
    assert text.count("risky-") < 20 and "▸  onnx-int8  c3-highcpu-4" in text and "that cost more" in text


def test_more_requests_than_there_is_room_for_need_another_instance(model: str, load: Path) -> None:
    text = called(model, "--load", load, "--p99", "1ms").output
    up_to = float(text.split("needed from ")[1].split(" requests/s")[0].replace(",", ""))
    taken = planned(model, "--load", load, "--p99", "1ms")["rows"][0]
    instances = max(taken["planned"]["instances"])
    for rate, needed in ((0.99 * up_to, instances), (1.02 * up_to, instances + 1)):
        its = planned(model, "--load", hourly(load.with_name("more.csv"), [rate] * 24), "--p99", "1ms")
        assert max(row(its, taken["variant"], taken["instance"])["planned"]["instances"]) == needed


def test_a_model_that_was_timed_beside_other_work_is_named(tmp_path: Path, load: Path) -> None:
    its = report()
    quiet = variant(its, INT8).latency_ms["1"]
    assert quiet.p50
    for tail, said in ((9.0, False), (11.0, True)):
        late = replace(quiet, p99=replace(quiet.p50, value=tail * quiet.p50.value))
        variants = [replace(v, latency_ms=v.latency_ms | {"1": late}) if v.name == INT8 else v for v in its.variants]
        place = write_exported(tmp_path / f"late-{tail}", replace(its, variants=variants), ON_CPU)
        text = called(place, "--load", load, "--p99", "5ms").output
        assert ("p99 over median of a request alone: onnx-int8 (11): other processes" in text) == said


def test_a_model_without_latencies_of_single_rows_cannot_be_planned(tmp_path: Path, load: Path) -> None:
    its = report()
    blind = [
        replace(each, latency_ms={batch: at for batch, at in each.latency_ms.items() if batch != "1"})
        for each in its.variants
    ]
    ran = called(write_exported(tmp_path / "blind", replace(its, variants=blind)), "--load", load, "--p99", "1ms")
    assert ran.exit_code == 1
    same_wording(ran.output)


@pytest.mark.parametrize(
    "arguments",
    [
        ["MODEL", "--p99", "1us"],
        ["MODEL", "--p99", "-1ms"],
        ["MODEL", "--p99", "nan"],
        ["MODEL", "--p99", "0.05ms"],
        ["MODEL", "--p99", "1ms", "--instance", "p9.huge"],
        ["MODEL", "--p99", "1ms", "--prices", "none.toml"],
        ["MODEL", "--p99", "1ms", "--cold-start", "soon"],
        ["MODEL", "--p99", "1ms", "--engineer-hours", "9"],
        ["MODEL", "--p99", "1ms", "--engineer-hours", "-9", "--engineer-rate", "100"],
        ["nowhere", "--p99", "1ms"],
        ["HERE", "--p99", "1ms"],
    ],
)
def test_bad_input_is_one_line(model: str, load: Path, arguments: list[str]) -> None:
    places_ = {"MODEL": model, "HERE": str(load.parent)}
    ran = called(*(places_.get(each, each) for each in arguments), "--load", load)
    assert ran.exit_code == 1 and len(ran.output.strip().splitlines()) == 1, ran.output
    same_wording(ran.output)


def test_a_price_without_date_is_one_line(model: str, load: Path, tmp_path: Path) -> None:
    (tmp_path / "prices.toml").write_text(MINE.format(date=""))
    ran = called(model, "--load", load, "--p99", "1ms", "--prices", tmp_path / "prices.toml")
    assert ran.exit_code == 1
    same_wording(ran.output)


def test_a_damaged_model_is_one_line(tmp_path: Path, load: Path) -> None:
    place = write_exported(tmp_path / "damaged")
    (Path(place) / "model" / "export.json").write_text("{}")
    ran = called(place, "--load", load, "--p99", "1ms")
    assert ran.exit_code == 1 and "export.json:" in ran.output
    same_wording(ran.output)
    assert len(ran.output.strip().splitlines()) == 1


def test_options_of_the_plan_of_trainings_are_not_passed_over(model: str, load: Path) -> None:
    arguments = ["--deadline", "8h", "serve", model, "--load", str(load), "--p99", "1ms"]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 1
    same_wording(ran.output)


def test_the_load_that_was_read_is_the_one_planned(model: str, load: Path) -> None:
    found = planned(model, "--load", load, "--p99", "1ms")["load"]
    read = read_load(load)
    assert tuple(found["rates"]) == read.rates and found["month"] == read.month


def test_the_plan_is_what_manifests_read(model: str, load: Path, tmp_path: Path) -> None:
    asked = (model, "--load", load, "--p99", "1ms", "--instance", "c3-highcpu-4")
    found = planned(*asked)
    (tmp_path / "plan.json").write_text(json.dumps(found))
    plan, its = read_plan(tmp_path / "plan.json"), row(found, INT8, "c3-highcpu-4")["planned"]
    assert (plan.variant, plan.instance) == (INT8, "c3-highcpu-4")
    assert (plan.threads, plan.cpus, plan.memory_gib) == (report().machine.threads, 4, 8)
    assert plan.of_each == row(found, INT8, "c3-highcpu-4")["replicas_of_each"]
    assert (plan.least, plan.most) == (min(its["replicas"]), max(its["replicas"])) == (1, its["replicas"][12])
    service = service_times(variant(report(), INT8).latency_ms["1"])
    assert service and plan.busy == pytest.approx(20_000 * service.mean * (1 + ONE_RUN) / plan.most)
