"""Hardware profiles: what each stage asks of the cluster, as data.

A profile is a TOML file: the tables ``[default]`` and ``[stages.<stage>]``, the latter over the former. It is chosen by
``SLIPSTREAM_PROFILE`` (a name in ``profiles/`` or the path of a file) when the workflow is packaged or registered.
Flyte imports the module again inside the pod and takes the shape of the process group from *that*, so the resolved
profile travels in each task's environment and is believed there before anything else.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.errors import UserError
from tasks.settings import Settings, settings, to_dict, unknown

CHOICE = "SLIPSTREAM_PROFILE"
RESOLVED = "SLIPSTREAM_PROFILE_RESOLVED"
BUILT_IN = Path(__file__).parent / "profiles"
CPU_PROCESSES = 2


@settings
class Toleration(Settings):
    """A Kubernetes toleration."""

    section = "profile.tolerations"

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: str = ""


@settings
class Placement(Settings):
    """What one stage asks for, per pod. Quantities are Kubernetes' (``"500m"``, ``"16Gi"``)."""

    section = "profile"

    nodes: Annotated[int, Field(ge=1)] = 1
    """Pods at a time: the nodes of a process group; for prepare, those that share the work on a table."""
    processes: Annotated[int, Field(ge=0)] = 1
    """Processes per node; 0 takes what the machine has when the profile is resolved."""
    cpu: str = "1"
    memory: str = "2Gi"
    gpu: str = "0"
    accelerator: str = ""
    """The accelerator's name as the cluster's node labels spell it."""
    shared_memory: str = ""
    """Size of /dev/shm; empty leaves the container's default."""
    interruptible: bool = False
    retries: Annotated[int, Field(ge=0)] = 0
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often a process group whose worker died is started again in the same pods, before that costs a retry."""
    timeout_minutes: Annotated[int, Field(ge=1)] = 60
    tolerations: list[Toleration] = field(default_factory=list)
    node_selector: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    data_cache_gib: Annotated[float, Field(gt=0)] = 100.0
    """Local disk for prepared data (GiB per node). What fits is downloaded before the first step; what does not streams
    from S3 ahead of use."""
    notices: Literal["none", "auto", "aws", "gcp", "azure"] = "none"
    """Whose preemption notices a process watches for; "auto" finds the cloud by asking its metadata server."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class Profile:
    """A resolved profile: the placement of every stage, nothing left to look up."""

    name: str
    default: Placement
    stages: Mapping[str, Placement]

    def placement(self, stage: str) -> Placement:
        return self.stages.get(stage, self.default)

    def to_json(self) -> str:
        stages = {stage: to_dict(placement) for stage, placement in self.stages.items()}
        return json.dumps({"name": self.name, "default": to_dict(self.default), "stages": stages}, sort_keys=True)


def parse(name: str, data: dict[str, Any]) -> Profile:
    """Build and resolve a profile. Raises ``UserError`` naming the setting that is wrong."""
    for key in data:
        if key not in ("name", "default", "stages"):
            raise UserError(unknown(f"profile {name}", key, ["default", "stages"]))
    default = data.get("default", {})
    try:
        stages = {stage: placement({**default, **own}) for stage, own in data.get("stages", {}).items()}
        return Profile(name, placement(default), stages)
    except UserError as error:
        raise UserError(f"profile {name}: {error.message}") from None


def placement(data: dict[str, Any]) -> Placement:
    if data.get("processes") == 0:
        data = {**data, "processes": visible_gpus() or CPU_PROCESSES}
    return Placement.from_dict(data)


@cache
def current_profile() -> Profile:
    """The profile of this process: the one that travelled with the task, else the one the user chose."""
    if travelled := os.environ.get(RESOLVED):
        data = json.loads(travelled)
        return parse(data["name"], data)
    return load(os.environ.get(CHOICE) or "local")


def load(choice: str) -> Profile:
    """Read a profile by name or by path. Raises ``UserError`` if there is none or it is wrong."""
    path = Path(choice) if choice.endswith(".toml") else BUILT_IN / f"{choice}.toml"
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        names = ", ".join(sorted(file.stem for file in BUILT_IN.glob("*.toml")))
        raise UserError(f"{CHOICE}={choice}: no such profile; choose one of {names}, or a path to a .toml") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{CHOICE}={choice}: {path} cannot be read: {error}") from None
    return parse(path.stem, data)


def visible_gpus() -> int:
    """How many GPUs this process may use, counted without loading torch (NVML for NVIDIA, sysfs for AMD)."""
    for variable in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if variable in os.environ:
            return len([device for device in os.environ[variable].split(",") if device.strip() not in ("", "-1")])
    return nvidia_gpus() or amd_gpus()


def nvidia_gpus() -> int:
    import pynvml

    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0


def amd_gpus() -> int:
    """Nodes of the kernel's compute topology that have SIMD units; CPUs are listed there too, with none."""
    nodes = Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    lines = (line.split() for node in nodes for line in node.read_text().splitlines())
    return sum(1 for line in lines if len(line) == 2 and line[0] == "simd_count" and int(line[1]) > 0)
