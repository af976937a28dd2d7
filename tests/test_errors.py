"""Messages are one line that a terminal can show, with any text quoted in them."""

import pickle

import pytest

from slipstream.pipeline.export.package_files import BadPackage
from slipstream.shared.errors import UserError
from tests.support.hostile_names import HOSTILE


@pytest.mark.parametrize("kind", [UserError, BadPackage])
@pytest.mark.parametrize("quoted", [*HOSTILE, "a\tb", "\u202egpj.exe", "\x9b31m", "\ue000"])
def test_nothing_that_a_terminal_obeys_is_left(kind: type[Exception], quoted: str) -> None:
    text = str(kind(f"data.source: '{quoted}' holds\n  no files"))
    assert text.startswith("data.source: '") and text.endswith("' holds no files")
    assert text.isprintable()


def test_what_was_unprintable_can_still_be_read() -> None:
    error = UserError("a\x1b[2Jb\0é\u202e\udce9")
    assert error.message == r"a\x1b[2Jb\x00é\u202e\udce9"
    assert pickle.loads(pickle.dumps(error)).message == error.message
