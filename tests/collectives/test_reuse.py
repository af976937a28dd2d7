"""Reuse of measured profiles: recent ones with the same settings."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.engine import take_earlier
from slipstream.pipeline.collectives.launch.measurements import inspect_group
from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.interconnect.fingerprint import fingerprint_on_cpu
from slipstream.shared.interconnect.profile import COURSE, FILE, NetworkProfile, read_profile
from tests.support.network_profiles import network_profile, publish
from tests.support.worker_groups import in_group

DAY = 86_400


def taken(config: CollectivesConfig, scratch: Path) -> NetworkProfile | None:
    """What is found for the group of :func:`network_profile` if it would be measured with ``config``."""
    directory = scratch / str(time.monotonic_ns())
    found = take_earlier(network_profile().fingerprint, config, directory)
    assert found == directory.exists()
    return read_profile(directory) if found else None


def test_the_youngest_of_the_same_settings_unless_it_is_too_old(tmp_path: Path) -> None:
    config = CollectivesConfig(history=str(tmp_path / "history"), largest=1 << 20)
    assert taken(config, tmp_path) is None
    kept = replace(network_profile(measured_at=time.time() - 3 * DAY), settings=config.measuring)
    publish(config.history, kept)
    assert taken(config, tmp_path) == kept
    # Where a profile is kept and for how long it is believed says nothing of what it holds.
    assert taken(replace(config, timeout=5.0, reuse_days=4), tmp_path) == kept
    assert taken(replace(config, reuse_days=2), tmp_path) is None
    assert taken(replace(config, reuse_days=0), tmp_path) is None
    assert taken(replace(config, largest=1 << 21), tmp_path) is None


def test_one_of_other_hardware_is_not_taken(tmp_path: Path) -> None:
    config = CollectivesConfig(history=str(tmp_path / "history"))
    publish(config.history, replace(network_profile(4, measured_at=time.time()), settings=config.measuring))
    assert taken(config, tmp_path) is None


def test_what_is_taken_is_what_was_published_and_a_damaged_one_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = CollectivesConfig(history=str(tmp_path / "history"))
    older, newer = (
        replace(network_profile(measured_at=time.time() - age), settings=config.measuring) for age in (DAY, 0)
    )
    addresses = [Path(publish(config.history, profile)) for profile in (older, newer)]
    assert take_earlier(newer.fingerprint, config, tmp_path / "a")
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == {
        file.name: file.read_bytes() for file in addresses[1].iterdir()
    }
    assert {FILE, COURSE, MANIFEST} < {file.name for file in addresses[1].iterdir()}
    (addresses[1] / COURSE).write_text("[]")
    assert taken(config, tmp_path) == older
    assert f"{COURSE}" in caplog.text


def test_the_fingerprint_of_a_group_on_this_cpu_is_known_without_it() -> None:
    found: NetworkProfile = in_group(3, inspect_group, CollectivesConfig())
    assert fingerprint_on_cpu(3) == found.fingerprint != fingerprint_on_cpu(2)
