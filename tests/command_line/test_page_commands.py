"""The commands of the pages, run in a user's directory with files of the names that the pages use."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from slipstream.shared.artifacts.versions import ROOT
from tests.support.bases import make_base
from tests.support.command_line import PYFLYTE, run_process
from tests.support.corpora import story, write_lines, write_stories
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.raw_tables import mixed_frame

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?((?:\.venv/bin/)?(?:slipstream|pyflyte|python) .*)$", re.MULTILINE)
#: Commands that need a cluster, Docker or a registered project.
CLUSTER = re.compile(r"--remote|IMAGE|remote-launchplan|launchplan |kubectl")
#: Commands that other tests run: benchmarks, proofs, rehearsals; and those whose inputs the page leaves to the reader.
ELSEWHERE = re.compile(
    r"benchmarks/|gpu-proof|rehearse|--help|…|llama\.yaml|hugging-face|--model trained|examples/text.yaml$"
)
#: What stands for addresses of the pages.
INSTEAD = {
    r"s3://bucket/llama-3-8b|llama-3-8b/": "base",
    r"s3://bucket/scores": "scores",
    r"s3://bucket/today/": "today.csv",
    r"s3://bucket/churn/": "churn.parquet",
    r"s3://bucket/churn": "registry",
    r"--data churn ": "--data churn.parquet ",
    r"churn\.yaml": "run.yaml",
    r" \[--fetch DIRECTORY\]": " --fetch FETCHED",
    r"--model DIR_OR_URI": "--model RUN",
    r"--data DIR_OR_URI": "--data RUN",
    r"\[--config run.yaml\]": "--config run.yaml",
    r"runs/\d[\w-]*": "RUN",
    r"predict.py models ": "predict.py RUN ",
    r"conversations.jsonl$": "conversations.jsonl --config run.yaml",
    r"--registry models": "--registry registry",
    r"today/": "today.csv",
    r"collectives\.py (compare|tune)": r"collectives.py \1 --config run.yaml",
    r"export --config run.yaml": "export --data churn.csv --target churned --config run.yaml",
    r"--config data.id=customer": "--config data.split.seed=1",
    r"memory run.yaml": "memory run.yaml --data RUN",
    r"check DIRECTORY \[--key public.pem\]": "check DIRECTORY",
    r"\[--name churn\]": "--name churn",
    r"DIRECTORY REPOSITORY": "DIRECTORY repository",
    r"DIRECTORY": "RUN/model",
    r"s3://bucket/data --free": "checkpoints --free",
}
TRAINING = "pyflyte run workflows/training.py "


def page_commands() -> list[str]:
    """Return the commands of all pages that one machine can run, without comments, trainings first."""
    found: dict[str, None] = {}
    for page in PAGES:
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            for line in COMMAND.findall(re.sub(r"\\\n\s*", " ", block)):
                command = re.sub(r"\s+#.*| && .*", "", line).removeprefix(".venv/bin/")
                for pattern, replacement in INSTEAD.items():
                    command = re.sub(pattern, replacement, command)
                if not CLUSTER.search(line) and not ELSEWHERE.search(command):
                    found[" ".join(command.split())] = None
    return sorted(
        found,
        key=lambda command: (not command.startswith(TRAINING + "train_and_"), "score" in command, "sign" in command),
    )


def write_inputs(place: Path) -> None:
    frame = mixed_frame(1500, "classification").rename(columns={"y": "churned"})
    frame.to_parquet(place / "churn.parquet")
    frame.to_csv(place / "churn.csv", index=False)
    frame.drop(columns="income").rename(columns={"churned": "income"}).to_csv(place / "adult-test.csv", index=False)
    for name in ("today.csv", "rows.csv"):
        mixed_frame(50, "classification", seed=5).drop(columns="y").to_csv(place / name, index=False)
    make_base(place / "base", max_position_embeddings=512)
    write_lines(place / "conversations.jsonl", [{"text": story(number)} for number in range(80)])
    write_stories(place / "corpus")
    (place / "checkpoints").mkdir()
    key = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (place / "private.pem").write_bytes(key)
    times = pd.date_range("2026-11-01", periods=2 * 1440, freq="min")
    counts = np.random.default_rng(0).poisson(600, len(times))
    pd.DataFrame({"time": times, "requests": counts}).to_csv(place / "requests.csv", index=False)
    settings = {
        "training": {"epochs": 2},
        "export": EXPORT,
        "collectives": {**NETWORK, "tune_seconds": 20, "compare_seconds": 5},
        "compression": {"epochs": 1, "students": [{"hidden": [8]}]},
        "sweep": {"trials": 2, "space": {"training.learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}}},
    }
    (place / "run.yaml").write_text(yaml.safe_dump(settings))


def test_commands_are_found_on_many_pages() -> None:
    commands = page_commands()
    assert len(commands) >= 20 and commands[0].startswith(TRAINING + "train_and_")
    assert {"slipstream", "pyflyte", "python"} == {command.split()[0] for command in commands}


@pytest.mark.prove
def test_the_commands_of_the_pages_run(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    failed = []
    for number, command in enumerate(page_commands()):
        tables = [path for path in (tmp_path / "runs").glob("2*-churn*") if (path / "model").exists()]
        run = f"runs/{min(tables).name}" if tables else "RUN"
        words = shlex.split(command.replace("RUN", run).replace("FETCHED", f"fetched-{number}"))
        program: dict[str, list[str | Path]] = {
            "pyflyte": [PYFLYTE],
            "slipstream": [sys.executable, "-m", "slipstream"],
            "python": [sys.executable],
        }
        own = [ROOT / word if re.match("(workflows|examples)/", word) else word for word in words[1:]]
        where = ROOT if words[1:] == ["schedules"] else tmp_path
        ended = run_process([*program[words[0]], *own], where, {"PYTHONPATH": str(ROOT)})
        if ended.returncode:
            failed.append(f"{command}\n{ended.stdout[-1500:]}")
    assert not failed, "\n\n".join(failed)
