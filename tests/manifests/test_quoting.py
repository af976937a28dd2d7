"""Whatever a profile's values hold, they stay values: of the rendered YAML, only they differ."""

from __future__ import annotations

import json
from collections.abc import Hashable
from typing import Any

import pytest
import yaml
from jinja2 import UndefinedError

from slipstream.operations.manifests.build import MARK, build_manifests, jinja_environment, quoted
from slipstream.operations.manifests.site import profile_site
from slipstream.operations.manifests.triton import TritonService
from slipstream.shared.profiles.profile import parse_profile
from tests.support.kube_schemas import CRDS, errors, errors_by_version, is_core
from tests.support.proving import first_few

PLAIN = "PLAIN"
HOSTILE = [
    'say "hi"',
    "it's: one # two",
    "a\nb: c\n---\nkind: Pod\n",
    "{{ 7 * 7 }}",
    "{% raw %}",
    "{# no comment",
    "- item",
    "!!python/object:os.system",
    "&anchor *alias",
    "\\n \\",
    "\t\x00\x1b\x7f\x85\xa0\u2028\ufeff é 😀",
    "null",
    "1e3",
    "no",
    "2026-01-01",
    "| >",
    "? [a, {b: c}]",
]


class StrictLoader(yaml.SafeLoader):
    """Loader that refuses a key that occurs twice, which YAML forbids and PyYAML does not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        assert len(set(keys)) == len(keys), keys
        return super().construct_mapping(node, deep)


def rendered(text: str, scheduler: str, keda: bool) -> dict[str, list[Any]]:
    """Parse the files of a profile that has ``text`` wherever a profile may hold any text."""
    toleration = {"key": f"key {text}", "operator": "Equal", "value": f"value {text}", "effect": f"effect {text}"}
    placement = {
        "gpu": "1",
        "processes": 1,
        "gpu_resource": f"nvidia.com/{text}.shared",
        "shared_gpu": "time-slicing",
        "node_selector": {f"label {text}": text, "topology.kubernetes.io/zone": text},
        "tolerations": [toleration],
        "rdma": {f"rdma/{text}": "1"},
        "scheduler": scheduler,
    }
    accelerated = {"gpu": "1", "processes": 1, "accelerator": text}
    tables = {"default": {"tolerations": [toleration]}, "distributed": placement, "stages": {"export": accelerated}}
    site = profile_site(parse_profile(f"mine {text}", tables), "churn", "mine")
    return {
        file.path: list(yaml.load_all(file.text, StrictLoader))
        for file in build_manifests(site, TritonService(f"s3://bucket/{text}", keda))
        if file.text.startswith(f"{MARK} for the profile {quoted(site.profile.name)}: ")
    }


def replaced(tree: Any, text: str) -> Any:
    """Put ``text`` in place of ``PLAIN``, in the files that a ConfigMap holds as well."""
    if isinstance(tree, dict):
        return {replaced(key, text): replaced(value, text) for key, value in tree.items()}
    if isinstance(tree, list):
        return [replaced(each, text) for each in tree]
    if isinstance(tree, str) and tree.startswith("version: v1"):
        return replaced(yaml.load(tree, StrictLoader), text)
    return tree.replace(PLAIN, text) if isinstance(tree, str) else tree


@pytest.mark.parametrize("text", first_few(HOSTILE, 2))
def test_values_change_no_structure(text: str) -> None:
    for scheduler, keda in (("", True), ("volcano", False)):
        plain = rendered(PLAIN, scheduler, keda)
        assert len(plain) == (8 if scheduler else 9) and str(plain).count(PLAIN) > 30
        assert replaced(rendered(text, scheduler, keda), PLAIN) == replaced(plain, text)


@pytest.mark.parametrize("text", first_few(HOSTILE, 2))
def test_schemas_refuse_no_more_than_the_values_themselves(text: str) -> None:
    found = [tree for trees in rendered(text, "", True).values() for tree in trees if "kind" in tree]
    for tree in found:
        if is_core(tree["apiVersion"]):
            assert not errors_by_version(json.dumps(tree))
        elif CRDS.is_dir():
            assert all("does not match" in error or "not one of" in error for error in errors(tree)), errors(tree)


@pytest.mark.parametrize(
    "value", [*HOSTILE, "", "\ud800", 7, -0.5, True, None, [HOSTILE], dict.fromkeys(HOSTILE, HOSTILE)]
)
def test_a_quoted_value_is_the_same_in_yaml_and_in_a_comment(value: object) -> None:
    text = quoted(value)
    assert yaml.load(f"# {text}\na: [{text}]\nb: {text}\n", StrictLoader) == {"a": [value], "b": value}


def test_a_value_that_is_not_given_is_an_error() -> None:
    with pytest.raises((UndefinedError, TypeError)):
        jinja_environment().from_string("name: {{ nowhere }}").render()
