"""The commands ``compare`` and ``tune``, with and without Flyte."""

import json
from pathlib import Path

import pytest
from flytekit.clis.sdk_in_container.pyflyte import main as pyflyte

from slipstream.subcommands import slipstream
from tests.support.command_line import REPOSITORY, Ended, invoke

#: It compares times.
pytestmark = pytest.mark.alone

SMALL = {
    "operations": ["all_reduce"],
    "modes": ["loop"],
    "smallest": 1024,
    "largest": 65536,
    "budget": 0.01,
    "launches": 2,
    "pairs": False,
    "overlap": False,
    "compare_seconds": 1,
    "tune_seconds": 3,
}
WORKFLOW = str(REPOSITORY / "workflows/collectives.py")


def command(directory: Path, *words: str) -> Ended:
    (directory / "run.json").write_text(json.dumps({"collectives": SMALL}))
    return invoke(slipstream, directory, ["collectives", *words, "--config", "run.json"], {})


@pytest.mark.prove
def test_compare_has_nothing_to_say_at_first_and_an_answer_of_three_then(tmp_path: Path) -> None:
    first, second = command(tmp_path, "compare"), command(tmp_path, "compare")
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout
    assert "nothing to compare with: the history has no earlier profile of this hardware" in first.stdout
    answers = [f"{answer}, against 1 earlier profile" for answer in ("slower", "as before", "can't tell")]
    assert sum(answer in second.stdout for answer in answers) == 1
    assert "as before, against" not in second.stdout  # over loopback it can't be known
    assert "  all_reduce of 65536 bytes: " in second.stdout


@pytest.mark.prove
def test_tune_says_what_it_tried(tmp_path: Path) -> None:
    ended = command(tmp_path, "tune", "--json", "tuning.json")
    assert ended.returncode == 0, ended.stdout
    assert "Steps of a synthetic model with 16 MB of gradients between 2 processes over gloo" in ended.stdout
    tuning = json.loads((tmp_path / "tuning.json").read_text())
    assert tuning["ddp"]["hook"] == ""
    assert "fp16 compression hook" in {trial["setting"] for trial in tuning["trials"]}


def test_prepared_data_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    ended = command(tmp_path, "tune", "--prepared", "nowhere")
    assert ended.returncode == 1
    assert [line for line in ended.stdout.splitlines() if "nowhere" in line] == ended.stdout.splitlines()[-1:]
    assert "Traceback" not in ended.stdout


@pytest.mark.prove
def test_the_workflows_compare_and_tune_the_users_model(tmp_path: Path) -> None:
    for _ in range(2):
        compared = invoke(pyflyte, tmp_path, ["run", WORKFLOW, "compare", "--config", json.dumps(SMALL)], {})
        assert compared.returncode == 0, compared.stdout
    assert "against 1 earlier profile of the same hardware" in compared.stdout
    config = json.dumps({"collectives": {**SMALL, "tune_seconds": 15}})
    tuned = invoke(pyflyte, tmp_path, ["run", WORKFLOW, "tune", "--config", config], {})
    assert tuned.returncode == 0, tuned.stdout
    assert "Steps of model auto with 128 rows on each rank between 2 processes over gloo" in tuned.stdout
    assert "fp16 compression hook" in tuned.stdout
    (page,) = tmp_path.glob("runs/*/tuning.html")
    assert f"Report      runs/{page.parent.name}/tuning.html" in tuned.stdout and "<svg" in page.read_text()
