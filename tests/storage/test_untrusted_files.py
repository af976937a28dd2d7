"""Files of untrusted directories are opened only if they are regular files inside of it, on any path."""

import os
import time
from pathlib import Path

import pytest

from slipstream.shared.errors import UserError
from slipstream.shared.storage import MissingObject, open_below, read_below
from slipstream.shared.untrusted_files import RefusedFile, copy_untrusted, link_or_copy, open_untrusted, read_untrusted
from tests.support.untrusted import SECRET, exchange_at_open, exchanging, make_secret, replace_by_link
from tests.support.wording import refuses, same_wording

MOST = 1 << 20


@pytest.fixture
def given(tmp_path: Path) -> Path:
    """A directory that somebody else made."""
    directory = tmp_path / "given"
    (directory / "sub").mkdir(parents=True)
    (directory / "file").write_text("content")
    (directory / "sub/file").write_text("content")
    return directory


def refusal(directory: Path, name: str) -> str:
    with pytest.raises(RefusedFile) as refused:
        read_untrusted(directory, name, MOST)
    assert str(refused.value).startswith(f"{directory / name}: ") and SECRET not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("target", ["file", "sub/../file", "sub/file"])
def test_a_link_to_a_file_inside_is_followed(target: str, given: Path) -> None:
    (given / "link").symlink_to(target)
    (given / "chain").symlink_to("link")
    (given / "folder").symlink_to("sub")
    (given / "absolute").symlink_to(given.absolute() / target)
    for name in ("link", "chain", "folder/file", "absolute"):
        assert read_untrusted(given, name, MOST) == b"content"


@pytest.mark.parametrize("target", ["{}", "../home/.aws/credentials", "sub/../../home/.aws/credentials", "chain"])
def test_a_link_out_of_the_directory_is_refused(target: str, given: Path, tmp_path: Path) -> None:
    secret = make_secret(tmp_path)
    (given / "chain").symlink_to(secret)
    (given / "link").symlink_to(target.format(secret))
    same_wording(refusal(given, "link"))


def test_a_folder_that_leads_out_is_refused(given: Path, tmp_path: Path) -> None:
    (given / "folder").symlink_to(make_secret(tmp_path).parent)
    assert "outside of" in refusal(given, "folder/credentials")
    (tmp_path / "given-more").mkdir()  # its path begins as the directory's does
    (tmp_path / "given-more/file").write_text(SECRET)
    (given / "more").symlink_to(tmp_path / "given-more")
    assert "outside of" in refusal(given, "more/file")
    with refuses(RefusedFile):
        read_untrusted(given, "../home/.aws/credentials", MOST)


def test_the_named_directory_may_be_a_link(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named").symlink_to(given)
    (given / "link").symlink_to(given / "file")
    monkeypatch.chdir(given)
    for directory in (tmp_path / "named", tmp_path / "named/sub/..", Path()):
        assert read_untrusted(directory, "link", MOST) == b"content"
    (given / "out").symlink_to(make_secret(tmp_path))
    assert "outside of" in refusal(tmp_path / "named", "out")


def test_all_but_regular_files_are_refused_at_once(given: Path) -> None:
    os.mkfifo(given / "pipe")
    (given / "zero").symlink_to("/dev/zero")
    (given / "terminal").symlink_to("/dev/tty")
    (given / "round").symlink_to("round")
    (given / "nothing").symlink_to("absent")
    began = time.monotonic()
    for name in ("pipe", "zero", "sub"):
        same_wording(refusal(given, name))
    for name in ("terminal", "round", "nothing"):
        assert "expected" in refusal(given, name)
    assert time.monotonic() - began < 10


def test_what_is_absent_is_missing(given: Path) -> None:
    for directory, name in ((given, "absent"), (given, "absent/file"), (given, "file/below"), (given / "no", "file")):
        with pytest.raises(FileNotFoundError):
            open_untrusted(directory, name)
        with refuses(MissingObject):
            open_below(str(directory), name)


def test_no_more_is_read_or_copied_than_is_allowed(given: Path, tmp_path: Path) -> None:
    assert read_untrusted(given, "file", 7) == b"content"
    with refuses(RefusedFile):
        read_untrusted(given, "file", 6)
    with refuses(UserError):
        read_below(str(given), "file", 6)
    copy_untrusted(given, "file", tmp_path / "copy", 7)
    assert (tmp_path / "copy").read_bytes() == b"content"
    for number, size in enumerate((6, 8)):
        with refuses(RefusedFile):
            copy_untrusted(given, "file", tmp_path / f"{number}", size)


def test_the_blobs_of_a_snapshot_are_files_of_it(tmp_path: Path) -> None:
    """Hugging Face's client writes blobs there; other files outside of a snapshot are refused."""
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0123", tmp_path / "models--a--b/blobs"
    snapshot.mkdir(parents=True)
    (blobs / "below").mkdir(parents=True)
    (blobs / "f00d").write_text("content")
    (blobs / "below/f00d").write_text("content")
    (blobs / "out").symlink_to(make_secret(tmp_path))
    (tmp_path / "models--a--b/refs").write_text("content")
    (snapshot / "good").symlink_to("../../blobs/f00d")
    (tmp_path / "named").symlink_to(snapshot)
    for directory in (snapshot, tmp_path / "named"):
        assert read_untrusted(directory, "good", MOST) == b"content"
    for name, target in {"deeper": "blobs/below/f00d", "sibling": "refs", "on": "blobs/out"}.items():
        (snapshot / name).symlink_to(f"../../{target}")
        assert "outside of" in refusal(snapshot, name)
    other = tmp_path / "models--a--b/others/0123"
    other.mkdir(parents=True)
    (other / "good").symlink_to("../../blobs/f00d")
    assert "outside of" in refusal(other, "good")


def test_blobs_that_are_a_link_are_none(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b/blobs").symlink_to(make_secret(tmp_path).parent)
    (snapshot / "tokenizer.json").symlink_to("../../blobs/credentials")
    assert "outside of" in refusal(snapshot, "tokenizer.json")


def test_a_hard_link_is_made_to_the_opened_file_alone(given: Path, tmp_path: Path) -> None:
    link_or_copy(given, "file", tmp_path / "hard")
    assert (tmp_path / "hard").samefile(given / "file")
    (given / "link").symlink_to("file")
    link_or_copy(given, "link", tmp_path / "copy")
    assert (tmp_path / "copy").read_text() == "content" and not (tmp_path / "copy").is_symlink()
    replace_by_link(given / "link", make_secret(tmp_path))
    with refuses(RefusedFile):
        link_or_copy(given, "link", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_link_that_is_exchanged_before_the_open(given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged = exchange_at_open(monkeypatch, given / "file", make_secret(tmp_path))
    assert "outside of" in refusal(given, "file") and exchanged == ["file"]


def test_a_file_that_is_exchanged_after_the_open(given: Path, tmp_path: Path) -> None:
    """The descriptor keeps the file that was compared."""
    with open_untrusted(given, "file") as file:
        replace_by_link(given / "file", make_secret(tmp_path))
        assert file.read() == b"content"


def test_a_link_that_another_process_exchanges_all_the_time(given: Path, tmp_path: Path) -> None:
    secret, found = make_secret(tmp_path), set[str]()
    began, reads = time.monotonic(), 0
    with exchanging(given / "file", secret):
        while time.monotonic() - began < 30 and (reads < 300 or len(found) < 2):
            reads += 1
            try:
                assert read_untrusted(given, "file", MOST) == b"content"
                found.add("read")
            except RefusedFile:
                found.add("refused")
    assert found == {"read", "refused"}, "it was exchanged"
