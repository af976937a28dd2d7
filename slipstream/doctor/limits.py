"""What the platform allows a task: FlyteAdmin's ``task_resources.limits``."""

from __future__ import annotations

import tomllib
from pathlib import Path

from slipstream.errors import UserError
from slipstream.machine.quantities import parse_quantity
from slipstream.profiles.placement import NVIDIA
from slipstream.settings import Settings, settings, unknown


@settings
class Limits(Settings):
    """The most that one task may ask for; the defaults are Flyte's own. Empty or "0" is no limit."""

    section = "limits"

    cpu: str = "2"
    memory: str = "1Gi"
    gpu: str = "1"
    ephemeral_storage: str = ""

    def check(self) -> None:
        for resource in LIMITED:
            name = resource.replace("-", "_")
            if quantity(getattr(self, name) or "0") is None:
                raise self.reject(name, 'a quantity of Kubernetes, as "96" or "1000Gi"')

    def of(self, resource: str) -> str:
        """The limit of a resource by its name in a pod; empty if there is none. Resources that Flyte does not know, as
        ``nvidia.com/mig-1g.5gb``, have none."""
        name = limit_name(resource)
        limit = getattr(self, name.replace("-", "_")) if name in LIMITED else ""
        return limit if quantity(limit or "0") else ""


#: What Flyte limits, by its own names.
LIMITED = ("cpu", "memory", "gpu", "ephemeral-storage")


def limit_name(resource: str) -> str:
    return "gpu" if resource == NVIDIA else resource


def quantity(text: str) -> float | None:
    """``500m`` is 0.5, ``1Gi`` 1073741824; ``None`` if it is no quantity."""
    try:
        return parse_quantity(text)
    except ValueError:
        return None


def read_limits(path: Path) -> Limits:
    """The table ``[limits]`` of a TOML file. Raises ``UserError`` naming the file and the setting that is wrong."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        for name in data:
            if name != Limits.section:
                raise UserError(unknown("", name, [Limits.section]))
        return Limits.from_dict(data.get(Limits.section, {}))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; expected TOML with a table [limits]") from None
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the limits cannot be read: {error}") from None
    except UserError as error:
        raise UserError(f"{path}: {error.message}") from None
