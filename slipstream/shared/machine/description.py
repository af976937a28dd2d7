"""CPU of this machine, whose instruction set decides whether INT8 is faster than FP32."""

from __future__ import annotations

import http.client
import json
import platform
import urllib.error
import urllib.request
from dataclasses import dataclass
from email.message import Message
from pathlib import Path

from slipstream.shared.machine.gpus import gpu_names
from slipstream.shared.machine.limits import usable_cores

CPUINFO = Path("/proc/cpuinfo")
#: Instruction set extensions that affect the speed of INT8 matmuls and, on x86, the exactness of their sums.
EXTENSIONS = (
    "avx2",
    "avx512f",
    "avx_vnni",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "i8mm",
    "sve",
)
VNNI = ("avx_vnni", "avx512_vnni", "amx_int8")


@dataclass(frozen=True)
class CpuModel:
    """CPU name, architecture ("x86_64", "aarch64", ...) and available :data:`EXTENSIONS`."""

    cpu: str
    architecture: str
    flags: tuple[str, ...]

    @property
    def saturates(self) -> bool:
        """True if U8 x S8 matmuls overflow 16-bit sums (x86 without VNNI, onnxruntime#6004)."""
        return self.architecture in ("x86_64", "AMD64", "i686") and not set(VNNI) & set(self.flags)


def this_machine(cpuinfo: Path = CPUINFO) -> CpuModel:
    """Return this machine from Linux's ``cpuinfo``; on other systems from ``platform``, without flags."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    present = f"{fields.get('flags', '')} {fields.get('Features', '')}".split()
    flags = tuple(flag for flag in EXTENSIONS if flag in present)
    architecture = platform.machine()
    return CpuModel(fields.get("model name") or platform.processor() or architecture, architecture, flags)


def measuring_machine() -> str:
    """Return, as text, what timings depend on: CPU, its extensions, this process's cores, and GPUs."""
    machine = this_machine()
    cpu = f"{machine.cpu}, {machine.architecture}, {' '.join(machine.flags)}, {usable_cores()} cores"
    return ", ".join([cpu, *gpu_names()])


#: Metadata servers: LINK_LOCAL of AWS and Azure, GOOGLE of Google.
LINK_LOCAL = "http://169.254.169.254"
GOOGLE = "http://metadata.google.internal"
#: Timeout of an exchange in seconds.
TIMEOUT_S = 2.0
MAX_RESPONSE_BYTES = 1 << 16


class MetadataUnavailable(Exception):
    """Error for a metadata server that gives no documented answer; must not stop a run."""


def http_request(
    url: str, headers: dict[str, str], *, method: str = "GET", timeout: float = TIMEOUT_S
) -> tuple[int, bytes, Message]:
    """Return status, body and headers of one HTTP exchange, whatever the status.

    Raises ``MetadataUnavailable`` without an answer.
    """
    # No proxy, because it would forward the metadata of its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(url, headers=headers, method=method)
    try:
        try:
            with opener.open(asked, timeout=timeout) as answer:
                return answer.status, answer.read(MAX_RESPONSE_BYTES), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, b"", error.headers
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MetadataUnavailable(f"{url}: {error}") from None


def parse_mapping(body: bytes, url: str) -> dict[str, object]:
    """Parse a JSON mapping; raises ``MetadataUnavailable`` for anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise MetadataUnavailable(f"{url}: not JSON") from None
    if not isinstance(value, dict):
        raise MetadataUnavailable(f"{url}: not a mapping")
    return value


class AwsMetadata:
    """Client of IMDSv2, in which every request carries a token; a rejected token is renewed."""

    TOKEN_S = 21600

    def __init__(self, base: str = LINK_LOCAL, timeout: float = TIMEOUT_S) -> None:
        self._base = base
        self._timeout = timeout
        self._token = ""

    def get(self, path: str) -> bytes | None:
        """Return the content at ``path``; None if it does not exist; raises ``MetadataUnavailable``."""
        for _ in range(2):
            if not self._token:
                self.renew()
            headers = {"X-aws-ec2-metadata-token": self._token}
            status, body, _headers = http_request(self._base + path, headers, timeout=self._timeout)
            if status == 404:
                return None
            if status == 200:
                return body
            if status != 401:
                break
            self._token = ""
        raise MetadataUnavailable(f"{path}: status {status}")

    def renew(self) -> None:
        """Request a new token; raises ``MetadataUnavailable``."""
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_S)}
        url = self._base + "/latest/api/token"
        status, body, _ = http_request(url, seconds, method="PUT", timeout=self._timeout)
        if status != 200 or not body.strip().isascii():
            raise MetadataUnavailable(f"/latest/api/token: status {status}")
        self._token = body.strip().decode()
        if not self._token.isprintable() or not self._token:
            self._token = ""
            raise MetadataUnavailable("/latest/api/token: not a token")
