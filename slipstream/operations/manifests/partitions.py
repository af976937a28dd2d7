"""NVIDIA's GPU partitions (MIG): the GPUs that have them, and their number per GPU."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.shared.errors import UserError


@dataclass(frozen=True)
class Partition:
    #: GPUs that have the partition, named as in ``slipstream/operations/plan/gpus.toml``.
    gpus: tuple[str, ...]
    #: Number of partitions of this kind on one GPU.
    number: int


A100_40, A100_80, H100, H200 = "A100-40GB", "A100-80GB", "H100", "H200"
#: Partitions by their name in the profile and the device plugin. 1g.10gb on an A100-40GB (four) is not listed.
PARTITIONS = {
    "1g.5gb": Partition((A100_40,), 7),
    "2g.10gb": Partition((A100_40,), 3),
    "3g.20gb": Partition((A100_40,), 2),
    "4g.20gb": Partition((A100_40,), 1),
    "7g.40gb": Partition((A100_40,), 1),
    "1g.10gb": Partition((A100_80, H100), 7),
    "1g.20gb": Partition((A100_80, H100), 4),
    "2g.20gb": Partition((A100_80, H100), 3),
    "3g.40gb": Partition((A100_80, H100), 2),
    "4g.40gb": Partition((A100_80, H100), 1),
    "7g.80gb": Partition((A100_80, H100), 1),
    "1g.18gb": Partition((H200,), 7),
    "1g.35gb": Partition((H200,), 4),
    "2g.35gb": Partition((H200,), 3),
    "3g.71gb": Partition((H200,), 2),
    "4g.71gb": Partition((H200,), 1),
    "7g.141gb": Partition((H200,), 1),
}


def find_partition(name: str, gpu: str = "") -> Partition:
    """Return the partition ``name`` of ``gpu``, or of any GPU if ``gpu`` is "".

    Raises ``UserError`` if it is unknown.
    """
    known = {each: found for each, found in PARTITIONS.items() if not gpu or gpu in found.gpus}
    if name not in known:
        of = f" of {gpu}" if gpu else ""
        expected = f"one of {', '.join(known)}" if known else "another accelerator"
        raise UserError(f"profile.mig: {name}: not a known partition{of}; expected {expected}")
    return Partition((gpu,), known[name].number) if gpu else known[name]
