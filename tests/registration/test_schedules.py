"""Schedules: parsing, accepted cron expressions, and launch plans."""

import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner
from flyteidl.admin.launch_plan_pb2 import LaunchPlanSpec
from flytekit import CronSchedule

from slipstream.shared.cron import cron_error, next_times
from slipstream.shared.errors import UserError
from slipstream.shared.source.dates import dated_address
from tests.support.package import package
from tests.support.wording import refuses, same_wording
from workflows.schedules.command import described, main
from workflows.schedules.settings import SHIPPED, TrainingSchedule, read_schedules
from workflows.scoring import score

MINE = """
[nightly_training]
kind = "training"
cron = "30 3 * * *"
data = "s3://bucket/churn/"
target = "churned"
config = {training = {epochs = 3}}
notify = {email = ["ml@example.com"], on = ["failed"]}

[other_training]
kind = "training"
cron = "@weekly"
data = "s3://bucket/fraud/"

[links]
kind = "collectives"
cron = "0 5 * * mon"
config = {largest = 4096}

[by_hand]
kind = "training"
data = "s3://bucket/churn/"

[into_service]
kind = "training"
cron = "0 4 * * *"
data = "s3://bucket/churn/"
registry = "s3://bucket/models"

[into_service_by_hand]
kind = "training"
registry = "s3://bucket/models"

[every_morning]
kind = "scoring"
cron = "0 6 * * *"
registry = "s3://bucket/models"
data = "s3://bucket/today/"
output = "s3://bucket/scores"
config = {scoring = {keep = ["id"]}}

[with_retraining]
kind = "scoring"
cron = "0 7 * * *"
registry = "s3://bucket/models"
data = "s3://bucket/today/"
output = "s3://bucket/scores"
training_data = "s3://bucket/churn/"
target = "churned"

[tuned_each_month]
kind = "sweep"
cron = "@monthly"
data = "s3://bucket/churn/"
target = "churned"
config = {sweep = {trials = 30, space = {"training.learning_rate" = {low = 1e-4, high = 1e-1, log = true}}}}
"""


