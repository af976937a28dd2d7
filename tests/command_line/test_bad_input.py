"""User errors end in one message and exit code 1 or 2, without a traceback or partial output."""

import json
import re
import sys
from pathlib import Path

import pytest

from tests.support import REPOSITORY
from tests.support.command_line import Run, one_message, run_process, start_in
from tests.support.proving import first_few

GOOD = "".join(f"{i % 7},{(i * 37) % 101},{'yes' if i % 3 else 'no'}\n" for i in range(120))


def csv(name: str, text: str | bytes) -> tuple[str, bytes]:
    return name, text if isinstance(text, bytes) else text.encode()


HEADER = "a,b,y\n"
CASES: dict[str, tuple[tuple[str, bytes] | None, list[str], str]] = {
    # what is on disk, the arguments, what the message says
    "missing file": (None, ["--data", "absent.csv", "--target", "y"], r"absent\.csv.*does not exist"),
    "no target given": (csv("t.csv", HEADER + GOOD), ["--data", "t.csv"], r"--target"),
    "target absent": (csv("t.csv", HEADER + GOOD), ["--data", "t.csv", "--target", "yy"], r"yy.*y"),
    "only a target": (
        csv("t.csv", "y,\n" + "0,\n1,\n" * 60),
        ["--data", "t.csv", "--target", "y"],
        r"no column can be used.*unnamed_2.*no value",
    ),
    "ragged rows": (
        csv("t.csv", HEADER + GOOD + "1,2\n1,2,3,4\n" * 10),
        ["--data", "t.csv", "--target", "y"],
        r"20 of 140.*quarantine",
    ),
    "unknown setting": (None, ["--config", '{"training": {"epoch": 3}}'], r"training\.epoch.*epochs"),
    "a wrong value after a file": (
        ("run.yaml", b"training:\n  epochs: 2\nexport:\n  half: maybe\n"),
        ["--config", "run.yaml", "--config", "export.half=false", "--config", "training.warmup=2"],
        r"training\.warmup: 2 is not allowed",
    ),
    "wrong type": (None, ["--config", '{"training": {"epochs": "many"}}'], r"training\.epochs.*many.*integer"),
    "impossible value": (None, ["--config", '{"training": {"epochs": 0}}'], r"training\.epochs.*0.*at least 1"),
    "a model of images for a table": (
        csv("t.csv", HEADER + GOOD),
        ["--data", "t.csv", "--target", "y", "--config", '{"model": {"name": "resnet"}}'],
        r'model\.name: "resnet" is not allowed; expected auto or mlp: resnet takes images, and these data are tables',
    ),
    "a model of tables for images": (
        None,
        ["--config", '{"model": {"name": "mlp"}}'],
        r'model\.name: "mlp" is not allowed; expected auto or resnet: mlp takes tables, and these data are images',
    ),
    "a model of tables for text": (
        csv("t.txt", "some words\n" * 50),
        ["--data", "t.txt", "--config", '{"model": {"name": "mlp"}, "data": {"task": "language"}}'],
        r'model\.name: "mlp" is not allowed; expected auto or transformer',
    ),
    "a table's model too large for ONNX": (
        csv("t.csv", HEADER + GOOD),
        ["--data", "t.csv", "--target", "y", "--config", '{"export": {"most_parameters": 30000}}'],
        r"export\.most_parameters: 30,000 is too small for mlp, which has at least [\d,]+ parameters",
    ),
    "an images' model too large for ONNX": (
        None,
        ["--config", '{"export": {"most_parameters": 300}, "model": {"arguments": {"widths": [8, 16]}}}'],
        r"export\.most_parameters: 300 is too small for resnet, which has at least [\d,]+",
    ),
    "a factory's model larger than ONNX": (
        csv("t.csv", HEADER + GOOD),
        [
            *("--data", "t.csv", "--target", "y", "--config"),
            '{"export": {"most_parameters": 5}, "model": {"name": "tests.support.nets:batch_norm"}}',
        ],
        r"export\.most_parameters: 5 is too small for tests\.support\.nets:batch_norm, which has \d+ parameters",
    ),
    "an argument that the images' model does not have, without an export": (
        None,
        ["--config", '{"model": {"arguments": {"hidden": [8]}}, "compression": {"method": "prune"}}'],
        r"model\.arguments\.hidden: .* of mlp, which takes tables; expected one of resnet: depth, norm, widths",
    ),
    "an argument that the smaller model does not have": (
        None,
        ["--config", '{"compression": {"method": "distil", "students": [{"width": [8]}]}}'],
        r"compression\.students: model\.arguments\.width: unknown setting; did you mean 'widths'\?",
    ),
    "an argument that the language's model does not have": (
        csv("t.txt", "some words\n" * 50),
        ["--data", "t.txt", "--config", '{"data": {"task": "language"}, "model": {"arguments": {"hidden": 8}}}'],
        r"model\.arguments\.hidden: unknown setting; .*hidden_size",
    ),
    "an argument that the user's model does not have": (
        csv("t.csv", HEADER + GOOD),
        [
            *("--data", "t.csv", "--target", "y", "--config"),
            '{"model": {"name": "tests.support.nets:batch_norm", "arguments": {"width": 8}}}',
        ],
        r"model\.arguments\.width: unknown setting",
    ),
    "a search of a setting that there is not": (
        None,
        ["--config", '{"sweep": {"space": {"training.epoch": {"low": 1, "high": 3}}}}'],
        r"sweep\.space: training\.epoch: unknown setting; did you mean 'epochs'\?",
    ),
    "a search of an argument that there is not": (
        None,
        ["--config", '{"sweep": {"space": {"model.arguments.hidden": {"low": 8, "high": 16}}}}'],
        r"sweep\.space: model\.arguments\.hidden: unknown setting",
    ),
    "a type that there is not": (
        None,
        ["--config", '{"data": {"types": {"zip": "zipcode"}}}'],
        r"data\.types\.zip.*zipcode.*one of.*category",
    ),
    "a declared column that is not there": (
        csv("t.csv", HEADER + GOOD),
        ["--data", "t.csv", "--target", "y", "--config", '{"data": {"types": {"c": "text"}}}'],
        r"data\.types.*no column 'c'",
    ),
    "a negative weight in every row": (
        csv("t.csv", HEADER + re.sub(r"(?m)^(\d)", r"-1\1", GOOD)),
        ["--data", "t.csv", "--target", "y", "--config", '{"data": {"weight": "a"}}'],
        r"all 120 rows were quarantined.*line 2: the weight is negative in column 'a' \('-10'\)",
    ),
    "an image in no class folder": (("t.png", b"PNG"), ["--data", "t.png"], r"t\.png: is not in a class folder"),
    "arrays that are no arrays": (("t.npz", b"PK"), ["--data", "t.npz"], r"t\.npz: not a complete \.npz file"),
    "YAML that is none": (
        ("run.yaml", b"training:\n  epochs: [1\nmodel: {}\n"),
        ["--config", "run.yaml"],
        r"run\.yaml, line 3, column 6: not valid YAML: expected ',' or ']'",
    ),
    "JSON that is none": (
        ("run.json", b'{"training": {\n"epochs": 1,}}'),
        ["--config", "run.json"],
        r"run\.json, line 2, column 13: not valid JSON",
    ),
    "JSON that is none, inline": (None, ["--config", '{"training":'], r"configuration is not valid JSON.*column 12"),
    "a configuration that is not there": (
        None,
        ["--config", "absent.yaml"],
        r"absent\.yaml: no such file; expected a YAML",
    ),
    "a configuration that is a directory": (None, ["--config", "."], r"\.: cannot be read: .*Is a directory"),
    "no such factory": (
        csv("t.csv", HEADER + GOOD),
        ["--data", "t.csv", "--target", "y", "--config", '{"model": {"name": "mine.nets:build"}}'],
        r"model\.name.*mine",
    ),
}


