"""Check that a pod has the GPUs it requested; otherwise it would silently compute on its CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from slipstream.shared.errors import UserError

#: GKE's mount of the driver's libraries; the dynamic linker finds them only by the image's LD_LIBRARY_PATH.
GKE_DRIVER = Path("/usr/local/nvidia/lib64")
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def check_asked_gpus(asked: int, seen: int, torch_builds: str | None, environment: Mapping[str, str]) -> None:
    """Raise ``UserError`` if a pod that ``asked`` for GPUs has none that torch can use.

    ``torch_builds`` is torch's version of CUDA or ROCm; None for a CPU build.
    """
    if not asked:
        return
    if torch_builds is None:
        raise UserError(
            f"profile.gpu: the pod asked for {gpus(asked)}, but torch in its image was built for CPUs; build the image "
            "with images/cuda.Dockerfile or images/rocm.Dockerfile"
        )
    if not seen:
        raise UserError(f"profile.gpu: the pod asked for {gpus(asked)} and sees none; {likely_cause(environment)}")


def gpus(number: int) -> str:
    return f"{number} GPU{'s' if number > 1 else ''}"


def likely_cause(environment: Mapping[str, str]) -> str:
    """Return the most likely reason for missing GPUs, and its fix."""
    if hidden := next((name for name in HIDING if environment.get(name, "0").strip() in ("", "-1")), None):
        return f"{hidden}={environment[hidden]} hides them: remove it from profile.environment and the image"
    if GKE_DRIVER.is_dir() and str(GKE_DRIVER) not in environment.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        return f"the driver is mounted at {GKE_DRIVER}: set LD_LIBRARY_PATH={GKE_DRIVER} in the image (GKE)"
    return (
        f"the driver's libraries are not found: on GKE set LD_LIBRARY_PATH={GKE_DRIVER} in the image, elsewhere the "
        "node needs its container toolkit as runtime (NVIDIA) or /dev/kfd in the pod (AMD)"
    )
