"""Every ``--help`` is as in a golden file, which ``STORE=1`` writes."""

import os
import re
import subprocess
import sys
from pathlib import Path

from click import Context, Group
from click.testing import CliRunner

from slipstream.subcommands import SUBCOMMANDS, slipstream
from tests.support import REPOSITORY

GOLDEN = Path(__file__).with_name("help.txt")
#: Prints the help of every file of workflows and of all that it lists.
PYFLYTE = """
import re, sys
from pathlib import Path
from click.testing import CliRunner
from flytekit.clis.sdk_in_container.pyflyte import main

def told(*arguments):
    result = CliRunner().invoke(main, ["run", *arguments, "--help"], prog_name="pyflyte")
    assert result.exit_code == 0, result.output
    print(result.output)
    return result.output

for path in sorted(Path("workflows").glob("*.py")):
    if path.stem != "__init__":
        listed = told(str(path)).partition("Commands")[2]
        for name in re.findall(r"^\\W+([a-z_]+)  ", listed, re.M):
            told(str(path), name)
"""


def of_workflows() -> str:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
    ended = subprocess.run(
        [sys.executable, "-c", PYFLYTE], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True
    )
    return ended.stdout


def of_commands() -> str:
    texts, names = [], [[name] for name in SUBCOMMANDS if name != "check"]
    for name in names:
        command = slipstream.get_command(Context(slipstream), name[0]) if len(name) == 1 else None
        if isinstance(command, Group):
            names += [[*name, below] for below in command.commands]
        texts.append(
            CliRunner().invoke(slipstream, [*name, "--help"], prog_name="slipstream", terminal_width=100).output
        )
    return "\n".join(texts)


def test_every_help_is_as_it_was() -> None:
    told = "\n".join(line.rstrip() for line in (of_workflows() + of_commands()).splitlines()) + "\n"
    if "STORE" in os.environ:
        GOLDEN.write_text(told, encoding="utf-8")
    assert told == GOLDEN.read_text(encoding="utf-8")
    assert told.count("Example: ") >= 20 and '"properties"' not in told
    (training,) = re.findall(
        r"Run a \S+ from workflows/training\.py(.*?)Usage:", told.replace("[workflow|task|launch plan]", "_"), re.S
    )
    assert "train_and_promote" in training and "open_inputs" not in training and "judge" not in training
