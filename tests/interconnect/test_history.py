"""Profiles by fingerprint, published atomically: damaged ones and those of other hardware are named and skipped."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.history import ProfileHistory
from slipstream.shared.interconnect.profile import FILE
from tests.support.faulty_s3 import FaultyS3
from tests.support.network_profiles import network_profile, publish
from tests.support.wording import refuses

PROFILE = network_profile()


def history(root: Path) -> ProfileHistory:
    return ProfileHistory(str(root), PROFILE.fingerprint)


def test_profiles_come_back_the_oldest_first_and_only_their_own(tmp_path: Path) -> None:
    assert history(tmp_path).latest() is None and history(tmp_path).profiles() == []
    kept = [replace(PROFILE, measured_at=PROFILE.measured_at + day * 86400) for day in (2, 0, 1)]
    for profile in kept:
        publish(tmp_path, profile)
    other = replace(PROFILE, fingerprint=replace(PROFILE.fingerprint, world=64))
    publish(tmp_path, other)
    assert history(tmp_path).profiles() == [kept[1], kept[2], kept[0]]
    assert history(tmp_path).latest() == kept[0]
    course = history(tmp_path).course(most=2)
    assert [point.measured_at for point in course] == [kept[2].measured_at, kept[0].measured_at]
    largest = PROFILE.of("all_reduce")[-1]
    assert course[0].busbw == largest.busbw() and course[0].bytes == largest.bytes
    assert course[0].low is not None and course[0].high is not None
    assert course[0].low < course[0].busbw < course[0].high


def test_without_its_manifest_a_profile_is_none(tmp_path: Path) -> None:
    place = Path(publish(tmp_path, PROFILE))
    (place / MANIFEST).unlink()
    assert history(tmp_path).names() == [] and history(tmp_path).latest() is None


def test_a_damaged_one_is_named_and_the_one_before_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    publish(tmp_path, PROFILE)
    place = Path(publish(tmp_path, replace(PROFILE, measured_at=PROFILE.measured_at + 9)))
    data = bytearray((place / FILE).read_bytes())
    data[300] ^= 1
    (place / FILE).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert history(tmp_path).latest() == PROFILE
    assert "skipped: " in caplog.text and FILE in caplog.text


def test_one_of_other_hardware_in_its_place_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = replace(PROFILE, fingerprint=replace(PROFILE.fingerprint, driver="another"))
    place = Path(publish(tmp_path, other))
    mine = Path(history(tmp_path).address)
    mine.mkdir()
    place.rename(mine / place.name)
    with caplog.at_level(logging.WARNING):
        assert history(tmp_path).latest() is None
    assert "a profile of other hardware, versions or world" in caplog.text


def test_a_history_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refuses(UserError, match="file/[0-9a-f]{16}:"):
        history(tmp_path / "file").check_writable()
    history(tmp_path / "fresh").check_writable()
    assert history(tmp_path / "fresh").names() == []


@pytest.mark.prove
def test_a_history_may_be_a_prefix_of_a_store(store: FaultyS3) -> None:
    there = ProfileHistory("s3://bucket/networks", PROFILE.fingerprint)
    there.check_writable()
    older = replace(PROFILE, measured_at=PROFILE.measured_at - 86400)
    addresses = [publish("s3://bucket/networks", profile) for profile in (PROFILE, older)]
    assert all(address.startswith(f"s3://bucket/networks/{PROFILE.fingerprint.digest}/") for address in addresses)
    assert there.latest() == PROFILE and there.profiles() == [older, PROFILE]
    # The manifest comes last: a profile whose writer was lost before is none.
    store.plan = [("PUT", "pass"), *[("PUT", "403")] * 20]
    with pytest.raises(UserError):
        publish("s3://bucket/networks", replace(PROFILE, measured_at=PROFILE.measured_at + 9))
    store.plan = []
    assert there.latest() == PROFILE