@pytest.mark.parametrize("case", first_few(CASES, 12))
def test_bad_input_gets_one_message(case: str, pyflyte_run: Run, tmp_path: Path) -> None:
    file, arguments, expected = CASES[case]
    if file is not None:
        (tmp_path / file[0]).write_bytes(file[1])
    refused = pyflyte_run(*arguments)
    assert refused.returncode in (1, 2), refused.stdout
    assert re.search(expected, one_message(refused.stdout), re.S), refused.stdout
    assert not list(tmp_path.glob("runs/*")) and not list(tmp_path.glob("runs/.*"))
    assert not list(tmp_path.glob(".slipstream/*/.*")), "a workspace was left behind"


EARLY = [
    case for case in CASES if re.match("a model of|an argument|a search|no such factory", case) or "too large" in case
]


@pytest.mark.parametrize("case", EARLY)
def test_what_the_settings_and_the_kind_of_data_show_is_said_before_the_data_are_prepared(
    case: str, pyflyte_run: Run, tmp_path: Path
) -> None:
    file, arguments, _ = CASES[case]
    if file is not None:
        (tmp_path / file[0]).write_bytes(file[1])
    assert pyflyte_run(*arguments).returncode == 1
    assert not (tmp_path / ".slipstream").exists()


REQUIRED = [
    ("training", "train_and_promote", [], "--registry"),
    ("training", "export_model", ["--model", "trained"], "--data"),
    ("training", "prune", [], "--model"),
    ("training", "fine_tune", [], "--base"),
]


