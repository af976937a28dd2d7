"""Tuner results applied to a training (``training.network_profile``).

Libraries read environment variables once, before the process group exists. So a temporary gloo group first inspects the
hardware. A resumed run keeps its checkpoint's tuning, which is part of its identity, even if the tuner has newer
results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, MutableMapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import GradientsConfig
from slipstream.shared.artifacts.records import from_tree
from slipstream.shared.distributed.process_group import process_group
from slipstream.shared.distributed.user_errors import AgreedUserError, resolve_backend
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.fingerprint import interconnect_fingerprint
from slipstream.shared.interconnect.history import tuning_at
from slipstream.shared.interconnect.profile import Fingerprint
from slipstream.shared.interconnect.topology import group_topology
from slipstream.shared.interconnect.tuning import DdpSettings, Tuning, changes_numbers, check_variables
from slipstream.shared.logs import logger

LOG = logger("train")
T = TypeVar("T")


@dataclass(frozen=True)
class AppliedTuning:
    """Communication settings from the tuner that a run applies; empty by default."""

    REMEDY: ClassVar = "delete that checkpoint, or set training.resume: never"
    #: Fields of :class:`~slipstream.pipeline.train.parallel.config.GradientsConfig` that the tuner changed.
    gradients: dict[str, Any] = field(default_factory=dict)
    #: Environment variables to set, such as NCCL's.
    environment: dict[str, str] = field(default_factory=dict)
    #: Digest of the hardware fingerprint for which the tuner found these settings.
    fingerprint: str = ""

    def __bool__(self) -> bool:
        return bool(self.gradients or self.environment)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in (self.gradients | self.environment).items())

    def exchange(self, asked: GradientsConfig) -> GradientsConfig:
        """Return ``asked`` with the tuner's values for all settings that are left at their defaults."""
        untouched = [name for name, value in vars(GradientsConfig()).items() if getattr(asked, name) == value]
        return replace(asked, **{name: value for name, value in self.gradients.items() if name in untouched})


def agree_on_tuning(
    training: TrainingConfig,
    of_checkpoint: Callable[[], object],
    store: dist.Store,
    environment: MutableMapping[str, str],
) -> AppliedTuning:
    """Return the tuning that all ranks apply, and set its variables in ``environment``.

    All ranks must call this before they join a group. ``of_checkpoint``, called on rank 0, returns the tuning record of
    the checkpoint to resume from; None without a checkpoint. Raises ``UserError`` on all ranks if the tuner's result
    cannot be read, or if the result or the record has settings that the tuner never sets.
    """
    leads = environment["RANK"] == "0"
    resumed = from_rank_0(store, "resumed", leads, lambda: checked_record(of_checkpoint()))
    applied = AppliedTuning(**(resumed or {}))
    if applied.environment or (resumed is None and training.network_profile):
        hardware = fingerprint_here(training, store)
        if resumed is None:
            applied = AppliedTuning(**from_rank_0(store, "tuned", leads, lambda: asdict(tuned_for(hardware, training))))
        elif applied.fingerprint != hardware.digest:
            if leads:
                LOG.warning(
                    "tuner settings of the checkpoint were not applied, because this is other hardware: %s",
                    ", ".join(applied.environment),
                )
            return applied
    for name, value in applied.environment.items():
        environment.setdefault(name, value)
    if applied and leads:
        LOG.info("training applies the tuner's result: %s", applied)
    return applied


def checked_record(tree: object) -> dict[str, Any] | None:
    """Check a checkpoint's tuning record and return its fields; None if ``tree`` is None.

    Raises ``UserError`` for any field, setting, variable or value that the tuner never sets.
    """
    if tree is None:
        return None
    where = "the checkpoint that is resumed"
    applied = from_tree(tree, AppliedTuning, where)
    from_tree(applied.gradients, DdpSettings, where)
    try:
        GradientsConfig.from_dict(applied.gradients)
    except UserError as error:
        raise UserError(f"{where}: {error.message}; {AppliedTuning.REMEDY}") from None
    check_variables(applied.environment, where)
    return asdict(applied)


def from_rank_0(store: dist.Store, key: str, leads: bool, value: Callable[[], T]) -> T:
    """Call ``value`` on rank 0 and return its result (JSON-serialisable) on all ranks.

    If ``value`` raises ``UserError``, all ranks raise it.
    """
    if leads:
        try:
            store.set(key, json.dumps({"value": value()}))
        except UserError as error:
            store.set(key, json.dumps({"refused": error.message}))
    answer = json.loads(store.get(key))
    if "refused" in answer:
        raise AgreedUserError(answer["refused"])
    return answer["value"]


def fingerprint_here(training: TrainingConfig, store: dist.Store) -> Fingerprint:
    """Return the hardware fingerprint of these processes, as the tuner computes it."""
    backend = resolve_backend(training.backend, torch.cuda.device_count())
    with process_group(store=dist.PrefixStore("look", store), backend="gloo") as group:
        return interconnect_fingerprint(group_topology(group.device), group.device, backend)


def tuned_for(hardware: Fingerprint, training: TrainingConfig) -> AppliedTuning:
    """Return the tuning stored at ``training.network_profile``; empty if it is for other hardware."""
    tuning = tuning_at(training.network_profile, hardware)
    return allowed_part(tuning, training, hardware) if tuning else AppliedTuning()


def allowed_part(tuning: Tuning, training: TrainingConfig, hardware: Fingerprint) -> AppliedTuning:
    """Return the tuned settings that ``training`` allows, and log the others.

    Settings that change numerical results need ``collectives.numbers=may_change``. For a divided model only environment
    variables are returned.
    """
    default = DdpSettings()
    gradients = {
        f.name: getattr(tuning.ddp, f.name)
        for f in fields(DdpSettings)
        if getattr(tuning.ddp, f.name) != getattr(default, f.name) and not training.parallel.divides
    }
    everything = gradients | tuning.environment
    allowed = {
        name
        for name in everything
        if training.network_numbers == "may_change" or not changes_numbers(name, hardware.world)
    }
    if left := [f"{name}={value}" for name, value in everything.items() if name not in allowed]:
        LOG.warning(
            "tuner settings were not applied, because collectives.numbers is not may_change: %s", ", ".join(left)
        )
    return AppliedTuning(
        {name: value for name, value in gradients.items() if name in allowed},
        {name: value for name, value in tuning.environment.items() if name in allowed},
        hardware.digest,
    )
