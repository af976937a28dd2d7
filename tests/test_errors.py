"""Messages are one line that a terminal can show, with any text quoted in them."""

import pickle

import pytest

from slipstream.pipeline.export.package.files import BadPackage
from slipstream.shared.errors import UserError
from slipstream.shared.logs import configure_logging, logger
from tests.support.hostile_names import HOSTILE
from tests.support.limited import limited


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


#: Text with an address, and what is left of it.
ADDRESSES = {
    "data: 'https://alice:s3cret@host/x.csv' is": "data: 'https://host/x.csv' is",
    "postgresql+psycopg2://alice:s3/cr@et@host:5432/db refused": "postgresql+psycopg2://host:5432/db refused",
    "https://s3cret@host/x and http://:s3cret@host": "https://host/x and http://host",
    "s3://key:s3cret@bucket/x": "s3://bucket/x",
    "(https://host/x?X-Amz-Date=1&X-Amz-Signature=s3cret&b=2)": "(https://host/x?X-Amz-Date=1&X-Amz-Signature=…&b=2)",
    "abfs://c@account.dfs.core.windows.net/x?sv=1&sig=s3cret": "abfs://c@account.dfs.core.windows.net/x?sv=1&sig=…",
}
#: Text that is kept.
WITHOUT_SECRETS = (
    "abfs://container@account.dfs.core.windows.net/x.csv: is missing",
    "s3://bucket/a:b@c/part-?.csv, file:///a:b@c and http://host:8080/x?page=2: me@host.org",
    "http://localhost:9000/bucket/a@b.csv and http://[::1]:9000/x@y: are missing",
    "time: 10:30@noon",
)


@pytest.mark.parametrize("text", ADDRESSES)
def test_passwords_in_addresses_reach_no_message_and_no_log(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert UserError(text).message == str(BadPackage(text)) == ADDRESSES[text]
    configure_logging("info")
    logger("report").warning("%s", text)
    said = capsys.readouterr().err
    assert ADDRESSES[text] in said and "s3cret" not in said


@pytest.mark.parametrize("text", WITHOUT_SECRETS)
def test_other_addresses_stay(text: str) -> None:
    assert UserError(text).message == text


def test_a_long_text_of_addresses_takes_little_time() -> None:
    with limited(seconds=2.0):
        UserError("https://a:" * 50_000)