@pytest.mark.parametrize(("file", "workflow", "given", "missing"), REQUIRED)
def test_an_option_that_is_missing_is_named(
    file: str, workflow: str, given: list[str], missing: str, pyflyte_run: Run, tmp_path: Path
) -> None:
    refused = pyflyte_run(*given, file=file, workflow=workflow)
    assert refused.returncode == 1 and f"{missing}: is missing; expected a value" in one_message(refused.stdout)
    assert not list(tmp_path.iterdir())


@pytest.mark.prove
def test_workflows_start_where_text_is_ascii_by_default(tmp_path: Path) -> None:
    """flytekit's own help has other characters, hence stdout has an encoding."""
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "utf-8"}
    code = "import locale; print(locale.getpreferredencoding(False))\n"
    code += "import workflows.training, workflows.scoring, workflows.sweep"
    started = run_process([sys.executable, "-c", code], tmp_path, {**variables, "PYTHONPATH": str(REPOSITORY)})
    assert started.returncode == 0 and started.stdout.splitlines()[0] in ("ANSI_X3.4-1968", "US-ASCII"), started.stdout


@pytest.mark.prove
def test_a_process_of_its_own_says_the_same(pyflyte_run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(HEADER + GOOD)
    arguments = ("--data", "t.csv", "--target", "yy")
    process, here = start_in(tmp_path, *arguments), pyflyte_run(*arguments)
    assert (process.returncode, process.stdout) == (here.returncode, here.stdout)
    assert here.returncode == 1 and "'yy'" in one_message(here.stdout)


@pytest.mark.prove
def test_a_factory_that_raises_is_refused_by_all_workers_and_said_once(pyflyte_run: Run, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import os\n"
        "def build(signature):\n"
        "    open(f'rank{os.environ[\"RANK\"]}', 'w').close()\n"
        "    raise RuntimeError('no weights today')\n"
    )
    result = pyflyte_run("--config", json.dumps({"model": {"name": "nets:build"}}))
    assert result.returncode == 1
    message = one_message(result.stdout)
    assert "model.name" in message and "no weights today" in message
    assert result.stdout.count("no weights today") == 1
    assert (tmp_path / "rank0").exists() and (tmp_path / "rank1").exists(), "the workers did not run"
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.prove
def test_a_mistake_that_one_rank_alone_makes_stops_all(pyflyte_run: Run, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(
        "import os\n"
        "from slipstream.shared.models.tables_and_images import ResNet\n"
        "def build(signature):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        raise RuntimeError('only here')\n"
        "    return ResNet(signature)\n"
    )
    result = pyflyte_run("--config", json.dumps({"model": {"name": "nets:build"}}))
    assert result.returncode == 1 and "only here" in one_message(result.stdout)
