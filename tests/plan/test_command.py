"""``slipstream plan``: recommendations from measured runs, and refusals in one line."""

import json
import math
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from slipstream.operations.plan.advice import (
    CapacityChoice,
    advice_sentences,
    feasible_choices,
    pareto_optimal,
    recommended_choice,
)
from slipstream.operations.plan.command import main, old_price_warnings
from slipstream.operations.plan.decide import (
    ON_DEMAND,
    SPOT,
    PlannedOption,
    SimulatedRange,
    TrainingRequirements,
    option_rules,
    plan_options,
    sweep_totals,
)
from slipstream.operations.plan.estimate import HALF_WIDTH, LARGEST_BY_OPERATIONS, WorkTime, known_gpus, work_time
from slipstream.operations.plan.measured import figures_of_run, measured_training
from slipstream.operations.plan.options import instance_options
from slipstream.operations.plan.write import profile_toml
from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.results.ledger import UNKNOWN_GPU, gpu_name, read_figures
from slipstream.shared.checkpoint_interval import best_seconds
from slipstream.shared.profiles.profile import load_profile
from slipstream.shared.storage import storage_for
from slipstream.shared.telemetry.prices import built_in_prices
from tests.support.measured_trainings import A100, FIGURES, SPEED, figures, write_model, write_run
from tests.support.wording import line_with, same_wording

RUN = measured_training("run", FIGURES)
PRICES = """
[sources.mine]
date = {date}
address = "https://example.com"

[instances.mine]
gpus = 1
gpu = "A100-80GB"
region = "here"
on_demand = 4.0
spot = {spot}
source = "mine"
"""


