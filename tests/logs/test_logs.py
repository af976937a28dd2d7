"""One line per message on stderr, from the chosen level on, with any other handlers."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from slipstream.shared import logs

#: As in a pod: Flyte has attached a handler to the root logger before.
MESSAGES = """
import logging
logging.basicConfig(level=logging.DEBUG, format="flyte %(message)s")
from slipstream.shared.logs import logger
log = logger("train")
log.debug("one"); log.info("two of %d", 2); log.warning("three"); log.error("four")
"""


def lines(level: str | None) -> list[str]:
    environment = {name: value for name, value in os.environ.items() if name != logs.VARIABLE}
    if level is not None:
        environment[logs.VARIABLE] = level
    run = subprocess.run([sys.executable, "-c", MESSAGES], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == ""
    return run.stderr.splitlines()


TWO, THREE, FOUR = "train        two of 2", "train        warning: three", "train        error: four"
UNKNOWN = "logs         warning: SLIPSTREAM_LOG=loud: expected debug, info, warning, error; using info"


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (None, [TWO, THREE, FOUR]),
        ("debug", ["train        one", TWO, THREE, FOUR]),
        ("WARNING", [THREE, FOUR]),
        ("loud", [UNKNOWN, TWO, THREE, FOUR]),
    ],
)
def test_each_message_is_one_line_from_the_level_on(level: str | None, expected: list[str]) -> None:
    assert lines(level) == expected


@pytest.fixture
def fresh_handlers() -> Iterator[None]:
    before, level = logs.ROOT.handlers, logs.ROOT.level
    yield
    logs.ROOT.handlers = before
    logs.ROOT.setLevel(level)


def test_stderr_is_looked_up_at_each_message(fresh_handlers: None, capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging("info")
    logs.logger("store").warning("replaced")
    assert capsys.readouterr().err == "store        warning: replaced\n"
    assert not logging.getLogger("slipstream").propagate
