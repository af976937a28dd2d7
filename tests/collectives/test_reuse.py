"""Which profile of the history is taken instead of measuring: a young one, measured with the same settings."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from slipstream.collectives.config import CollectivesConfig
from slipstream.collectives.engine import find_profile
from slipstream.interconnect.history import ProfileHistory
from slipstream.interconnect.profile import NetworkProfile
from tests.support.network_profiles import network_profile

DAY = 86_400


def taken(config: CollectivesConfig, *, reuse: bool = True) -> list[NetworkProfile]:
    """What is found for a group that would be measured with ``config``."""
    found: list[NetworkProfile] = []
    empty = replace(network_profile(), measurements=(), settings=config.measuring)
    assert find_profile(empty, config, found, reuse=reuse) == bool(found)
    return found


def test_the_youngest_of_the_same_settings_unless_it_is_too_old(tmp_path: Path) -> None:
    config = CollectivesConfig(history=str(tmp_path), largest=1 << 20)
    assert taken(config) == []
    kept = network_profile(measured_at=time.time() - 3 * DAY)
    kept = replace(kept, settings=config.measuring)
    ProfileHistory(str(tmp_path), kept.fingerprint).publish(kept, {})
    assert taken(config) == [kept]
    # Where a profile is kept and for how long it is believed says nothing of what it holds.
    assert taken(replace(config, timeout=5.0, reuse_days=4)) == [kept]
    assert taken(replace(config, reuse_days=2)) == []
    assert taken(replace(config, reuse_days=0)) == []
    assert taken(replace(config, largest=1 << 21)) == []
    assert taken(config, reuse=False) == []


def test_one_of_other_hardware_is_not_taken(tmp_path: Path) -> None:
    config = CollectivesConfig(history=str(tmp_path))
    other = network_profile(4, measured_at=time.time())
    other = replace(other, settings=config.measuring)
    ProfileHistory(str(tmp_path), other.fingerprint).publish(other, {})
    assert taken(config) == []
