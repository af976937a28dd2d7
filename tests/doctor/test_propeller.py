"""Propeller's limit of failed rounds, read with kubectl from the manifests of Flyte's charts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.doctor.findings import DoctorReport
from slipstream.operations.doctor.kubectl import kubectl
from slipstream.operations.doctor.propeller import check_propeller
from tests.support import fake_kubectl as fake
from tests.support import flyte_charts as flyte
from tests.support.proving import first_few
from tests.support.wording import same_wording

Look = Callable[..., DoctorReport]
BINARY = "deployment flyte/flyte-binary"
CORE = "deployment flyte/flytepropeller"


@pytest.fixture
def look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    def check(
        deployments: Sequence[dict[str, Any]], *config_maps: dict[str, Any], refused: Sequence[str] = ()
    ) -> DoctorReport:
        lists = {"deployments": [fake.operator(), *deployments], "configmaps": list(config_maps)}
        monkeypatch.setenv("PATH", fake.install(tmp_path / "bin", refused, **lists))
        return check_propeller(kubectl)

    return check


def retries(value: object) -> str:
    return f"propeller:\n  max-workflow-retries: {value}\n"


def core_retries(value: object) -> dict[str, Any]:
    return flyte.core_config(f"  max-workflow-retries: {value}\n")


def only(report: DoctorReport) -> str:
    """The one thing that was not checked, of a report that says nothing else."""
    assert not report.findings and not report.checked
    (line,) = report.unchecked
    assert line.startswith("propeller's settings: ") and "\n" not in line
    return line


# The two charts


def test_flyte_binary_sets_nothing_which_is_10(look: Look) -> None:
    report = look([flyte.binary()], flyte.binary_config())
    (finding,) = report.findings
    assert finding.severity == "warning" and finding.where == BINARY
    same_wording(finding.what)
    same_wording(finding.consequence)
    same_wording(finding.fix)
    line = f"propeller's max-workflow-retries, 10, the default, by the ConfigMaps of {BINARY}"
    assert report.checked == (line,) and not report.unchecked


def test_flyte_cores_own_30_is_small(look: Look) -> None:
    report = look([*flyte.core_others(), flyte.core()], core_retries(30))
    (finding,) = report.findings
    assert finding.where == CORE and finding.what == "propeller's max-workflow-retries is 30"
    assert finding.consequence.startswith("failed round 31 ")
    same_wording(finding.fix)
    assert report.checked == (f"propeller's max-workflow-retries, 30 by the ConfigMaps of {CORE}",)
    assert not report.unchecked


def test_flyte_core_without_the_setting_has_flytes_default(look: Look) -> None:
    (finding,) = look([flyte.core()], flyte.core_config("")).findings
    assert "not set" in finding.what


def test_a_config_map_that_is_mounted_as_it_is(look: Look) -> None:
    """As by flyte-core before 1.16, and in Flyte's manifests without Helm."""
    plain = flyte.core()
    plain["spec"]["template"]["spec"]["volumes"] = [
        {"name": "config-volume", "configMap": {"name": "flyte-propeller-config"}}
    ]
    assert look([plain], core_retries(30)).findings[0].where == CORE


def test_the_manager_of_several_propellers_is_one_of_them(look: Look) -> None:
    (finding,) = look([flyte.core(name="flytepropeller-manager")], core_retries(30)).findings
    assert finding.where == "deployment flyte/flytepropeller-manager" and "flyte-core's configmap.core" in finding.fix


@pytest.mark.parametrize("value", [10_000, 100_000, '"100000"', "1e5", "1e+06", -1])
def test_what_is_enough(look: Look, value: object) -> None:
    """-1 is 4294967295 to propeller, and a large number may be written with an exponent or as text."""
    report = look([flyte.binary()], flyte.binary_config(inline=retries(value)))
    assert not report.findings and not report.unchecked and len(report.checked) == 1


@pytest.mark.parametrize(("value", "taken"), [(0, 0), (9_999, 9_999), ('"50"', 50), (2**32, 0), (2**32 + 7, 7)])
def test_what_is_small(look: Look, value: object, taken: int) -> None:
    """Propeller keeps 32 bits of the number."""
    (finding,) = look([flyte.binary()], flyte.binary_config(inline=retries(value))).findings
    assert finding.what == f"propeller's max-workflow-retries is {taken}"
    assert finding.consequence.startswith(f"failed round {taken + 1} ")


# Several files, ConfigMaps and deployments


def test_another_release_in_another_namespace(look: Look) -> None:
    names: dict[str, Any] = {"namespace": "mlops", "name": "night-flyte-binary"}
    elsewhere = flyte.binary_config(inline=retries(5))
    report = look([flyte.binary(**names)], elsewhere, flyte.binary_config(**names, inline=retries(100_000)))
    assert not report.findings
    same_wording(report.checked[0])


@pytest.mark.parametrize(("file", "taken"), [("999-extra-config.yaml", 7), ("050-extra-config.yaml", 20)])
def test_the_file_whose_name_is_last_wins(look: Look, file: str, taken: int) -> None:
    more = flyte.config_map("flyte", "more", {file: retries(7)})
    deployment = flyte.binary(extra=({"configMap": {"name": "more"}},))
    (finding,) = look([deployment], more, flyte.binary_config(inline=retries(20))).findings
    assert finding.what.endswith(f" is {taken}")


def test_of_files_with_one_name_the_later_config_map_wins(look: Look) -> None:
    more = flyte.config_map("flyte", "more", {"100-inline-config.yaml": retries(100_000)})
    deployment = flyte.binary(extra=({"configMap": {"name": "more"}},))
    assert not look([deployment], flyte.binary_config(inline=retries(20)), more).findings