def called(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def planned(*arguments: object) -> dict[str, Any]:
    ran = called(*arguments, "--json")
    assert ran.exit_code == 0, ran.output
    found: dict[str, Any] = json.loads(ran.output)
    return found


def named(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The outcomes of the option that is to be taken."""
    return [
        each
        for row in found["rows"]
        for each in row["outcomes"]
        if row["instance"] in found["take"] and found["take"].endswith(each["way"])
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("runs") / "one")


def test_the_figures_of_a_trained_model_are_those_of_its_run(tmp_path: Path) -> None:
    found = read_figures(Path(write_model(tmp_path / "model")))
    assert replace(found, attempts=FIGURES.attempts) == FIGURES


def test_a_gpu_of_an_older_record_is_named_by_its_peak_or_unknown() -> None:
    assert gpu_name("Tesla T4", SPEED) == "Tesla T4" and gpu_name("", None) == UNKNOWN_GPU
    assert gpu_name("", replace(SPEED, peak_from="the data sheet of NVIDIA L4")) == "NVIDIA L4"
    assert gpu_name("", replace(SPEED, peak_from="measured")) == UNKNOWN_GPU


@pytest.mark.parametrize("recorded", ["rank 0", "GPU 3", "measured", ""])
def test_an_older_run_or_model_is_planned_as_of_its_gpu(tmp_path: Path, recorded: str) -> None:
    """Older runs recorded the name of a chart's line."""
    older, now = write_run(tmp_path / "older", figures(gpu=recorded)), write_run(tmp_path / "now")
    assert figures_of_run(Path(older, "summary.json")) == FIGURES
    assert planned("--measured", older)["rows"] == planned("--measured", now)["rows"]
    assert read_figures(Path(write_model(tmp_path / "model", device=""))).gpu == A100


def test_trainings_on_unknown_gpus_are_not_of_the_same_hardware() -> None:
    """Nine of them would fit a step's constant cost, as if all ran on the same GPU."""
    runs = [
        measured_training(str(size), figures(gpu=UNKNOWN_GPU, speed={"flops_per_row": size * 1e11}))
        for size in range(1, 10)
    ]
    found = work_time(runs[0], runs, known_gpus()["H100"], 1)
    assert found.how == "predicted from an unknown GPU, by operations alone"
    assert found.spread == pytest.approx(math.log(1 + LARGEST_BY_OPERATIONS) / HALF_WIDTH)


def test_what_is_printed_names_every_profile_and_instance(run: str) -> None:
    ran = called("--measured", run, "--verbose")
    assert ran.exit_code == 0, ran.output
    for name in (*built_in_prices().instances, "a100-spot", "h100-efa-spot", "l4-spot", "cpu-cluster: has no GPU"):
        assert name in ran.output
    assert "Take " in ran.output and "Pareto-optimal" in ran.output
    assert "hours measured: 1 A100-80GB" in ran.output and "prices of 2025-03-06 are older" in ran.output


def test_without_more_words_the_answer_comes_first_and_few_options_follow(run: str) -> None:
    short, found = called("--measured", run).output, planned("--measured", run)
    head, take, *_ = short.splitlines()
    assert head.startswith("one like ") and take.startswith(f"Take {found['take']}: ")
    table = short.split("\n\n")[1].splitlines()
    options, more = table[1:-1], table[-1]
    assert 0 < len(options) <= 8 and more.startswith(f"{len(found['rows']) - len(options)} more options")
    assert "On the 1 process of the measured run: 5.15 h of work." in short, "18,360 s of computing, 180 s of waiting"
    fastest = [line for line in found["because"] if line.startswith("Fastest: ")]
    assert fastest and fastest[0] in short and found["pareto"][-1] in fastest[0]


def test_the_model_says_the_same_as_the_run(run: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    assert planned("--measured", model)["take"] == planned("--measured", run)["take"]


def test_json_has_what_the_table_has(run: str) -> None:
    found = planned("--measured", run)
    row = next(each for each in found["rows"] if each["profile"] == "a100-spot" and each["outcomes"][1:])
    spot = next(each for each in row["outcomes"] if each["way"] == SPOT)
    assert (row["pods"], row["gpus"], row["gpu"]) == (2, 8, "A100-80GB")
    assert spot["dollars"]["low"] <= spot["dollars"]["median"] <= spot["dollars"]["high"]
    assert spot["between_failures_s"] == 12 * 3600
    assert spot["checkpoint_s"] == pytest.approx(best_seconds(2.0, 6.0, 12 * 3600)), "of both pods together"
    assert found["take"] and found["pareto"] and found["because"][0].startswith(f"Take {found['take']}")


def test_a_training_on_demand_takes_what_is_known(run: str) -> None:
    found = planned("--measured", run)
    row = next(each for each in found["rows"] if each["instance"] == "Standard_NC24ads_A100_v4")
    (its,) = row["outcomes"]
    hours = (18_000 + 360 + 180 + 120 + 18_540 * 2 / 1800) / 3600
    assert its["way"] == ON_DEMAND and its["hours"]["median"] == pytest.approx(hours, rel=0.01)
    assert its["mean_dollars"] == pytest.approx(hours * 3.673, rel=0.01)
    twice = planned("--measured", run, "--rows", 2 * 36_000 * 512)
    (again,) = next(each for each in twice["rows"] if each["instance"] == "Standard_NC24ads_A100_v4")["outcomes"]
    assert again["hours"]["median"] == pytest.approx(2 * hours, rel=0.02)


def test_a_ledger_of_interruptions_is_believed_over_the_profiles(run: str, tmp_path: Path) -> None:
    home = storage_for(str(tmp_path / "home"))
    for number in range(1, 11):
        record = {"attempt": number, "world": 1, "wall": 3600.0, "began_at": 1e9 + number * 5400.0, "ended": "SIGTERM"}
        home.put(f"ledger/{number:04d}.json", canonical_json(record))
    ran = called("--measured", run, "--measured", tmp_path / "home", "--verbose")
    same_wording(line_with("1.4", ran.output))
    assert "waits of 0.5 h (9 waits recorded)" in ran.output


@pytest.mark.prove
def test_recorded_capacity_decides_against_spot(run: str, tmp_path: Path) -> None:
    """A pod for some minutes at a time: no spot instance ever gets on, but single pods move on demand."""
    (tmp_path / "zone.csv").write_text("up_hours,wait_hours\n" + "0.04,2\n" * 30)
    found = planned("--measured", run, "--capacity", tmp_path / "zone.csv")
    jobs = [row for row in found["rows"] if row["pods"] > 1 and len(row["outcomes"]) > 1]
    assert jobs and all(spot["mean_dollars"] is None for row in jobs for spot in row["outcomes"] if spot["way"] == SPOT)
    assert SPOT not in found["take"]
    text = called("--measured", run, "--verbose", "--capacity", tmp_path / "zone.csv").output
    assert "never (never)" in text and "no end" in text and "inf" not in text.replace("p5en", "")


def test_the_deadline_decides(run: str) -> None:
    cheap, soon = planned("--measured", run), planned("--measured", run, "--deadline", "2h")
    assert cheap["take"] != soon["take"]
    assert not [each for each in named(cheap) if each["hours"]["high"] <= 2]
    assert [each for each in named(soon) if each["hours"]["high"] <= 2 and each["in_time"] >= 0.95]
    text = called("--measured", run, "--deadline", "4h").output
    assert "The deadline leaves" in text and "of the runs keep it." in text
    assert "No option keeps 30.0 min" in called("--measured", run, "--deadline", "30min", "--budget", "1").output


def test_what_nobody_measured_is_taken_only_if_nothing_else_will_do(run: str) -> None:
    """Two nodes of eight would be cheaper, if the exchange took no time."""
    found = planned("--measured", run)
    rows = [row for row in found["rows"] if row["outcomes"]]
    assert (
        rows[0]["gpus"] * rows[0]["pods"] > 1
        and "unknown" in rows[0]["time"]
        and rows[0]["instance"] not in found["take"]
    )
    same_wording(" ".join(found["because"]))
    soon = planned("--measured", run, "--deadline", "2h")
    same_wording(" ".join(soon["because"]))


def test_trials_share_what_runs_at_a_time(run: str) -> None:
    one = planned("--measured", run)
    many = planned("--measured", run, "--trials", 24, "--parallel", 8)
    for name in ("Standard_NC24ads_A100_v4", "Standard_NC40ads_H100_v5"):
        (alone,), (all_of_them,) = (
            next(row for row in found["rows"] if row["instance"] == name)["outcomes"] for found in (one, many)
        )
        assert all_of_them["mean_dollars"] == pytest.approx(24 * alone["mean_dollars"], rel=0.05)
        assert all_of_them["hours"]["median"] == pytest.approx(3 * alone["hours"]["median"], rel=0.05)
        unsure = alone["hours"]["high"] / alone["hours"]["median"]
        assert all_of_them["hours"]["high"] / all_of_them["hours"]["median"] == pytest.approx(unsure, rel=0.1)


def test_a_sweep_takes_the_next_when_one_ends() -> None:
    hours, dollars = sweep_totals(
        np.array([1.0]), np.array([2.0]), TrainingRequirements(7, 3), np.random.default_rng(0)
    )
    assert set(hours) == {3.0} and set(dollars) == {14.0}


def test_a_range_of_spot_prices_widens_the_dollars_and_leaves_the_hours(run: str, tmp_path: Path) -> None:
    (tmp_path / "zone.csv").write_text("up_hours,wait_hours\n" + "500,1\n" * 30)

    def spot(price: str, *arguments: object) -> dict[str, Any]:
        (tmp_path / "prices.toml").write_text(PRICES.format(date="2026-11-01", spot=price))
        given = ("--prices", tmp_path / "prices.toml", "--capacity", tmp_path / "zone.csv", *arguments)
        found = next(row for row in planned("--measured", run, *given)["rows"] if row["instance"] == "mine")
        outcome: dict[str, Any] = next(each for each in found["outcomes"] if each["way"] == SPOT)
        return outcome

    for arguments in ((), ("--trials", 20, "--parallel", 5)):
        one, range_ = spot("0.5", *arguments), spot("[0.3, 0.7]", *arguments)
        assert one["hours"] == range_["hours"]
        assert range_["mean_dollars"] == pytest.approx(one["mean_dollars"], rel=0.02)
        # Of a uniform price 5 % are below 0.32 and above 0.68.
        assert range_["dollars"]["low"] == pytest.approx(one["dollars"]["low"] * 0.32 / 0.5, rel=0.1)
        assert range_["dollars"]["high"] == pytest.approx(one["dollars"]["high"] * 0.68 / 0.5, rel=0.1)


def test_a_written_profile_is_one(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prices.toml").write_text(PRICES.format(date="2026-11-01", spot=0.5))
    mine = tmp_path / "mine.toml"
    arguments = ("--measured", run, "--prices", tmp_path / "prices.toml", "--write", mine)
    found = planned(*arguments)
    placement = load_profile(str(mine)).asked("train")
    assert placement.nodes == 1 and int(placement.gpu) >= 1 and placement.timeout_minutes >= 60
    assert str(found["take"]).split(",")[0].split(" ")[0] in mine.read_text()
    its = load_profile(str(mine)).plan
    (outcome,) = named(found)
    assert its and its.take == found["take"] and its.rows == 36_000 * 512
    assert its.hours == pytest.approx([outcome["hours"][name] for name in ("low", "median", "high")], rel=1e-5)
    assert its.dollars == pytest.approx([outcome["dollars"][name] for name in ("low", "median", "high")], rel=1e-5)
    same_wording(called(*arguments).output)
    several = tmp_path / "several.toml"
    planned(*arguments[:-1], several, "--trials", 3)
    assert load_profile(str(several)).plan is None, "no run is several trainings"
    monkeypatch.setenv("SLIPSTREAM_PROFILE", str(mine))
    assert "mine" in {
        row["profile"] for row in planned("--measured", run, "--prices", tmp_path / "prices.toml")["rows"]
    }


@pytest.mark.parametrize("own", ["a100-spot", "mine"])
def test_a_profile_written_for_ones_own_extends_its_file(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str
) -> None:
    """Even if a built-in one has its name; its own [stages.train] gives way to the plan."""
    (tmp_path / "profiles").mkdir()
    (tmp_path / "written").mkdir()
    (tmp_path / f"profiles/{own}.toml").write_text(
        'extends = "a100-spot"\n[distributed]\nnodes = 1\nprocesses = 1\ngpu = "1"\nprice_per_hour = 0.01\n'
        '[stages.train]\ninterruptible = true\nservice_account = "it\'s mine"\n'
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPSTREAM_PROFILE", f"profiles/{own}.toml")
    found = planned("--measured", run, "--write", "written/w.toml")
    assert found["take"].endswith(f"(profile {own}), on demand")
    assert f'extends = "../profiles/{own}.toml"' in Path("written/w.toml").read_text()
    monkeypatch.chdir("/")
    its, base = (load_profile(str(tmp_path / name)) for name in ("written/w.toml", f"profiles/{own}.toml"))
    train, below = its.asked("train"), base.asked("train")
    assert (train.interruptible, below.interruptible) == (False, True)
    assert train.service_account == below.service_account == "it's mine" and train.price_per_hour == 0.01
    assert (train.nodes, train.node_selector, train.gpu) == (below.nodes, below.node_selector, below.gpu)


def rows(peak: float = 30e9) -> list[PlannedOption]:
    its = measured_training("run", figures(speed={"memory_bytes": int(peak)}))
    return plan_options(
        its,
        [its],
        instance_options([load_profile("a100-spot"), load_profile("l4-spot")], built_in_prices()),
        [],
        TrainingRequirements(),
    )


def test_what_does_not_fit_is_not_taken() -> None:
    fits = {row.option.gpu.name: row.fits for row in rows()}
    assert not fits["T4"] and not fits["L4"] and fits["A100-40GB"] and fits["H200"]
    assert not [choice for choice in feasible_choices(rows()) if not choice.row.fits]


def test_a_single_pod_moves_and_a_watched_one_is_warned() -> None:
    single, job = (next(row.option for row in rows() if row.option.pods == pods) for pods in (1, 2))
    assert option_rules(single, RUN).falls_back and not option_rules(job, RUN).falls_back
    assert option_rules(job, RUN).noticed == 1.0 and option_rules(single, RUN).noticed == 0.0
    slow = measured_training("slow", figures(save_seconds=79.0))
    assert option_rules(job, slow).noticed == 0.0, "a save with its margin takes 120.5 of the 120 s"


def test_the_written_profile_of_a_job_has_its_retries() -> None:
    choice = next(one for one in feasible_choices(rows()) if one.outcome.way == SPOT and one.row.option.pods == 2)
    written = profile_toml(choice)
    assert f"retries = {choice.outcome.retries + 2}" in written and 'extends = "a100-spot"' in written
    assert f"mean_time_between_failures: {12 * 3600}" in written


def test_the_pareto_set_has_none_that_another_beats() -> None:
    found = feasible_choices(rows())
    best = pareto_optimal(found)
    assert 1 < len(best) < len(found)
    for choice in best:
        better = [
            one
            for one in found
            if one.outcome.mean_dollars < choice.outcome.mean_dollars
            and one.outcome.hours.high < choice.outcome.hours.high * 0.99
        ]
        assert not better, choice


def test_spot_counts_only_where_it_is_cheaper_and_in_time() -> None:
    row = next(row for row in rows() if len(row.outcomes) == 2)
    on_demand, spot = row.outcomes
    assert on_demand.way == ON_DEMAND and spot.way == SPOT
    dear = replace(row, outcomes=(on_demand, replace(spot, mean_dollars=on_demand.mean_dollars + 1)))
    assert [choice.outcome.way for choice in feasible_choices([dear])] == [ON_DEMAND]
    late = replace(row, outcomes=(on_demand, replace(spot, mean_dollars=0.0, hours=SimulatedRange(1.0, 1.0, 99.0))))
    late = replace(late, time=WorkTime(3600.0, 0.1, "measured"))
    wanted = TrainingRequirements(deadline=on_demand.hours.high + 1)
    best = recommended_choice(feasible_choices([late]), wanted)
    assert isinstance(best, CapacityChoice) and best.outcome.way == ON_DEMAND
    same_wording(" ".join(advice_sentences(feasible_choices([late]), wanted)))
    free = recommended_choice(feasible_choices([late]), TrainingRequirements())
    assert free and free.outcome.way == SPOT
    said = " ".join(advice_sentences(feasible_choices([late]), TrainingRequirements()))
    same_wording(said)


def test_prices_are_old_after_ninety_days() -> None:
    assert not list(old_price_warnings(rows(), date(2025, 6, 4)))
    assert list(old_price_warnings(rows(), date(2025, 6, 5))) and "a2-ultragpu-8g" in next(
        old_price_warnings(rows(), date(2025, 6, 5))
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--measured", "nowhere"],
        ["--measured", "RUN", "--deadline", "soon"],
        ["--measured", "RUN", "--deadline", "1min"],
        ["--measured", "RUN", "--trials", "0"],
        ["--measured", "RUN", "--parallel", "-1"],
        ["--measured", "RUN", "--budget", "-5"],
        ["--measured", "RUN", "--prices", "none.toml"],
        ["--measured", "RUN", "--capacity", "none.csv"],
        ["--measured", "RUN", "--budget", "0.01", "--write", "x.toml"],
        ["--measured", "RUN", "--write", "profiles/mine"],
    ],
)
def test_bad_input_is_one_line(run: str, arguments: list[str]) -> None:
    ran = called(*(run if each == "RUN" else each for each in arguments))
    assert ran.exit_code == 1 and len(ran.output.strip().splitlines()) == 1, ran.output
    same_wording(ran.output)


@pytest.mark.parametrize(
    "price",
    [
        PRICES.format(date="2026-11-01", spot=5.0),
        PRICES.format(date='""', spot=1.0),
        PRICES.replace("date = {date}\n", "").format(spot=1.0),
    ],
)
def test_prices_that_are_none_are_one_line(run: str, tmp_path: Path, price: str) -> None:
    (tmp_path / "prices.toml").write_text(price)
    ran = called("--measured", run, "--prices", tmp_path / "prices.toml")
    assert ran.exit_code == 1 and len(ran.output.strip().splitlines()) == 1
    same_wording(ran.output)


def test_a_chosen_profile_without_gpu_or_of_an_unknown_instance(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "none.toml").write_text('extends = "cpu-cluster"\n')
    monkeypatch.setenv("SLIPSTREAM_PROFILE", str(tmp_path / "none.toml"))
    same_wording(called("--measured", run).output)
    label = '{ "node.kubernetes.io/instance-type" = "p9.huge" }'
    (tmp_path / "far.toml").write_text(f'extends = "h100-efa-spot"\n[distributed]\nnode_selector = {label}\n')
    monkeypatch.setenv("SLIPSTREAM_PROFILE", str(tmp_path / "far.toml"))
    same_wording(called("--measured", run).output)


def test_the_only_gpu_that_fits_needs_a_price_on_demand_or_a_rate(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = (
        'extends = "h100-efa-spot"\n[distributed]\npreemptions_per_day = {rate}\nspot_price_per_hour = 0.5\n'
        'node_selector = {{ "node.kubernetes.io/instance-type" = "p5en.48xlarge" }}\n'
    )
    monkeypatch.setenv("SLIPSTREAM_PROFILE", str(tmp_path / "mine.toml"))
    (tmp_path / "mine.toml").write_text(table.format(rate=0))
    large = write_run(tmp_path / "large", figures(speed={"memory_bytes": 120 * 10**9}))
    ran = called("--measured", large)
    assert ran.exit_code == 1 and len(ran.output.strip().splitlines()) == 1, ran.output
    same_wording(ran.output)
    (tmp_path / "mine.toml").write_text(table.format(rate=2))
    take = planned("--measured", large)["take"]
    assert "p5en.48xlarge (profile mine), spot" in take


def test_a_model_that_fits_nothing_and_a_run_that_says_nothing(tmp_path: Path) -> None:
    large = write_run(tmp_path / "large", figures(speed={"memory_bytes": 10**12}))
    same_wording(called("--measured", large).output)
    (tmp_path / "old").mkdir()
    (tmp_path / "old/summary.json").write_text("{}")
    same_wording(called("--measured", tmp_path / "old").output)
    empty = write_run(tmp_path / "empty", figures(throughput=None))
    same_wording(called("--measured", empty).output)