LABELLED = """
[daily]
kind = "scoring"
cron = "5 0 * * *"
registry = "s3://bucket/models"
data = "s3://bucket/day={date-1}/"
output = "s3://bucket/scores"
queue = "gpus"
labels = {team = "churn"}
annotations = {"example.com/owner" = "ml"}
service_account = "scorer"

[dated_training]
kind = "training"
cron = "0 3 * * *"
data = "s3://bucket/day={date}/"
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, LaunchPlanSpec]:
    """Launch plans of both files, packaged once."""
    directory = tmp_path_factory.mktemp("schedules")
    (directory / "both.toml").write_text(MINE + LABELLED)
    return package(directory, "local", SLIPSTREAM_SCHEDULES=str(directory / "both.toml")).launch_plans


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    return path


def test_each_schedule_is_one_launch_plan(plans: Mapping[str, LaunchPlanSpec]) -> None:
    made = plans
    assert {name for name in made if "." not in name} == {
        "daily",
        "dated_training",
        "nightly_training",
        "other_training",
        "links",
        "by_hand",
        "into_service",
        "into_service_by_hand",
        "every_morning",
        "with_retraining",
        "tuned_each_month",
    }

    nightly = made["nightly_training"]
    assert nightly.workflow_id.name == "workflows.schedules.launch_plans.train_on_schedule"
    schedule = nightly.entity_metadata.schedule
    assert (schedule.cron_schedule.schedule, schedule.kickoff_time_input_arg) == ("30 3 * * *", "kickoff")
    (notification,) = nightly.entity_metadata.notifications
    assert list(notification.email.recipients_email) == ["ml@example.com"] and len(notification.phases) == 1
    fixed = {name: literal.scalar.primitive.string_value for name, literal in nightly.fixed_inputs.literals.items()}
    assert fixed.pop("config") == ""  # a structure
    assert fixed == {"data": "s3://bucket/churn/", "target": "churned", "cron": "30 3 * * *"}
    assert set(nightly.default_inputs.parameters) == {"kickoff"}

    links = made["links"]
    assert links.workflow_id.name == "workflows.collectives.benchmark"
    assert set(links.fixed_inputs.literals) == {"config"} and not links.default_inputs.parameters
    assert all(made[name].concurrency_policy.max == 1 for name in ("nightly_training", "other_training", "links"))

    promoting = made["into_service"]
    assert promoting.workflow_id.name == "workflows.schedules.launch_plans.promote_on_schedule"
    assert promoting.fixed_inputs.literals["registry"].scalar.primitive.string_value == "s3://bucket/models"
    assert set(promoting.default_inputs.parameters) == {"kickoff"} and promoting.concurrency_policy.max == 1
    assert made["into_service_by_hand"].workflow_id.name == "workflows.training.train_and_promote"

    morning = made["every_morning"]
    assert (
        morning.workflow_id.name == "workflows.schedules.launch_plans.score_on_schedule"
        and morning.concurrency_policy.max == 1
    )
    assert set(morning.fixed_inputs.literals) == {"registry", "data", "output", "config"}
    retraining = made["with_retraining"]
    assert retraining.workflow_id.name == "workflows.schedules.launch_plans.retrain_on_schedule"
    assert retraining.fixed_inputs.literals["training_data"].scalar.primitive.string_value == "s3://bucket/churn/"
    assert set(retraining.default_inputs.parameters) == {"kickoff"}

    tuned = made["tuned_each_month"]
    assert tuned.workflow_id.name == "workflows.schedules.launch_plans.sweep_on_schedule"
    assert tuned.entity_metadata.schedule.kickoff_time_input_arg == "kickoff"

    by_hand = made["by_hand"]
    assert by_hand.workflow_id.name == "workflows.training.train_and_export"
    assert not by_hand.entity_metadata.schedule.WhichOneof("ScheduleExpression")
    assert set(by_hand.default_inputs.parameters) == {"data", "target", "config"}


@pytest.mark.parametrize("environment", [path.stem for path in SHIPPED.glob("*.toml")])
def test_every_environment_has_the_three_schedules(environment: str) -> None:
    assert list(read_schedules(environment)) == ["nightly_training", "weekly_collectives", "retrain_now"]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            "[nightly]\ncron = '@daily'\n",
            "[nightly]: expected a table with a `kind`: training or collectives or scoring or sweep",
        ),
        (
            "[nightly]\nkind = 'serving'\n",
            "[nightly]: expected a table with a `kind`: training or collectives or scoring or sweep",
        ),
        (
            "[nightly]\nkind = 'scoring'\ncron = '@daily'\ndata = 'd'\noutput = 'o'\n",
            'registry: "" is not allowed; expected an address',
        ),
        ("[monthly]\nkind = 'sweep'\n", "[monthly]: config.sweep.space: is empty"),
        ("nightly = 1\n", "[nightly]: expected a table with a `kind`"),
        ("['Mine!']\nkind = 'training'\n", "[Mine!]: expected a name of small letters, digits and underscores"),
        ("[nightly]\nkind = 'training'\ncorn = '1'\n", "[nightly]: corn: unknown setting; did you mean 'cron'?"),
        ("[links]\nkind = 'collectives'\ndata = 's3://b'\n", "[links]: data: unknown setting"),
        ("[nightly]\nkind = 'training'\nconfig.training.epochs = 0\n", "training.epochs: 0 is not allowed"),
        ("[nightly]\nkind = 'training'\nnotify.on = ['late']\n", 'notify.on[0]: "late" is not allowed'),
        ("[nightly]\nkind = 'training'\ncron = '0 2 31 2 *'\n", 'cron: "0 2 31 2 *" is not allowed; it never'),
        ("[nightly\n", "cannot be read"),
    ],
)
def test_what_is_wrong_is_one_line_with_file_and_setting(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(toml)
    with pytest.raises(UserError) as refusal:
        read_schedules(str(path))
    assert message in refusal.value.message and str(path) in refusal.value.message


def test_an_environment_that_does_not_exist_names_those_that_do() -> None:
    with pytest.raises(UserError, match="development, production"):
        read_schedules("qa")


GOOD = ["0 2 * * *", "*/15 0-6,22 1,15 jan-MAR mon-fri", "5/20 * ? * ?", "0 0 29 2 *", "@daily", "@midnight"]


@pytest.mark.parametrize("expression", GOOD)
def test_expressions_that_both_flytekit_and_flytes_scheduler_read(expression: str) -> None:
    assert cron_error(expression) == ""
    CronSchedule(schedule=expression)


@pytest.mark.parametrize(
    ("expression", "because"),
    [
        ("0 2 31 2 *", "it never fires"),
        ("0 0 31 4,6,9,11 *", "it never fires"),
        ("0 2 * *", "expected five fields"),
        ("0 0 2 * * *", "expected five fields"),  # seconds: croniter takes them, Flyte's scheduler does not
        ("@every 1h", "expected five fields"),  # Flyte's scheduler takes it, flytekit does not
        ("nightly", "expected five fields"),
        ("60 2 * * *", "'60' is not a minute; expected 0 to 59"),
        (
            "0 2 * * 7",
            "'7' is not a day of the week; expected 0 to 6 or sun/mon",
        ),  # Sunday for croniter, nothing for Flyte
        ("0 2 * * sat-sun", "'sat-sun' is not a day of the week"),
        ("0 2 L * *", "'L' is not a day of the month"),
        ("0 2 * * mon#1", "'mon#1' is not a day of the week"),
        ("*/0 * * * *", "'*/0' is not a minute"),
        ("0 H * * *", "'H' is not an hour"),
    ],
)
def test_expressions_that_one_of_them_refuses_or_that_never_fire(expression: str, because: str) -> None:
    assert cron_error(expression).startswith(because)


def test_the_next_times() -> None:
    after = datetime(2026, 2, 27, 2, 30, tzinfo=UTC)
    assert [f"{time:%m-%d %H:%M %Z}" for time in next_times("30 2 * * *", after, 3)] == [
        "02-28 02:30 UTC",
        "03-01 02:30 UTC",
        "03-02 02:30 UTC",
    ]


def test_the_list_says_when_and_what(mine: Path) -> None:
    ended = CliRunner().invoke(main, [str(mine)])
    assert ended.exit_code == 0
    for line in (
        f"{mine}: 9 schedules, times in UTC",
        "    promotes the model in s3://bucket/models if it is shown not to be worse",
        "    trains on s3://bucket/churn/, target churned, exports and reports",
        '    with {"training": {"epochs": 3}}',
        "    scores s3://bucket/today/ with the model in service in s3://bucket/models, into s3://bucket/scores",
        "    trains on s3://bucket/churn/ and promotes there if the rows drift",
        "    tries training.learning_rate in 30 trials on s3://bucket/churn/, target churned",
        "    tells ml@example.com if it failed",
        "    measures 11 collectives from 1,024 to 4,096 bytes",
        "    when it is started: pyflyte run remote-launchplan by_hand",
    ):
        assert line in ended.output.splitlines(), ended.output
    now = datetime(2026, 11, 22, 12, tzinfo=UTC)
    said = list(described("weekly", TrainingSchedule(cron="@weekly"), now))
    assert said[0] == "@weekly: Sun 2026-11-29 00:00, Sun 2026-12-06 00:00, Sun 2026-12-13 00:00"


def test_the_list_refuses_a_wrong_file_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[nightly]\nkind = 'training'\ncron = '0 2 30 feb *'\n")
    ended = CliRunner().invoke(main, [str(path)])
    assert ended.exit_code == 1
    assert ended.output.splitlines() == [
        f'Error: {path}, [nightly]: cron: "0 2 30 feb *" is not allowed; '
        "it never fires: there is no such date within 5 years"
    ]


# Labels, accounts and dates


def test_a_plan_carries_labels_account_and_queue(plans: Mapping[str, LaunchPlanSpec]) -> None:
    daily = plans["daily"]
    assert dict(daily.labels.values) == {"team": "churn", "kueue.x-k8s.io/queue-name": "gpus"}
    assert dict(daily.annotations.values) == {"example.com/owner": "ml"}
    assert daily.security_context.run_as.k8s_service_account == "scorer"
    assert daily.entity_metadata.schedule.kickoff_time_input_arg == "kickoff"
    assert daily.fixed_inputs.literals["data"].scalar.primitive.string_value == "s3://bucket/day={date-1}/"
    assert not plans["nightly_training"].labels.values
    assert not plans["nightly_training"].security_context.run_as.k8s_service_account


@pytest.mark.parametrize(
    ("kickoff", "today", "before"),
    [
        (datetime(2026, 11, 28, 23, 59, tzinfo=UTC), "2026-11-28", "2026-11-27"),
        (datetime(2026, 11, 29, 0, 1, tzinfo=UTC), "2026-11-29", "2026-11-28"),
        (datetime(2028, 3, 1, 0, 1, tzinfo=UTC), "2028-03-01", "2028-02-29"),
        (datetime(2027, 1, 1, 1, 0, tzinfo=timezone(timedelta(hours=9))), "2026-12-31", "2026-12-30"),
        (datetime(2026, 11, 28, 23, 59), "2026-11-28", "2026-11-27"),
    ],
)
@pytest.mark.parametrize("zone", ["UTC", "Pacific/Auckland"])
def test_a_date_is_that_of_the_kickoff_in_utc(
    monkeypatch: pytest.MonkeyPatch, kickoff: datetime, today: str, before: str, zone: str
) -> None:
    """Whatever the zone of the machine."""
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        address = dated_address("data", "s3://b/{date-1}/to={date}/{date-1}", kickoff)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert address == f"s3://b/{before}/to={today}/{before}"


def test_an_address_without_a_date_stays() -> None:
    assert dated_address("data", "s3://b/{day}/x", None) == "s3://b/{day}/x"


@pytest.mark.parametrize("address", ["s3://b/{date}/", "s3://b/{date+1}/", "s3://b/{date-0}/", "s3://b/{date"])
def test_a_run_by_hand_has_no_date(address: str) -> None:
    with refuses(UserError):
        dated_address("data", address, None)


def test_a_manual_scoring_with_a_date_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        score(data="s3://b/{date}/", output=str(tmp_path), registry=str(tmp_path / "registry"))
    same_wording(error.value.message.partition("data: ")[2])


def test_the_list_shows_the_addresses_of_the_next_times(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(LABELLED)
    daily = read_schedules(str(tmp_path / "mine.toml"))["daily"]
    lines = list(described("daily", daily, datetime(2026, 12, 31, 12, tzinfo=UTC)))
    assert lines[1] == (
        "data of these times: s3://bucket/day=2026-12-31/, s3://bucket/day=2027-01-01/, s3://bucket/day=2027-01-02/"
    )
    assert "labels its pods team=churn, kueue.x-k8s.io/queue-name=gpus" in lines


@pytest.mark.parametrize(
    "table",
    [
        'labels = {"kueue.x-k8s.io/queue-name" = "a"}\nqueue = "b"',
        'labels = {team = "two words"}',
        'data = "s3://b/{date}"',
        'cron = "@daily"\ndata = "s3://b/{dates}"',
    ],
)
def test_wrong_labels_and_dates_are_one_line(tmp_path: Path, table: str) -> None:
    (tmp_path / "mine.toml").write_text(f'[mine]\nkind = "training"\n{table}\n')
    with refuses(UserError):
        read_schedules(str(tmp_path / "mine.toml"))