def test_a_later_section_without_the_setting_leaves_it(look: Look) -> None:
    assert "resource_manager.yaml" in (config := core_retries(100_000))["data"]
    assert not look([flyte.core()], config).findings


def test_null_takes_it_back(look: Look) -> None:
    config = flyte.binary_config(core=retries(100_000), inline=retries("null"))
    assert "not set" in look([flyte.binary()], config).findings[0].what


def test_keys_have_no_case(look: Look) -> None:
    inline = "Propeller:\n  Max-Workflow-Retries: 100000\n"
    assert not look([flyte.binary()], flyte.binary_config(inline=inline)).findings


def test_a_file_that_propeller_does_not_read_does_not_count(look: Look) -> None:
    more = flyte.config_map("flyte", "more", {"notes.txt": "a: [", "old.yaml.bak": retries(1)})
    deployment = flyte.binary(extra=({"configMap": {"name": "more"}},))
    report = look([deployment], more, flyte.binary_config(inline=retries(100_000)))
    assert not report.findings and not report.unchecked


def test_each_propeller_is_judged_by_its_own(look: Look) -> None:
    deployments = [flyte.binary(), flyte.binary("other", "flyte"), flyte.core("data"), flyte.core("more")]
    report = look(
        deployments,
        flyte.binary_config(inline=retries(100_000)),
        flyte.binary_config("other", "flyte"),
        flyte.core_config("  max-workflow-retries: 50\n", "data"),
    )
    assert [finding.where for finding in report.findings] == [
        "deployment other/flyte",
        "deployment data/flytepropeller",
    ]
    (line,) = report.unchecked
    same_wording(line)


# What cannot be known


def test_without_permission_to_list_deployments_it_says_so(look: Look) -> None:
    report = look([flyte.binary()], flyte.binary_config(), refused=["deployments"])
    same_wording(only(report))


def test_without_permission_to_get_the_config_map_it_says_so(look: Look) -> None:
    report = look([flyte.binary()], flyte.binary_config(), refused=["configmap"])
    same_wording(only(report))


def test_a_config_map_that_is_not_there(look: Look) -> None:
    extra = ({"configMap": {"name": "gone"}},)
    same_wording(only(look([flyte.binary(extra=extra)], flyte.binary_config())))


def test_a_cluster_without_propeller(look: Look) -> None:
    same_wording(only(look(flyte.core_others())))


def test_a_control_plane_has_no_propeller(look: Look) -> None:
    core = flyte.BINARY_CORE.replace("disableWebhook: false\n    disabled: false", "disabled: true")
    report = look([flyte.binary()], flyte.binary_config(core=core))
    same_wording(only(report))


def test_secrets_are_not_read(look: Look) -> None:
    extra = ({"secret": {"name": "ours"}},)
    report = look([flyte.binary(extra=extra), flyte.core("data", secrets=("store",))], flyte.binary_config())
    assert len(report.findings) == 1
    assert f"propeller's settings: Secret ours of {BINARY} may set more" in report.unchecked


def test_a_configuration_of_secrets_only(look: Look) -> None:
    external = flyte.binary()
    sources = external["spec"]["template"]["spec"]["volumes"][1]["projected"]["sources"]
    sources[:] = [{"secret": {"name": "external"}}]
    same_wording(only(look([external])))


# Odd content


@pytest.mark.parametrize(
    "text",
    first_few(
        [
            "propeller: [",
            "\tpropeller:\n",
            "a: \x00",
            "!!python/object/apply:os.system [echo]",
            "a: !!int ''",
            "a: 2001-99-99",
            "a: !!timestamp soon",
            "a: !!bool perhaps",
            "? {a: b}\n: c",
            f"a: {'[' * 5000}",
            f"a: {'9' * 5000}",
            "a: 1\n---\na: 2\n",
            "- propeller",
            "propeller",
            retries("many"),
            retries(".nan"),
            retries(".inf"),
            retries("[100000]"),
            retries("{a: 1}"),
            retries(f"0x{'f' * 5000}"),
            retries("2020-01-01"),
        ],
        7,
    ),
)
def test_what_no_propeller_reads_is_not_judged(look: Look, text: str) -> None:
    same_wording(only(look([flyte.binary()], flyte.binary_config(inline=text))))


@pytest.mark.parametrize(
    "text",
    [
        "# nothing\n",
        "propeller:\n",
        "propeller: []\n",
        "propeller: off\n",
        "1: 2\n2020-01-01: 3\n",
        f"propeller:\n  ? 0x{'f' * 5000}\n  : 1\n",
        "propeller: &a\n  max-workflow-retries-: 1\n  self: *a\n",
    ],
)
def test_what_says_nothing_of_it_leaves_the_default(look: Look, text: str) -> None:
    (finding,) = look([flyte.binary()], flyte.binary_config(inline=text)).findings
    assert "not set" in finding.what


@pytest.mark.parametrize("data", [None, {}, [], "text", {"000-core.yaml": None}, {"000-core.yaml": 7}])
def test_config_maps_of_odd_shapes(look: Look, data: Any) -> None:
    config = flyte.config_map("flyte", "flyte-binary-config", None) | {"data": data}
    report = look([flyte.binary()], config)
    assert len(report.findings) + len(report.unchecked) == 1


def test_a_container_of_the_same_name_that_is_not_flytes(look: Look) -> None:
    other = flyte.deployment("web", "flyte", {"name": "flyte", "image": "kite"}, [])
    same_wording(only(look([other])))
