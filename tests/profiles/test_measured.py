"""Measurements are not reused on other hardware; computed results are."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.flyte import metadata, stage
from slipstream.shared.artifacts.versions import version_of
from slipstream.shared.machine import description as machine
from slipstream.shared.profiles.profile import load_profile, profile_names

PROFILE = "[default]\ncpu = '{cpu}'\nretries = {retries}\n[default.environment]\nNCCL_ALGO = '{algorithm}'\n"


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], tuple[str, str]]:
    """The keys of a stage with a profile: in Flyte's cache and in the local store."""

    def keys_with(profile: str, name: str) -> tuple[str, str]:
        monkeypatch.setattr(metadata, "current_profile", lambda: load_profile(profile))
        return metadata.registered_version(name), stage.result_key(name, {"config": 1})

    return keys_with


@pytest.mark.parametrize("measured", ["export", "collectives"])
def test_measured_times_belong_to_their_hardware(
    measured: str, keys: Callable[[str, str], tuple[str, str]], tmp_path: Path
) -> None:
    def with_profile(cpu: int, retries: int, algorithm: str) -> tuple[str, str]:
        (tmp_path / "mine.toml").write_text(PROFILE.format(cpu=cpu, retries=retries, algorithm=algorithm))
        return keys(str(tmp_path / "mine.toml"), measured)

    one = with_profile(4, 1, "Ring")
    assert one == with_profile(4, 7, "Ring")
    for other in (with_profile(8, 1, "Ring"), with_profile(4, 1, "Tree")):
        assert other[0] != one[0] and other[1] != one[1]
    assert one[0].startswith(code_and_libraries(measured))


def code_and_libraries(stage_name: str) -> str:
    _, code, libraries = metadata.registered_versions(stage_name)
    return version_of(code, libraries)


def test_every_shipped_profile_measures_its_own_interconnect(keys: Callable[[str, str], tuple[str, str]]) -> None:
    assert len({keys(name, "collectives")[0] for name in profile_names()}) == len(profile_names())


@pytest.mark.parametrize("computed", ["prepare", "evaluate"])
def test_what_is_computed_is_reused(computed: str, keys: Callable[[str, str], tuple[str, str]]) -> None:
    assert keys("local", computed) == keys("a100-spot", computed)
    assert keys("local", computed)[0] == code_and_libraries(computed)


def test_another_machine_measures_anew(
    keys: Callable[[str, str], tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = keys("local", "export")
    monkeypatch.setattr(machine, "usable_cores", lambda: 96)
    there = keys("local", "export")
    assert here[0] == there[0] and here[1] != there[1]
    monkeypatch.setattr(machine, "gpu_names", lambda: ["NVIDIA L4"])
    assert keys("local", "export")[1] not in (here[1], there[1])


def test_the_instruction_set_belongs_to_what_was_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU of the same name whose hypervisor hides VNNI is another machine."""
    keys = {stage.result_key("export", {"config": 1})}
    for flags in (("avx2", "avx512_vnni"), ("avx2",)):
        monkeypatch.setattr(machine, "this_machine", lambda flags=flags: machine.CpuModel("a CPU", "x86_64", flags))
        keys.add(stage.result_key("export", {"config": 1}))
    assert len(keys) == 3
