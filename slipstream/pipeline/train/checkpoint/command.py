"""``slipstream checkpoints``: list the checkpoint directories below a store, and delete unused ones."""

from __future__ import annotations

import shutil
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import click

from slipstream.pipeline.train.checkpoint.home import (
    CLAIMS,
    DECISION,
    FINISHED,
    INHERITED,
    LATEST,
    LEASES,
    CheckpointDirectory,
    CheckpointName,
    complete_checkpoints,
    lease_key,
    newest_attempt,
)
from slipstream.pipeline.train.checkpoint.lease import Heartbeat, is_locked, is_unlocked, last_heartbeat
from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.artifacts.workspaces import HOMES, STORE, Holder
from slipstream.shared.formatting import age, aligned_table, size_text
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.storage import STORES, ObjectInfo, list_objects, storage_for, store_time
from slipstream.shared.storage.local import LocalStorage, local_path

#: Names in a checkpoint directory besides its checkpoints, by which :func:`split_path` recognises the directory.
PARTS = {CLAIMS, INHERITED, LEASES, "ledger/", "devices/", DECISION, FINISHED, LATEST}
COLUMNS = ("training", "size", "last written", "step", "state", "holder")


@dataclass(frozen=True)
class CheckpointDirectorySummary:
    """Summary of one training's checkpoint directory."""

    #: Address of the directory.
    uri: str
    #: Path of the directory below the common root: project, domain and key, or the key alone.
    name: str
    files: Mapping[str, ObjectInfo]
    bytes: int
    #: Time of the last write, in seconds of the store's clock.
    modified: float
    #: Step of the newest checkpoint; None without any.
    step: int | None
    holder: Holder
    #: "finished", "ended" (exit record, or no lease at all), "at work", or "lost" (no heartbeats, no exit record).
    state: str


def homes_below(base: str, now: float) -> list[CheckpointDirectorySummary]:
    """Return all checkpoint directories below ``base``, the last written first.

    ``now`` is the current time of the store's clock. Raises ``UserError``, ``StorageUnavailable``.
    """
    files_of_home: dict[str, dict[str, ObjectInfo]] = defaultdict(dict)
    for info in list_objects(f"{base}/"):
        name, key = split_path(info.uri.removeprefix(f"{base}/"))
        if key:
            files_of_home[name][key] = info
    homes = [summarise_directory(base, name, files, now) for name, files in files_of_home.items()]
    return sorted(homes, key=lambda home: (-home.modified, home.name))


def split_path(path: str) -> tuple[str, str]:
    """Split a path into a checkpoint directory's name and a key in it.

    The key is empty for a path outside of checkpoint directories.
    """
    parts = path.split("/")
    for index, part in enumerate(parts):
        if index and (part in PARTS or f"{part}/" in PARTS or CheckpointName.parse(part)):
            return "/".join(parts[:index]), "/".join(parts[index:])
    return path, ""


def summarise_directory(
    base: str, name: str, listed: Mapping[str, ObjectInfo], now: float
) -> CheckpointDirectorySummary:
    home = CheckpointDirectory(storage_for(f"{base}/{name}"))
    checkpoints, attempt = complete_checkpoints(listed), newest_attempt(listed)
    modified = max(info.modified for info in listed.values())
    finished = home.finished() if FINISHED in listed else None
    sign = last_heartbeat(home, attempt) if lease_key(attempt) in listed else None
    if finished:
        state = "finished"
    elif sign is None or sign.ended:
        state = "ended"
    elif home.is_local and not sign.delivering and is_unlocked(home.storage):
        state = "lost"
    else:
        state = "at work" if now - modified < Heartbeat().silence_s else "lost"
    return CheckpointDirectorySummary(
        f"{base}/{name}",
        name,
        listed,
        sum(info.size for info in listed.values()),
        modified,
        checkpoints[0].step if checkpoints else None,
        finished.holder if finished else home.holder_of(attempt),
        state,
    )


