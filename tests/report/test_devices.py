"""Devices of a run: utilisation, diagnosis and cost, on the page and in the terminal."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.operations.plan.measured import figures_of_run
from slipstream.pipeline.report.against_interconnect import against_interconnect, expected_exchange
from slipstream.pipeline.report.costs import TOTAL, stage_costs
from slipstream.pipeline.report.engine import build_report, run_summary
from slipstream.pipeline.report.pages import device_charts
from slipstream.pipeline.report.pages.report_page import stored_charts
from slipstream.pipeline.report.terminal import cost_lines, training_lines
from slipstream.shared.artifacts.results.devices import PodSeries
from slipstream.shared.artifacts.results.ledger import read_figures
from slipstream.shared.profiles.profile import load_profile
from slipstream.shared.stages import StageRun, StageUsage
from tests.support.network_profiles import network_profile
from tests.support.report_pages import Parsed
from tests.support.report_runs import STAGES, results
from tests.support.watched_runs import BOTTLENECK, DEVICES, watched_files
from tests.support.wording import refuses

GPU_USAGE = StageUsage("node-0", "", True, 2, 0.55, 0.9, 720_000.0)
RUN = [StageRun("prepare", 0.0, reused=True), StageRun("train", 5_400.0, reused=False, usage=GPU_USAGE)]


def test_the_dollars_of_a_training_are_those_of_all_its_attempts() -> None:
    profile = load_profile("a100-spot")
    placement = replace(profile.placement("train"), price_per_hour=12.0, spot_price_per_hour=4.0)
    priced = replace(profile, stages={**profile.stages, "train": placement})
    train, total = stage_costs(RUN, DEVICES, priced)
    hours = (3_600 + 5_400) / 3_600 * placement.nodes
    assert (train.stage, total.stage) == ("train", TOTAL)
    assert train.pod_hours == pytest.approx(hours) and train.gpu_hours == pytest.approx(hours * int(placement.gpu))
    assert (train.paid, train.on_demand) == (round(4 * hours, 2), round(12 * hours, 2))
    assert train.lost == round(4 * 600 / 3_600 * placement.nodes, 2)
    assert train.watt_hours == pytest.approx(400 * 2 * (3_600 + 5_400) / 3_600)
    assert total == replace(train, stage=TOTAL, priced_as="")


def test_a_pod_is_paid_for_from_its_start_to_its_end() -> None:
    """By hand: the start of both attempts, and what the agent of the last did after its last record."""
    profile = load_profile("local")
    placement = replace(profile.placement("train"), price_per_hour=3600.0)
    priced = replace(profile, stages={**profile.stages, "train": placement})
    attempts = [replace(each, before=20.0, spot=False) for each in DEVICES.attempts]
    run = [StageRun("train", 20.0 + 5_400.0 + 30.0, reused=False), StageRun("evaluate", 7.5, reused=False)]
    train, evaluate, total = stage_costs(run, replace(DEVICES, attempts=attempts), priced)
    assert train.paid == (20 + 3_600) + (20 + 5_400 + 30)
    assert evaluate.paid is None or total.paid == pytest.approx(train.paid + evaluate.paid, abs=0.01)
    assert total.pod_hours == pytest.approx((20 + 3_600 + 20 + 5_400 + 30 + 7.5) / 3_600)


def test_without_gpus_and_prices_there_is_no_bill() -> None:
    assert stage_costs(STAGES, None, load_profile("local")) == []


def test_without_a_price_there_are_hours_and_no_dollars() -> None:
    profile = load_profile("a100-spot")
    placement = replace(profile.placement("train"), accelerator="")
    _, total = stage_costs(RUN, DEVICES, replace(profile, stages={**profile.stages, "train": placement}))
    assert total.paid is None and total.lost is None and total.unpriced_pod_hours == total.pod_hours > 0


def test_the_bill_compares_dollars_of_the_same_hours() -> None:
    """One pod-hour on demand at $1, and 10 on spot, which are $400 on demand and whose spot price is unknown."""
    profile = load_profile("local")
    spot = replace(profile.placement("train"), nodes=1, interruptible=True, price_per_hour=40.0)
    priced = replace(profile.placement("prepare"), price_per_hour=1.0)
    profile = replace(profile, stages={**profile.stages, "train": spot, "prepare": priced})
    run = [StageRun("prepare", 3_600.0, reused=False), StageRun("train", 36_000.0, reused=False)]
    costs = stage_costs(run, None, profile)
    assert (costs[1].paid, costs[1].on_demand) == (None, 400.0), "the page's table shows them apart"
    assert list(cost_lines(costs)) == [f"{'Cost':<12}$1.00 ($1.00 on demand); 10.0 pod-hours without a known price"]


def test_the_page_and_the_figures_say_it(tmp_path: Path) -> None:
    found = results(tmp_path / "in", ["no", "yes"], trained=watched_files())
    summary = build_report(tmp_path / "runs", found, [*RUN, *STAGES[2:]], {})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    text = " ".join(Parsed(page).text.split())
    for said in (
        "Data: 43 % of the training's time (rank 1 waited 15.2 of 35.2 ms a step",
        "without it training would be 1.75 times as fast",
        "41 % was useful computing",
        "killed, or its machine was lost",
        "node-0, node-1",
        "GPU-hours",
    ):
        assert said in text
    assert "attempt 1: killed, or its machine was lost" in page, "marked on the axis"
    tree = json.loads(Path(summary.directory, "summary.json").read_text())
    assert tree["bottleneck"]["verdict"] == "data" and tree["costs"][-1]["stage"] == TOTAL
    assert figures_of_run(Path(summary.directory, "summary.json")) == read_figures(found.trained.directory)
    assert tree["costs"][0]["gpu_hours"] > 0 and tree["stages"][1]["usage"]["busy"] == 0.55


def test_the_first_screen_names_what_held_training_back(tmp_path: Path) -> None:
    found = run_summary(results(tmp_path, ["no", "yes"], trained=watched_files()), RUN, "runs/x")
    text = " ".join(str(found).split())
    assert "Training 41 % of 2 h 30 min was useful computing. Data: 43 % of the training's time" in text
    assert "GPU-hours" in text
    assert max(map(len, str(found).splitlines())) <= 80


@pytest.mark.parametrize(
    "better", [{"useful": 0.61}, {"verdict": ""}, {"seconds": 10.0}], ids=["useful", "no verdict", "nothing to save"]
)
def test_it_says_nothing_where_little_is_to_be_gained(better: dict[str, float | str]) -> None:
    assert list(training_lines(None, BOTTLENECK))
    assert not list(training_lines(None, replace(BOTTLENECK, **better)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("seconds", "shown"), [(23.0, False), (24.0, True)])
def test_advice_is_given_from_ten_seconds_of_possible_gain_on(seconds: float, shown: bool) -> None:
    """At 1.75 times the speed, 23 s become 13.1 and 24 s become 13.7: 9.9 and 10.3 s less."""
    assert bool(list(training_lines(None, replace(BOTTLENECK, seconds=seconds)))) == shown


def test_the_exchange_is_compared_with_the_measured_interconnect() -> None:
    profile = network_profile()
    measured = profile.of("all_reduce")
    assert expected_exchange(profile, measured[0].bytes) == measured[0].p50
    middle = (measured[-2].bytes + measured[-1].bytes) // 2
    assert expected_exchange(profile, middle) == pytest.approx((measured[-2].p50 + measured[-1].p50) / 2)
    assert expected_exchange(profile, 3 * measured[-1].bytes) == pytest.approx(3 * measured[-1].p50)
    said = against_interconnect(BOTTLENECK, profile)
    assert "for an all_reduce of 4.19 MB; every rank waited at least 4.20 ms" in said
    assert against_interconnect(replace(BOTTLENECK, shares={"communication": 0.09}), profile) == ""
    assert against_interconnect(replace(BOTTLENECK, exchanged_bytes=0), profile) == ""
    assert against_interconnect(BOTTLENECK, replace(profile, measurements=())) == ""


def test_many_devices_are_one_line_between_two(tmp_path: Path) -> None:
    assert "mean of all" not in device_charts.busy(DEVICES)
    wide = [replace(each, devices=each.devices * 4) for each in DEVICES.pods]
    named = [replace(each, devices=[replace(d, name=f"GPU {n}") for n, d in enumerate(each.devices)]) for each in wide]
    assert "mean of all" in device_charts.busy(replace(DEVICES, pods=named))


def test_multiprocessors_with_work_are_drawn_where_drivers_tell(tmp_path: Path) -> None:
    assert stored_charts(results(tmp_path / "a", ["no", "yes"], trained=watched_files()), None)["sm_active"] is None
    pods = [replace(each, devices=[replace(d, sm_active=d.memory) for d in each.devices[:1]]) for each in DEVICES.pods]
    files = watched_files() | {"devices.json": replace(DEVICES, pods=pods)}
    drawn = stored_charts(results(tmp_path / "b", ["no", "yes"], trained=files), None)
    assert "Multiprocessors with work" in str(drawn["sm_active"])


def test_a_device_that_did_not_answer_leaves_a_gap() -> None:
    one = DEVICES.pods[0]
    silent = replace(one, devices=[replace(each, busy=[None] * len(one.at)) for each in one.devices])
    assert device_charts.busy(replace(DEVICES, pods=[silent]))
    assert device_charts.memory(replace(DEVICES, pods=[], attempts=DEVICES.attempts[:1]))


@pytest.mark.parametrize("spoilt", [{"busy": [0.5]}, {"memory": []}, {"busy": [1e9] * 60}, {"busy": [-1.0] * 60}])
def test_series_that_are_not_of_their_times_are_refused(spoilt: dict[str, list[float]]) -> None:
    one: PodSeries = DEVICES.pods[0]
    with refuses(ValueError):
        replace(one, devices=[replace(one.devices[0], **spoilt)])  # type: ignore[arg-type]
