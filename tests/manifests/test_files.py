"""The written files: their order, their headers, and the profiles that need them."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from slipstream.operations.manifests.build import MARK, build_manifests
from slipstream.operations.manifests.site import profile_site
from slipstream.operations.plan.command import main as plan
from slipstream.shared.profiles.profile import load_profile
from tests.support.measured_trainings import write_run
from tests.support.proving import first_few
from tests.support.written_manifests import PROFILES, files, objects, of_kind, site, trees


def paths(profile: str) -> list[str]:
    return [file.path for file in files(profile)]


def test_what_does_not_apply_is_not_there() -> None:
    common = {"00-namespaces.yaml", "20-priorities.yaml", "30-kueue.yaml", "40-quota.yaml", "60-triton.yaml"}
    common |= {"instead-of-kueue/volcano.yaml"}
    nvidia = {"10-karpenter.yaml", "helm/gpu-operator.yaml"}
    assert set(paths("a100-spot")) == set(paths("h100-efa-spot")) == common | nvidia
    assert set(paths("a100-mig")) == common | nvidia | {"50-gpu-partitions.yaml"}
    assert set(paths("t4-shared")) == common | nvidia | {"50-gpu-sharing.yaml"}
    assert set(paths("mi300x")) == set(paths("l4-spot")) == common
    assert "60-triton.yaml" not in {file.path for file in build_manifests(site(), None)}


def test_amd_has_nothing_of_nvidias() -> None:
    texts = [file.text.lower() for file in files("mi300x")]
    assert not [text for text in texts if "nvidia.com" in text or "gpu-operator" in text]
    assert any("requests.amd.com/gpu" in text for text in texts)


@pytest.mark.parametrize("profile", first_few(PROFILES, 2))
def test_files_are_in_the_order_in_which_kubectl_applies_them_and_each_says_why(profile: str) -> None:
    applied = [path for path in paths(profile) if "/" not in path]
    assert applied == sorted(applied) == paths(profile)[: len(applied)]
    for file in files(profile):
        head, *documents = file.text.split("---\n")
        assert head.startswith(f'{MARK} for the profile "{profile}": ') and len(documents) == len(list(trees(file)))
        assert all(re.match("# .{10}", document) for document in documents)
    namespaces = {tree["metadata"]["name"] for tree in objects(profile) if tree["kind"] == "Namespace"}
    assert {tree["metadata"]["namespace"] for tree in objects(profile) if "namespace" in tree["metadata"]} <= namespaces


def test_equal_profiles_give_equal_bytes() -> None:
    for file in files("h100-efa-spot"):
        (again,) = (each for each in files("h100-efa-spot", cluster="mine") if each.path == file.path)
        assert file.text == again.text
        assert ("userData: |\n" in file.text) is (file.path == "10-karpenter.yaml")


def test_a_profile_of_the_plan_is_one_of_amazons_if_its_instance_is(tmp_path: Path) -> None:
    for name, clouds in (("g6.2xlarge", "aws"), ("g2-standard-4", "gcp"), ("Standard_NC24ads_A100_v4", "azure")):
        file = tmp_path / "mine.toml"
        file.write_text(
            '[distributed]\ngpu = "1"\ninterruptible = true\n'
            f'node_selector = {{ "node.kubernetes.io/instance-type" = "{name}" }}\n'
        )
        found = profile_site(load_profile(str(file)), "churn", "mine")
        assert found.cloud == clouds
        assert bool(of_kind(found, "NodePool")) is (clouds == "aws")


def test_the_profile_that_a_plan_writes_has_its_manifests(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    planned = CliRunner().invoke(plan, ["--measured", run, "--write", str(tmp_path / "mine.toml")])
    assert planned.exit_code == 0, planned.output
    profile = load_profile(str(tmp_path / "mine.toml"))
    made = [tree for file in build_manifests(profile_site(profile, "churn", "mine"), None) for tree in trees(file)]
    quotas = [tree["spec"]["hard"] for tree in made if tree.get("kind") == "ResourceQuota"]
    gpus = int(profile.asked("train").gpu) * profile.asked("train").nodes
    assert [int(hard["requests.nvidia.com/gpu"]) for hard in quotas] == [2 * gpus] * 2 and gpus > 0
