"""Propeller's configuration on the cluster, and its limit on failed rounds per execution.

Both of Flyte's charts mount ConfigMaps as one directory. Propeller merges the files there that match ``--config``, in
order of their names. Only container names do not depend on the release. So the deployment with a propeller container
determines the ConfigMaps to read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from itertools import pairwise

import yaml

from slipstream.operations.doctor.archive import Limits
from slipstream.operations.doctor.findings import DoctorReport, Finding
from slipstream.operations.doctor.kubectl import Ask, KubectlError, KubeObject, list_objects
from slipstream.shared.errors import UserError

#: Parsed YAML of a configuration file.
Settings = Mapping[object, object]

RETRIES = "max-workflow-retries"
#: Propeller's default.
DEFAULT = 10
#: About two hours of failed rounds in succession, such as while a store refuses requests.
ENOUGH = 10_000
ADVISED = 100_000
#: Names of propeller's containers in the charts, and the charts.
CONTAINERS = {"flyte": "flyte-binary", "flytepropeller": "flyte-core", "flytepropeller-manager": "flyte-core"}
#: Sections of the configuration, and the files of flyte-core that hold them.
CORE_FILES = {"propeller": "core", "plugins": "k8s", "catalog-cache": "catalog"}
#: Units of Go's durations in seconds.
UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
DURATION = re.compile(rf"(\d+\.?\d*|\.\d+)({'|'.join(sorted(UNITS, key=len, reverse=True))})")


class UnreadableConfig(RuntimeError):
    """Error for a configuration that propeller could not read; the message says why."""


@dataclass(frozen=True)
class Propeller:
    """Deployment that runs propeller, and the sources of its configuration."""

    namespace: str
    deployment: str
    #: Chart that wrote the deployment.
    chart: str
    #: Pattern of the configuration files that propeller reads, such as ``*.yaml``.
    pattern: str
    config_maps: tuple[str, ...]
    secrets: tuple[str, ...]

    @property
    def where(self) -> str:
        return f"deployment {self.namespace}/{self.deployment}"

    def chart_value(self, section: str, key: str) -> str:
        """Return the chart's value that sets ``key`` in a section of the configuration."""
        place = "configuration.inline" if self.chart == "flyte-binary" else f"configmap.{CORE_FILES[section]}"
        return f"{self.chart}'s {place}.{section}.{key}"


#: Check of a propeller's configuration files. Raises ``UnreadableConfig``, ``KubectlError``.
ConfigCheck = Callable[[Propeller, Sequence[Settings]], DoctorReport]


def check_propeller(ask: Ask, others: Sequence[ConfigCheck] = ()) -> DoctorReport:
    """Report every propeller of the cluster that ends executions after few failed rounds, and what ``others`` find."""
    try:
        deployments = list_objects(ask, "deployments", "--all-namespaces")
    except KubectlError as error:
        return unchecked(str(error))
    all_propellers = [propeller for deployment in deployments for propeller in components(deployment, CONTAINERS)]
    if not all_propellers:
        return unchecked("no deployment runs propeller as Flyte's charts do")
    checks = (check_retries, *others)
    return sum((check_config(propeller, ask, checks) for propeller in all_propellers), DoctorReport())


def unchecked(why: str) -> DoctorReport:
    return DoctorReport(unchecked=(f"propeller's settings: {why}",))


def check_config(propeller: Propeller, ask: Ask, checks: Sequence[ConfigCheck]) -> DoctorReport:
    if not propeller.config_maps:
        return unchecked(f"{propeller.where} has its configuration from no ConfigMap")
    try:
        files = read_files(propeller, ask)
    except (KubectlError, UnreadableConfig) as error:
        return unchecked(f"{propeller.where}: {error}")
    if last_setting(files, "flyte", "propeller", "disabled") is True:  # flyte-binary as a control plane
        return unchecked(f"{propeller.where} has propeller disabled")
    report = DoctorReport()
    for check in checks:
        try:
            report += check(propeller, files)
        except (KubectlError, UnreadableConfig) as error:
            report += unchecked(f"{propeller.where}: {error}")
    return report + unread_secrets(propeller)


def check_retries(propeller: Propeller, files: Sequence[Settings]) -> DoctorReport:
    retries = node_limit(last_setting(files, "propeller", RETRIES))
    findings = () if retries is not None and retries >= ENOUGH else (too_few(propeller, retries),)
    number = f"{DEFAULT}, the default," if retries is None else str(retries)
    return DoctorReport(findings, (f"propeller's {RETRIES}, {number} by the ConfigMaps of {propeller.where}",))


def too_few(propeller: Propeller, retries: int | None) -> Finding:
    is_set = f"not set, and {DEFAULT} by default" if retries is None else str(retries)
    last = (DEFAULT if retries is None else retries) + 1
    return Finding(
        "warning",
        propeller.where,
        f"propeller's {RETRIES} is {is_set}",
        f"failed round {last} of an execution ends it and its pods, even during training and regardless of retries; a "
        "store that refuses for 8 s causes 11",
        f"set {propeller.chart_value('propeller', RETRIES)} to {ADVISED} in the chart's values",
    )


def unread_secrets(propeller: Propeller) -> DoctorReport:
    """Report Secrets with settings, because the doctor reads none.

    Flyte-binary's own Secret holds no settings of propeller.
    """
    others = [name for name in propeller.secrets if name != f"{propeller.deployment}-config-secret"]
    return unchecked(f"Secret {', '.join(others)} of {propeller.where} may set more") if others else DoctorReport()


