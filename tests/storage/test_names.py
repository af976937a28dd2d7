"""Any name leads to a path below its directory, or is refused in one line."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.shared.artifacts.format import ArtifactWriter, hash_file
from slipstream.shared.errors import UserError
from slipstream.shared.storage import Storage, download_all, list_names, path_below, storage_for
from slipstream.shared.storage.names import LONGEST, LONGEST_PART, name_fault
from tests.support.faulty_s3 import FaultyS3
from tests.support.hostile_names import HOSTILE, NAMES, MemoryBucket, anchored, memory, outside, target_among_others
from tests.support.proving import first_few
from tests.support.wording import refuses, same_wording

__all__ = ["memory"]
#: Fixtures that hold nothing between the examples.
SHARED = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
GOOD = (
    "a",
    "a/b.json",
    "..a/b..",
    "a.b",
    "-",
    " ",
    "été/Ж/数",
    "a b",
    "a~b",
    "ab:c",
    "a/~b",
    "x" * LONGEST_PART,
    "...",
)


def in_one_line(error: UserError) -> bool:
    return error.message.isprintable() and "expected" in error.message and len(error.message) < 500


@pytest.mark.parametrize("name", HOSTILE)
def test_names_of_attacks_are_refused(name: str, tmp_path: Path) -> None:
    with refuses(UserError) as refused:
        path_below(tmp_path, name, "s3://bucket/address")
    assert in_one_line(refused.value)


@pytest.mark.parametrize("name", GOOD)
def test_ordinary_names_are_not(name: str, tmp_path: Path) -> None:
    assert path_below(tmp_path, name) == tmp_path / name and name_fault("x/" * 511 + "yy") == ""
    same_wording(name_fault("x/" * (LONGEST // 2) + "y"))


WRITES: dict[str, Callable[[Path, str, Path], object]] = {
    "put": lambda target, name, file: storage_for(str(target)).put(name, b"x"),
    "put a file": lambda target, name, file: storage_for(str(target)).put(name, file),
    "put once": lambda target, name, file: storage_for(str(target)).create(name, b"x"),
    "delete": lambda target, name, file: storage_for(str(target)).delete([name]),
    "list": lambda target, name, file: storage_for(str(target)).list(f"{name}/"),
    "create": lambda target, name, file: ArtifactWriter(target).write_bytes(name, b"x"),
    "link": lambda target, name, file: ArtifactWriter(target).link(file, name, hash_file(file)),
    "note": lambda target, name, file: ArtifactWriter(target).note(name, hash_file(file)),
    "add": lambda target, name, file: ArtifactWriter(target).add(name),
}


@pytest.mark.parametrize("way", first_few(WRITES, 3))
@given(name=NAMES)
@SHARED
def test_nothing_outside_of_the_directory_is_touched(way: str, name: str) -> None:
    with target_among_others() as (place, target):
        file = target / ".source"
        file.write_text("of ours")
        before = outside(place, target)
        for given_name in (anchored(name, place), f"{place}/{name}"):
            try:
                WRITES[way](target, given_name, file)
            except UserError as refused:
                assert in_one_line(refused) or name_fault(given_name) == ""
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                assert name_fault(given_name) == "", "a name that is refused is refused as such"
            else:
                assert name_fault(given_name) == "" or (way == "list" and not given_name)
                assert (target / given_name).resolve().is_relative_to(target.resolve())
            assert outside(place, target) == before
            file.write_text("of ours")


@given(names=st.lists(NAMES, min_size=1, max_size=4))
@SHARED
def test_a_listing_is_fetched_as_a_whole_or_not_at_all(memory: MemoryBucket, names: list[str]) -> None:
    fetch_listing(memory, names)


@pytest.mark.prove
@given(names=st.lists(NAMES, min_size=1, max_size=8))
@settings(SHARED, max_examples=20_000)
def test_so_is_any_other_listing(memory: MemoryBucket, names: list[str]) -> None:
    fetch_listing(memory, names)


def fetch_listing(memory: MemoryBucket, names: list[str]) -> None:
    with target_among_others() as (place, target):
        memory.objects = {f"base/{anchored(name, place)}": b"x" for name in ("good", *names)}
        before = outside(place, target)
        # Below a key there is no directory on a disk.
        listed = [key.removeprefix("base/") for key in memory.objects if not key.endswith("/")]
        try:
            download_all("gs://bucket/base", target)
        except UserError as refused:
            assert in_one_line(refused) and "gs://bucket/base: " in refused.message
            assert any(map(name_fault, listed)) and not list(target.rglob("*"))
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            assert any(one.startswith(f"{other}/") for one in listed for other in listed)
        else:
            assert {path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()} == {*listed}
        assert outside(place, target) == before


@pytest.mark.parametrize("name", [name for name in HOSTILE if name])
def test_every_method_of_every_store_refuses(name: str, memory: MemoryBucket, tmp_path: Path) -> None:
    """S3 without a store: it is refused before anything is asked."""
    for storage in (storage_for(str(tmp_path / "base")), storage_for("gs://bucket/base"), storage_for("s3://b/base")):
        for work in (
            lambda storage: storage.put(name, b"x"),
            lambda storage: storage.get(name, tmp_path / "to"),
            lambda storage: storage.delete(["good", name]),
            lambda storage: storage.list(f"{name}/b"),
        ):
            with refuses(UserError):
                work(storage)
    assert not memory.objects and not (tmp_path / "to").exists() and not (tmp_path / "evil").exists()


def test_a_listing_with_one_bad_key_is_refused(memory: MemoryBucket) -> None:
    memory.objects = {"base/good": b"", "base/directory/": b"", "base/../evil": b""}
    for listing in (storage_for("gs://bucket/base").list, lambda: list_names("gs://bucket/base")):
        with refuses(UserError):
            listing()
    del memory.objects["base/../evil"]
    assert storage_for("gs://bucket/base").list() == ["good"] == list(list_names("gs://bucket/base"))


def test_s3_lists_no_key_that_leads_elsewhere(store: FaultyS3, tmp_path: Path) -> None:
    from slipstream.shared.storage import s3

    base = f"s3://bucket/{tmp_path.name}"
    for key in ("good", "a/~b", "a\\..\\..\\evil"):
        s3.client().put_object(Bucket="bucket", Key=f"{tmp_path.name}/{key}", Body=b"x")
    for work in (storage_for(base).list, lambda: download_all(base, tmp_path / "to")):
        with refuses(UserError):
            work()
    assert not (tmp_path / "to").exists()


@pytest.fixture(params=["gs://bucket/base", "local"])
def storage(request: pytest.FixtureRequest, memory: MemoryBucket, tmp_path: Path) -> Storage:
    return storage_for(str(tmp_path / "base") if request.param == "local" else request.param)


def test_a_link_in_the_directory_is_not_followed(storage: Storage, tmp_path: Path) -> None:
    """A store's file goes where it is asked for, not where somebody else lets a name there lead."""
    others, target = tmp_path / "others", tmp_path / "target"
    others.mkdir()
    (others / "file").write_text("of others")
    storage.put("sub/file", b"new")
    storage.put("file", b"new")
    place = tmp_path / "base" if storage.base.startswith("/") else target
    place.mkdir(exist_ok=True)
    (place / "link").symlink_to(others)
    (place / "file-link").symlink_to(others / "file")
    for name in ("link/file", "file-link"):
        if place == target:
            storage.put(name, b"evil")
        with refuses(UserError):
            storage.get(name, target)
    if place != target:
        for work in (lambda: storage.put("link/file", b"evil"), lambda: storage.delete(["link/file"])):
            with refuses(UserError):
                work()
    assert (others / "file").read_text() == "of others" and [path.name for path in others.iterdir()] == ["file"]
    assert storage.get("sub/file", target).read_bytes() == b"new"
