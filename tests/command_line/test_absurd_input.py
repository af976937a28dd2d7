"""Absurd input is refused in one line, as fast as any other mistake: no endless work, full memory or traceback."""

import gzip
import json
import tarfile
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet

from tests.support.command_line import PYFLYTE, TRAINING, one_message
from tests.support.exported_models import ON_CPU, write_exported
from tests.support.limited import BYTES, CPU_S
from tests.support.measured_command import Took, help_of, slipstream, took
from tests.support.proving import first_few
from tests.support.small_package import small_package

HOURS = [f"2026-11-02T{hour:02}:00,{3600 * (hour + 1)}" for hour in range(24)]
PRICES = """
[sources.mine]
date = 2026-11-01
address = "https://example.com"

[cpu_instances.mine]
cpu = "8481C"
cores = 3
region = "here"
on_demand = 0.3
source = "mine"
"""
SPOT = """
extends = "a100-spot"
[distributed]
nodes = 2
preemptions_per_day = 1e9
"""
SHAPE = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
DIGITS, BRACKETS = f"n = {'9' * 5000}\n", f"n = {'[' * 3000}\n"
#: Other values of what is tried anyway: a process for each takes a while.
MORE = pytest.mark.prove
MANY_DIGITS, DEEP = "holds a whole number of more than 64 bits", "is nested too deeply"


def more(*cases: tuple[object, ...]) -> list[ParameterSet]:
    return [pytest.param(*case, marks=MORE) for case in cases]


def refused(ran: Took, said: str, like: Took) -> None:
    """Assert that it is one line, and that it took little more than a ``--help``."""
    assert ran.code == 1 and said in ran.output and len(ran.output.strip().splitlines()) == 1, ran.output[-2000:]
    assert ran.cpu_s <= like.cpu_s + CPU_S and ran.peak <= BYTES, ran


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_exported(tmp_path_factory.mktemp("runs") / "one", training=ON_CPU)


@pytest.mark.parametrize(
    ("lines", "prices", "said"),
    first_few(
        [
            ([*HOURS, "2206-11-02T00:00,1"], "", "covers 65,743 days, from 2026-11-02 to 2206-11-02; expected 3,660"),
            (HOURS, PRICES.replace("= 3", "= 999999999999999999999"), MANY_DIGITS),
            *more(
                (
                    ["2026-11-02T00:00+00:00,1", "0001-01-01T00:00+05:00,1"],
                    "",
                    "line 3: time 0001-01-01T00:00+05:00: expected",
                ),
                (
                    ["2026-11-02T00:00,1e15", *HOURS[1:]],
                    "",
                    "has 2.78e+11 requests a second in its busiest minute; expected",
                ),
                (
                    HOURS,
                    f'{PRICES}[accelerators]\nnvidia-l4 = ["mine"]\n',
                    'accelerators.nvidia-l4: ["mi',
                ),
                (
                    ["0001-01-01T00:00+05:00,1", *(f"{each}" for each in HOURS)],
                    "",
                    "line 2: time 0001-01-01T00:00+05:00: expe",
                ),
                (
                    ["2026-11-02T00:00,1e308", "2026-11-02T00:00,1e308", *HOURS],
                    "",
                    "has inf requests a second in its busiest",
                ),
                ([f"{each.partition(',')[0]},1e-320" for each in HOURS], "", "it has no requests"),
                (
                    HOURS,
                    PRICES.replace("= 3", "= 999999999999999999"),
                    "cores: 999999999999999999 is not allowed; expected at least 1",
                ),
                (HOURS, PRICES.replace("0.3", "1e400"), "on_demand: Infinity is not allowed; expected a finite number"),
                (HOURS, PRICES.replace("0.3", "1e9999999999999999999"), "on_demand: Infinity is not allowed"),
                (
                    HOURS,
                    PRICES.replace('source = "mine"', 'source = ["mine"]'),
                    'source: ["mine"] is not allowed; expected a text',
                ),
                (
                    HOURS,
                    PRICES.replace('region = "here"', "region = [1]"),
                    "mine.region: [1] is not allowed; expected a text",
                ),
                (HOURS, DIGITS + PRICES, MANY_DIGITS),
                (HOURS, BRACKETS + PRICES, DEEP),
            ),
        ],
        1,
    ),
)
def test_a_plan_of_serving(model: str, tmp_path: Path, lines: list[str], prices: str, said: str) -> None:
    (tmp_path / "load.csv").write_text("\n".join(["time,requests", *lines]))
    own = ["--prices", tmp_path / "prices.toml"] if prices else []
    (tmp_path / "prices.toml").write_text(prices)
    ran = slipstream("plan", "serve", model, "--load", tmp_path / "load.csv", "--p99", "1ms", *own)
    refused(ran, said, help_of("plan", "serve"))


