"""Secrets, volumes and security context of a stage's pods, validated; every field is documented below it."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.settings import Settings, settings, unknown_setting

#: Directory below which Flyte's webhook mounts secrets, as GROUP/KEY.
SECRETS = "/etc/flyte/secrets"
#: Directory that ``shared_memory`` mounts.
SHARED_MEMORY = "/dev/shm"
#: Name of an environment variable, and of a Kubernetes object.
VARIABLE = re.compile("[A-Za-z_][A-Za-z0-9_]*")
OBJECT = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
#: Fields of a container's security context that a pod's context lacks, and fields of a pod's context.
OF_CONTAINER = ("allowPrivilegeEscalation", "capabilities", "privileged", "procMount", "readOnlyRootFilesystem")
OF_POD = (
    *("runAsUser", "runAsGroup", "runAsNonRoot", "fsGroup", "fsGroupChangePolicy", "supplementalGroupsPolicy"),
    *("seLinuxOptions", "seccompProfile", "appArmorProfile", "sysctls", "windowsOptions"),
)


@settings
class SecretRequest(Settings):
    """Key of a secret that Flyte mounts into the pods; its value enters neither package nor log."""

    section = "profile.secrets"

    group: str
    """Name of the Kubernetes secret."""
    key: str
    """Key in the secret."""
    variable: str = ""
    """Environment variable with the value; empty mounts the file ``/etc/flyte/secrets/GROUP/KEY``, in lower case."""

    @property
    def path(self) -> str:
        """Return the path of the mounted file; "" for an environment variable."""
        return "" if self.variable else f"{SECRETS}/{self.group}/{self.key}".lower()

    def check(self) -> None:
        for name in ("group", "key"):
            if not getattr(self, name) or "/" in getattr(self, name):
                raise self.reject(name, "the name of a secret and of one of its keys, without a slash")
        if self.variable and not VARIABLE.fullmatch(self.variable):
            raise self.reject("variable", "the name of an environment variable, such as WANDB_API_KEY")


@settings
class Volume(Settings):
    """Volume of the pods: exactly one of ``claim``, ``host_path`` and ``size``."""

    section = "profile.volumes"

    path: str
    """Absolute path of the mount."""
    claim: str = ""
    """Name of a PersistentVolumeClaim in the namespace of the pods."""
    host_path: str = ""
    """Directory of the node."""
    size: str = ""
    """Size of an empty directory that lives as long as the pod."""
    medium: Literal["", "Memory"] = ""
    """Medium of the empty directory; "Memory" counts as the pod's memory."""
    read_only: bool = False

    def check(self) -> None:
        if not self.path.startswith("/") or posixpath.normpath(self.path) != self.path or self.path == "/":
            raise self.reject("path", "an absolute path of a directory, such as /mnt/data")
        if self.path == SHARED_MEMORY:
            raise self.reject("path", f"another path than {SHARED_MEMORY}, whose size is profile.shared_memory")
        if sum(map(bool, (self.claim, self.host_path, self.size))) != 1:
            raise self.reject("path", f"exactly one of claim, host_path and size with {self.path}")
        if self.claim and not OBJECT.fullmatch(self.claim):
            raise self.reject("claim", "the name of a PersistentVolumeClaim")
        if self.host_path and not self.host_path.startswith("/"):
            raise self.reject("host_path", "an absolute path of the node")
        if self.medium and not self.size:
            raise self.reject("medium", "none without size, which it is for")
        if self.read_only and self.size:
            raise self.reject("read_only", "false with size: the directory would stay empty")
        if self.size:
            try:
                parse_quantity(self.size)
            except ValueError:
                raise self.reject("size", "a Kubernetes quantity, such as 10Gi") from None

    def source(self) -> dict[str, Any]:
        """Return the volume's source as in a pod's manifest."""
        if self.claim:
            return {"persistentVolumeClaim": {"claimName": self.claim, "readOnly": self.read_only}}
        if self.host_path:
            return {"hostPath": {"path": self.host_path}}
        return {"emptyDir": {"sizeLimit": self.size, **({"medium": self.medium} if self.medium else {})}}


def check_access(secrets: Sequence[SecretRequest], volumes: Sequence[Volume], environment: Mapping[str, str]) -> None:
    """Raise ``UserError`` if two secrets or volumes have one name, or a secret a variable of ``environment``."""
    for name, given in (
        ("volumes.path", [volume.path for volume in volumes]),
        ("secrets.variable", [secret.variable for secret in secrets if secret.variable]),
    ):
        if twice := sorted({value for value in given if given.count(value) > 1}):
            raise UserError(f"profile.{name}: {twice[0]} is given twice; remove one of them")
    if both := sorted({secret.variable for secret in secrets} & set(environment)):
        raise UserError(f"profile.secrets.variable: {both[0]} stands in profile.environment, too; remove it there")
    if inside := [volume.path for volume in volumes if f"{volume.path}/".startswith(f"{SECRETS}/")]:
        raise UserError(f"profile.volumes.path: {inside[0]} is the directory of Flyte's secrets; use another path")


def check_security_context(context: Mapping[str, Any]) -> None:
    """Raise ``UserError`` for unknown fields and for fields that exclude each other."""
    if wrong := sorted(set(context) - {*OF_CONTAINER, *OF_POD}):
        raise UserError(unknown_setting("profile.security_context", wrong[0], (*OF_POD, *OF_CONTAINER)))
    if context.get("runAsNonRoot") and context.get("runAsUser") == 0:
        raise UserError(
            "profile.security_context.runAsUser: expected a user other than 0 with runAsNonRoot, which refuses root"
        )
    if context.get("privileged") and context.get("allowPrivilegeEscalation") is False:
        raise UserError(
            "profile.security_context.allowPrivilegeEscalation: expected true with privileged, which implies it"
        )
