"""The homes below a store: what lies there, how old it is, whose it is; and freeing those that nobody needs."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.artifacts.format import MANIFEST
from slipstream.artifacts.homes import HOMES, Holder
from slipstream.storage import STORES, ObjectInfo, list_objects, storage_for
from slipstream.storage.local import LocalStorage, local_path
from slipstream.train.homes.home import Home
from slipstream.train.homes.layout import CLAIMS, FINISHED, INHERITED, LATEST, LEASES, Name, complete, lease_key, newest
from slipstream.train.homes.lease import Sign, is_unlocked, sign_of

DAY_S = 86400.0
#: What the first files below a home are called, besides checkpoints.
PARTS = {CLAIMS, INHERITED, LEASES, "ledger/", FINISHED, LATEST}


@dataclass(frozen=True)
class HomeSummary:
    """What there is of one training."""

    #: The address of its home, and that below the directory of all homes: project, domain and key, or the key alone.
    uri: str
    name: str
    keys: tuple[str, ...]
    bytes: int
    #: When something was last written, in seconds of the store's clock.
    modified: float
    #: The step of the newest checkpoint; None without any.
    step: int | None
    holder: Holder
    #: "finished", "ended", "at work", or "lost": without a sign of life, and without having ended.
    state: str


def homes_below(store: str, now: float) -> list[HomeSummary]:
    """All homes below ``store`` at the time ``now``, the last written first. Raises ``UserError``,
    ``StorageUnavailable``."""
    base = f"{store.rstrip('/')}/{HOMES}" if store.startswith(STORES) else str(local_path(store) / HOMES)
    found: dict[str, list[tuple[str, ObjectInfo]]] = defaultdict(list)
    for info in list_objects(f"{base}/"):
        name, key = divided(info.uri.removeprefix(f"{base}/"))
        if key:
            found[name].append((key, info))
    homes = [summary(base, name, files, now) for name, files in found.items()]
    return sorted(homes, key=lambda home: (-home.modified, home.name))


def divided(path: str) -> tuple[str, str]:
    """The name of a home and the key in it; no key for what is in none."""
    parts = path.split("/")
    for index, part in enumerate(parts):
        if index and (part in PARTS or f"{part}/" in PARTS or Name.parse(part)):
            return "/".join(parts[:index]), "/".join(parts[index:])
    return path, ""


def summary(base: str, name: str, files: Iterable[tuple[str, ObjectInfo]], now: float) -> HomeSummary:
    listed = dict(files)
    home = Home(storage_for(f"{base}/{name}"))
    checkpoints, attempt = complete(listed), newest(listed)
    modified = max(info.modified for info in listed.values())
    finished = home.finished() if FINISHED in listed else None
    sign = sign_of(home, attempt) if lease_key(attempt) in listed else None
    if finished:
        state = "finished"
    elif sign is None or sign.ended:
        state = "ended"
    elif home.is_local and not sign.delivering and is_unlocked(home.storage):
        state = "lost"
    else:
        state = "at work" if now - modified < Sign().silence_s else "lost"
    return HomeSummary(
        f"{base}/{name}",
        name,
        tuple(listed),
        sum(info.size for info in listed.values()),
        modified,
        checkpoints[0].step if checkpoints else None,
        finished.holder if finished else home.holder_of(attempt),
        state,
    )


def free(home: HomeSummary) -> None:
    """Delete a home, manifests first: what is left of a sweep that is interrupted looks complete to nobody."""
    storage = storage_for(home.uri)
    storage.delete([f"{name}/{MANIFEST}" for name in complete(home.keys)])
    storage.delete(home.keys)
    if isinstance(storage, LocalStorage):
        shutil.rmtree(storage.directory, ignore_errors=True)  # what was on its way, and the lock