@pytest.mark.parametrize(
    ("text", "said"),
    first_few(
        [
            (SPOT, "preemptions_per_day: 1000000000 is not allowed; expected at least 0 and at most 1440"),
            (DIGITS, MANY_DIGITS),
            (BRACKETS, DEEP),
            *more(
                (
                    SPOT.replace("1e9", "1440\n[stages.train]\ntimeout_minutes = 2147483647"),
                    "preemptions_per_day: 1440.0 is not allowed; expe",
                ),
                (f"{'.'.join('a' * 32_000)} = 1\n", DEEP),
                ("default = 2026-11-01\n", '"2026-11-01" is not allowed; expected a mapping'),
                (f'extends = "local"\n[default]\ngpu = "{"9" * 5000}"\n', "expected a whole number, such as 8"),
                (f'extends = "local"\n[default]\nmemory = "{"9" * 400}"\n', "expected a Kubernetes quantity"),
                (
                    'extends = "local"\n[default]\ndata_cache_gib = 1e308\n',
                    "profile.data_cache_gib: 1e+308",
                ),
            ),
        ],
        1,
    ),
)
def test_a_profile(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    refused(slipstream("profiles", tmp_path / "mine.toml"), said, help_of("profiles"))


@MORE
def test_a_profile_of_a_workflow(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(SPOT)
    asked = [str(PYFLYTE), "run", str(TRAINING), "prepare", "--data", "nothing.csv", "--target", "y"]
    ran = took(asked, tmp_path, {"SLIPSTREAM_PROFILE": str(tmp_path / "mine.toml")})
    like = took([str(PYFLYTE), "run", str(TRAINING), "prepare", "--help"], tmp_path, {})
    assert ran.code and "preemptions_per_day: 1000000000 is not allowed" in one_message(ran.output), ran.output
    assert ran.cpu_s <= like.cpu_s + CPU_S and ran.peak <= BYTES


@MORE
@pytest.mark.parametrize(("text", "said"), [(DIGITS, MANY_DIGITS), (BRACKETS, DEEP)], ids=["digits", "brackets"])
def test_schedules(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "mine.toml").write_text(text)
    ran = slipstream("schedules", SLIPSTREAM_SCHEDULES=str(tmp_path / "mine.toml"))
    refused(ran, said, help_of("schedules"))


@MORE
@pytest.mark.parametrize(
    ("options", "layers", "said"),
    [
        (["--length", "16"], 2**31 - 1, "model.arguments.num_hidden_layers: 2147483647 is not allowed; expected at le"),
        (["--length", 2**31 - 1], 2, "--length 2147483647: expected a whole number from 1 to 1,048,576"),
        (["--length", "9" * 5000], 2, "--length"),
        (["--length", "16", "--devices", 2**31 - 1], 2, "--devices 2147483647: expected a whole number from 1 to 100,"),
        (["--length", "16", "--memory", "9" * 400 + "GiB"], 2, "expected a device's memory, such as 24GiB or 80GB"),
    ],
)
def test_memory(tmp_path: Path, options: list[object], layers: int, said: str) -> None:
    model = {"name": "transformer", "arguments": {**SHAPE, "num_hidden_layers": layers}}
    (tmp_path / "run.json").write_text(json.dumps({"model": model}))
    ran = slipstream("memory", tmp_path / "run.json", "--devices", "1", *options)
    if options[1] == "9" * 5000:  # click says it itself
        assert ran.code == 2 and "--length" in ran.output.splitlines()[-1]
        return
    refused(ran, said, help_of("memory"))


@MORE
@pytest.mark.parametrize("text", ["[" * 100_000, f'{{"vocab_size": {"9" * 5000}}}'], ids=["brackets", "digits"])
def test_a_config_of_a_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    model = {"name": "transformer", "arguments": {"config": str(tmp_path / "config.json")}}
    (tmp_path / "run.json").write_text(json.dumps({"model": model}))
    ran = slipstream("memory", tmp_path / "run.json", "--length", "16", "--devices", "1")
    refused(ran, f"{tmp_path / 'config.json'} cannot be read as JSON", help_of("memory"))


def zeros_in_archive(path: Path, name: str) -> None:
    """Write an archive of 4 MiB that holds a file of 4 GiB of zeros."""
    member = tarfile.TarInfo(name)
    member.size = 4 << 30
    with path.open("wb") as file:
        file.write(gzip.compress(member.tobuf(tarfile.GNU_FORMAT)))
        piece = gzip.compress(bytes(64 << 20), compresslevel=1)
        for _ in range(64):
            file.write(piece)


@pytest.mark.parametrize("name", ["a_1.pb", pytest.param("script_mode", marks=MORE)])
def test_an_archive_of_zeros(tmp_path: Path, name: str) -> None:
    zeros_in_archive(tmp_path / "package.tgz", name)
    assert (tmp_path / "package.tgz").stat().st_size < 64 << 20
    refused(slipstream("doctor", tmp_path / "package.tgz"), "holds a file of 4294967296 bytes", help_of("doctor"))


@MORE
@pytest.mark.parametrize(("text", "said"), [(DIGITS, MANY_DIGITS), (BRACKETS, DEEP)], ids=["digits", "brackets"])
def test_limits_of_the_platform(tmp_path: Path, text: str, said: str) -> None:
    small_package(tmp_path / "package.tar")
    (tmp_path / "limits.toml").write_text(text)
    ran = slipstream("doctor", tmp_path / "package.tar", "--limits", tmp_path / "limits.toml")
    refused(ran, said, help_of("doctor"))
