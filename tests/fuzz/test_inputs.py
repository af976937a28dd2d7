"""Random changes of files that a user hands to a command: extreme numbers and dates, digits, nesting. They are
accepted, or refused in one line, within 5 s of CPU time and 1 GiB.

Cases and times are those of ``test_artifacts.py``.
"""

import contextlib
import io
import json
from pathlib import Path

import pytest

from slipstream.operations.doctor.archive import Limits, LimitsFile, read_package
from slipstream.operations.doctor.package import SaveTime, check_package
from slipstream.operations.manifests.command import main as manifests
from slipstream.operations.plan.command import main as plan
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.adapters.peft_files import NewAdapter, peft_files, read_peft
from slipstream.shared.models.base.directory import START, BaseDirectory
from slipstream.shared.models.base.shape import SIZES
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.transformer_config import to_hugging_face
from slipstream.shared.profiles.profile import load_profile
from tests.support.adapters import LORA, adapted_network, adapters_of, plain_network
from tests.support.exported_models import ON_CPU, write_exported
from tests.support.fuzzed import Kinds, Whole
from tests.support.measured_trainings import write_run
from tests.support.proving import first_few
from tests.support.small_package import small_package
from workflows.schedules.settings import read_schedules

PRICES = """
[sources.mine]
date = 2026-11-01
address = "https://example.com"

[accelerators]
nvidia-l4 = "four"

[instances.four]
gpus = 4
gpu = "A100-80GB"
region = "here"
on_demand = 4.004
spot = [1.5, 1.6]
source = "mine"

[cpu_instances.mine]
cpu = "8481C"
cores = 4
region = "here"
on_demand = 0.3
source = "mine"
"""
PROFILE = """
extends = "a100-spot"
[default]
cpu = "4"
memory = "16Gi"
disk = "600Gi"
data_cache_gib = 50.5
price_per_hour = 1.5
environment = { A = "1" }
affinity = { nodeAffinity = { a = [{ b = 1 }] } }
[distributed]
nodes = 2
preemptions_per_day = 2.5
timeout_minutes = 720
grace_seconds = 120
[stages.train]
processes = 8
shared_memory = "8Gi"
[plan]
take = "x"
rows = 1
hours = [1.0, 2.0, 3.0]
dollars = [1.0, 2.0, 3.0]
interruptions = 0.5
"""
SCHEDULES = """
[nightly]
kind = "training"
cron = "0 3 * * *"
config = { training = { epochs = 3, learning_rate = 1e-3 } }
notify = { email = ["a@example.org"] }
[weekly]
kind = "collectives"
"""
LIMITS = '[limits]\ncpu = 2\nmemory = "1Gi"\ngpu = "8"\nephemeral_storage = "1Ti"\n'


def hours(place: Path) -> None:
    lines = (f"2026-11-02T{hour:02}:00,{3600 * (hour + 1)}\n" for hour in range(24))
    place.write_text("time,requests\n" + "".join(lines))


def requests(place: Path) -> None:
    place.write_text("time\n" + "".join(f"2026-11-0{2 + hour // 24}T{hour % 24:02}:00:01\n" for hour in range(48)))


def serving(place: Path) -> None:
    write_exported(place / "run", training=ON_CPU)
    hours(place / "hours.csv")
    requests(place / "requests.csv")
    (place / "prices.toml").write_text(PRICES)


def called(*arguments: object) -> str:
    """Return what ``slipstream plan`` prints; its errors are raised."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        plan.main([str(each) for each in arguments], standalone_mode=False)
    return output.getvalue()


def read_serving(place: Path) -> None:
    for load_of in ("hours.csv", "requests.csv"):
        asked = ("serve", place / "run", "--load", place / load_of, "--p99", "1ms", "--prices", place / "prices.toml")
        assert json.loads(called(*asked, "--json"))["take"] in called(*asked)


def trainings(place: Path) -> None:
    write_run(place / "run")
    (place / "prices.toml").write_text(PRICES)
    (place / "capacity.csv").write_text("up_hours,wait_hours\n" + "30.5,0.5\n" * 30)
    (place / "capacity.json").write_text(json.dumps({"up_hours": [5.5, 7.25], "wait_hours": [0.5]}))


def read_trainings(place: Path) -> None:
    for capacity in ("capacity.csv", "capacity.json"):
        asked = ("--measured", place / "run", "--prices", place / "prices.toml", "--capacity", place / capacity)
        assert "take" in json.loads(called(*asked, "--json"))
        assert called(*asked)


def profile(place: Path) -> None:
    place.mkdir()
    (place / "mine.toml").write_text(PROFILE)


def read_profile(place: Path) -> None:
    assert load_profile(str(place / "mine.toml")).to_json()
    with contextlib.redirect_stdout(io.StringIO()):
        manifests.main([str(place / "mine.toml"), "--out", str(place / "manifests")], standalone_mode=False)


def tables(place: Path) -> None:
    place.mkdir()
    (place / "schedules.toml").write_text(SCHEDULES)
    (place / "limits.toml").write_text(LIMITS)


def read_tables(place: Path) -> None:
    read_schedules(str(place / "schedules.toml"))
    LimitsFile.from_toml(place / "limits.toml")


def shape(place: Path) -> None:
    place.mkdir()
    whole = to_hugging_face(plain_network().config)
    # What else it says has defaults, and would be changed as often.
    (place / "config.json").write_text(json.dumps({name: whole[name] for name in ("model_type", *SIZES)}))


def read_shape(place: Path) -> None:
    its = plain_network().config
    rows = Signature((TensorSpec("tokens", "int64", (8,)),), "next token", "next token", buckets=its.vocab_size)
    build_model(ModelConfig("transformer", {"config": str(place / "config.json")}), rows, 0, shapes_alone=True)


def adapter(place: Path) -> None:
    place.mkdir()
    for name, content in peft_files(NewAdapter(LORA, "there/base", adapters_of(adapted_network(LORA)))).items():
        (place / name).write_bytes(content)


def read_adapter(place: Path) -> None:
    read_peft(BaseDirectory.list(str(place), START))


def archive(place: Path) -> None:
    place.mkdir()
    small_package(place / "package.tar")


def read_archive(place: Path) -> None:
    assert check_package(read_package(place / "package.tar"), Limits(), SaveTime(), []).text(None)


KINDS: Kinds = {
    "a plan of serving": (serving, read_serving),
    "a plan of trainings": (trainings, read_trainings),
    "a profile": (profile, read_profile),
    "schedules and limits": (tables, read_tables),
    "the shape of a transformer": (shape, read_shape),
    "an adapter": (adapter, read_adapter),
    "an archive": (archive, read_archive),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(lambda: tmp_path_factory.mktemp("whole"), KINDS)


@pytest.mark.parametrize("kind", first_few(KINDS, 3))
def test_what_was_changed_is_taken_or_refused_in_one_line(kind: str, whole: Whole) -> None:
    whole.try_few(kind)


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_so_is_whatever_else_comes(kind: str, whole: Whole) -> None:
    whole.try_many(kind)
