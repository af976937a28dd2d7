"""What training takes of the tuner's results (``training.network_profile``).

It has to be known before the process group exists, as libraries read variables once. So the processes first meet in a
gloo group that only looks at the hardware. A run that resumes from a checkpoint keeps what it began with, whatever has
been found since; that is part of the checkpoint's identity.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist

from slipstream.distributed.process_group import process_group
from slipstream.distributed.user_errors import AgreedUserError, backend_of
from slipstream.errors import UserError
from slipstream.interconnect.fingerprint import fingerprint_of
from slipstream.interconnect.history import tuning_at
from slipstream.interconnect.profile import Fingerprint
from slipstream.interconnect.topology import topology_of
from slipstream.interconnect.tuning import DdpSettings, Tuning, changes_numbers, check_variables
from slipstream.logs import logger
from slipstream.train.config import TrainingConfig
from slipstream.train.parallel.config import GradientsConfig

LOG = logger("train")


@dataclass(frozen=True)
class Applied:
    """What a run applies; nothing by default."""

    #: Fields of :class:`~slipstream.train.parallel.config.GradientsConfig` that the tuner changed.
    gradients: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    #: Whose result it is: the digest of the hardware's fingerprint.
    fingerprint: str = ""

    def __bool__(self) -> bool:
        return bool(self.gradients or self.environment)

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in (self.gradients | self.environment).items())

    def exchange(self, asked: GradientsConfig) -> GradientsConfig:
        """What was ``asked`` for, and where that is the default, what the tuner found."""
        untouched = [name for name, value in vars(GradientsConfig()).items() if getattr(asked, name) == value]
        return replace(asked, **{name: value for name, value in self.gradients.items() if name in untouched})


def agreed(
    training: TrainingConfig, began: Callable[[], Mapping[str, Any] | None], store: dist.Store, environment: Any
) -> Applied:
    """What all ranks apply, with its variables set in ``environment``. All must call this, before they join a group.

    ``began``, called on rank 0, gives what the run that is gone on from applied; None if there is none. Raises
    ``UserError`` on all ranks if the tuner's result cannot be read, or if that or the checkpoint sets a variable that
    is none of the tuner's.
    """
    leads = environment["RANK"] == "0"
    begun = from_rank_0(store, "begun", leads, lambda: checked(began()))
    applied = Applied() if begun is None else Applied(**begun)
    if applied.environment or (begun is None and training.network_profile):
        here = look(training, store)
        if begun is None:
            found = from_rank_0(store, "found", leads, lambda: asdict(find(training, here)))
            applied = Applied(**found)
        elif applied.fingerprint != here.digest:
            if leads:
                LOG.warning("%s: not applied, as this is other hardware", ", ".join(applied.environment))
            return applied
    for name, value in applied.environment.items():
        environment.setdefault(name, value)
    if applied and leads:
        LOG.info("applies the tuner's result: %s", applied)
    return applied


def checked(begun: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """What a checkpoint says was applied. Raises ``UserError`` for a variable that is none of the tuner's."""
    check_variables((begun or {}).get("environment", {}), "the checkpoint that is gone on from")
    return begun


def from_rank_0(store: dist.Store, key: str, leads: bool, value: Callable[[], Any]) -> Any:
    """What ``value`` gives on rank 0 (JSON), on all. A ``UserError`` there is raised on all."""
    if leads:
        try:
            said = {"value": value()}
        except UserError as error:
            said = {"refused": error.message}
        store.set(key, json.dumps(said))
    heard = json.loads(store.get(key))
    if "refused" in heard:
        raise AgreedUserError(heard["refused"])
    return heard["value"]


def look(training: TrainingConfig, store: dist.Store) -> Fingerprint:
    """The fingerprint of these processes, as the tuner sees them."""
    backend = backend_of(training.backend, torch.cuda.device_count())
    with process_group(store=dist.PrefixStore("look", store), backend="gloo") as group:
        return fingerprint_of(topology_of(group.device), group.device, backend)


def find(training: TrainingConfig, here: Fingerprint) -> Applied:
    """What is to be applied of the tuner's result at ``training.network_profile``, if that is of this hardware."""
    tuning = tuning_at(training.network_profile, here)
    return choose(tuning, training, here) if tuning else Applied()


def choose(tuning: Tuning, training: TrainingConfig, here: Fingerprint) -> Applied:
    """All of it that the user allows; of a divided model only the environment."""
    default = DdpSettings()
    gradients = {
        f.name: getattr(tuning.ddp, f.name)
        for f in fields(DdpSettings)
        if getattr(tuning.ddp, f.name) != getattr(default, f.name) and not training.parallel.divides
    }
    everything = gradients | tuning.environment
    allowed = {
        name for name in everything if training.network_numbers == "may_change" or not changes_numbers(name, here.world)
    }
    if left := [f"{name}={value}" for name, value in everything.items() if name not in allowed]:
        LOG.warning("not applied, as collectives.numbers does not say may_change: %s", ", ".join(left))
    return Applied(
        {name: value for name, value in gradients.items() if name in allowed},
        {name: value for name, value in tuning.environment.items() if name in allowed},
        here.digest,
    )