def reason_to_keep(home: CheckpointDirectorySummary) -> str:
    """Return why the checkpoint directory ``home`` seems to be in use; "" if it does not.

    Reasons are a lock, and writes since ``home`` was listed.
    """
    if is_locked(storage_for(home.uri)):
        return "a process holds its lock"
    listed = {info.uri.removeprefix(f"{home.uri}/"): info for info in list_objects(f"{home.uri}/")}
    return "" if file_versions(listed) == file_versions(home.files) else "it was written to in the meantime"


def file_versions(files: Mapping[str, ObjectInfo]) -> set[tuple[str, str, float]]:
    """Return keys, ETags and times of files, to detect writes by comparison."""
    return {(key, info.etag, info.modified) for key, info in files.items()}


def delete_directory(home: CheckpointDirectorySummary) -> None:
    """Delete a checkpoint directory, manifests first: a partly deleted checkpoint must not look complete."""
    storage = storage_for(home.uri)
    storage.delete([f"{name}/{MANIFEST}" for name in complete_checkpoints(home.files)])
    storage.delete(home.files)
    if isinstance(storage, LocalStorage):
        shutil.rmtree(storage.directory, ignore_errors=True)  # incomplete files and the lock


@click.command()
@click.argument("store", default="")
@click.option(
    "--free",
    "frees",
    is_flag=True,
    help="Delete unused checkpoint directories older than the profile's checkpoint_days.",
)
def main(store: str, frees: bool) -> None:
    """List the checkpoint directories below STORE: a local directory, or the prefix of Flyte's raw output.

    STORE defaults to the profile's setting, or .slipstream. Finished trainings have no checkpoints any more.

    Example: slipstream checkpoints s3://flyte/raw --free
    """
    asked = current_profile().placement("train")
    store = store or asked.checkpoints or str(STORE)
    base = f"{store.rstrip('/')}/{HOMES}" if store.startswith(STORES) else str(local_path(store) / HOMES)
    now = store_time(f"{base}/")
    homes = homes_below(base, now)
    if not homes:
        click.echo(f"no checkpoints below {store}")
        return
    click.echo(aligned_table(COLUMNS, [row(home, now) for home in homes], left=("training", "state", "holder")))
    old = [home for home in homes if now - home.modified > asked.checkpoint_days * 86_400]
    if not frees:
        if old:
            click.echo(
                f"{len(old)} of {len(homes)} checkpoint directories are older than {asked.checkpoint_days:g} days: "
                "--free deletes them"
            )
        return
    freed = free_unused(old, now)
    click.echo(
        f"freed {len(freed)} of {len(homes)} checkpoint directories, {size_text(sum(home.bytes for home in freed))}"
    )


def free_unused(homes: Sequence[CheckpointDirectorySummary], now: float) -> list[CheckpointDirectorySummary]:
    """Delete the checkpoint directories among ``homes`` that no process uses, and return them.

    A wrong clock can make a directory look old. So all are checked again after waiting for the timeout of a lease, in
    which a living holder writes a heartbeat.
    """
    if homes:
        click.echo(
            f"waiting {Heartbeat().silence_s:.0f} s (the timeout of a lease) for heartbeats: "
            "directories in use are kept"
        )
        time.sleep(Heartbeat().silence_s)
    freed = []
    for home in homes:
        if reason := reason_to_keep(home):
            click.echo(f"kept {home.uri}: {reason}, so it is in use")
            continue
        delete_directory(home)
        click.echo(f"freed {home.uri}: {size_text(home.bytes)}, {age(now - home.modified)} old")
        freed.append(home)
    return freed


def row(home: CheckpointDirectorySummary, now: float) -> list[str]:
    step = "-" if home.step is None else str(home.step)
    return [
        home.name,
        size_text(home.bytes),
        f"{age(now - home.modified)} ago",
        step,
        home.state,
        str(home.holder),
    ]