# Limits of FlyteAdmin

#: Names of FlyteAdmin's containers in the charts, and the charts.
ADMINS = {"flyte": "flyte-binary", "flyteadmin": "flyte-core"}


def admin_limits(ask: Ask) -> Limits | None:
    """Return the limits per task by the ConfigMaps of FlyteAdmin; None if none can be read.

    A limit that they do not set has Flyte's default, an empty or zero one is none.
    """
    try:
        deployments = list_objects(ask, "deployments", "--all-namespaces")
        admins = [admin for deployment in deployments for admin in components(deployment, ADMINS) if admin.config_maps]
        files = [read_files(admin, ask) for admin in admins]
        if len(files) != 1:
            return None
        names = [each.name for each in fields(Limits)]
        found = {name: last_setting(files[0], "task_resources", "limits", name.replace("_", "")) for name in names}
        found |= {name: value for name in names if (value := last_setting(files[0], "task_resources", "limits", name))}
        return Limits.from_dict({name: str(value) for name, value in found.items() if value is not None})
    except (KubectlError, UnreadableConfig, UserError):
        return None


# Relevant ConfigMaps


def components(deployment: KubeObject, charts: Mapping[str, str]) -> Iterator[Propeller]:
    """Yield the containers of a deployment whose names are in ``charts``, with the sources of their configuration."""
    pod = deployment["spec"]["template"]["spec"]
    for container in pod["containers"]:
        words = [*(container.get("command") or []), *(container.get("args") or [])]
        directory, _, pattern = command_line_option(words, "--config").rpartition("/")
        if container["name"] not in charts or not directory:
            continue
        sources = mounted_volumes(pod, container, directory)
        yield Propeller(
            namespace=deployment["metadata"]["namespace"],
            deployment=deployment["metadata"]["name"],
            chart=charts[container["name"]],
            pattern=pattern,
            config_maps=tuple(source["configMap"]["name"] for source in sources if "configMap" in source),
            secrets=tuple(source["secret"]["name"] for source in sources if "secret" in source),
        )


def command_line_option(words: Sequence[str], name: str) -> str:
    """Return the value of a command line option, after a space or "="; "" if missing."""
    for word, following in pairwise([*words, ""]):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return ""


def mounted_volumes(pod: KubeObject, container: KubeObject, directory: str) -> list[KubeObject]:
    """Return the volume sources of a container's directory.

    Both charts use a projected volume; flyte-core did not before 1.16.
    """
    mounts = {mount["mountPath"].rstrip("/"): mount["name"] for mount in container.get("volumeMounts") or []}
    volumes = {volume["name"]: volume for volume in pod.get("volumes") or []}
    volume = volumes.get(mounts.get(directory), {})
    return [volume] if "configMap" in volume else volume.get("projected", {}).get("sources", [])


# Settings


def read_files(propeller: Propeller, ask: Ask) -> list[Settings]:
    """Return the parsed files that propeller merges; later ones override earlier ones."""
    texts: dict[str, str] = {}
    for name in propeller.config_maps:
        answer = ask("get", "configmap", name, "--namespace", propeller.namespace, "--output", "json")
        data = answer.get("data") if isinstance(answer, dict) else None
        texts |= data if isinstance(data, dict) else {}
    return [parse_propeller_config(name, texts[name]) for name in sorted(texts) if fnmatchcase(name, propeller.pattern)]


def parse_propeller_config(name: str, text: str) -> Settings:
    try:
        content = yaml.safe_load(text)
    except Exception:  # for odd scalars and depths PyYAML raises more than its own errors
        raise UnreadableConfig(f"{name} is not YAML") from None
    if not isinstance(content, dict | None):
        raise UnreadableConfig(f"{name} has no settings at its top level")
    return content or {}


def last_setting(files: Sequence[Settings], *path: str) -> object:
    """Return the value in the last file that sets it; None if null or in no file."""
    values = [value for content in files for value in values_at(content, path)]
    return values[-1] if values else None


def values_at(content: object, path: Sequence[str]) -> Iterator[object]:
    """Yield the values at a path of keys, ignoring case as propeller does."""
    if not path:
        yield content
    elif isinstance(content, dict):
        for key, below in content.items():
            if isinstance(key, str) and key.lower() == path[0]:
                yield from values_at(below, path[1:])


def node_limit(value: object) -> int | None:
    """Return the limit that propeller reads from ``value``; None if it is not set."""
    if value is None:
        return None
    try:
        number = float(value)  # type: ignore[arg-type]  # to PyYAML 1e5 is text, and propeller takes text, too
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UnreadableConfig(f"{RETRIES} is not a number")
    return int(number) % 2**32  # kept as uint32, so that -1 is endless


def duration_s(name: str, value: object, default: float) -> float:
    """Return the seconds of a duration as Go reads it: ``1h30m``, or a number of nanoseconds."""
    if value is None:
        return default
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return value / 1e9
    parts = DURATION.findall(value) if isinstance(value, str) else []
    if value not in ("", "0") and "".join(map("".join, parts)) != value:
        raise UnreadableConfig(f"{name} is not a duration")
    return sum((float(number) * UNITS[unit] for number, unit in parts), 0.0)
