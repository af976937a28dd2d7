"""The door of preprocess."""

from __future__ import annotations

from pathlib import Path

from flytekit import task

from tasks.artifact import Artifact
from tasks.hardware.on import on
from tasks.preprocess.config import DataConfig
from tasks.settings import to_dict
from tasks.stage import STORE, Made, run_stage, runs_locally
from tasks.store import Store
from tasks.versions import code_version


@task(**on("fingerprint"))
def fingerprint(data: str = "", target: str = "", config: DataConfig = DataConfig()) -> str:  # noqa: B008
    """What identifies the raw data right now. Never cached: new bytes behind the same name are new work."""
    from tasks.preprocess.sources import fingerprint_source

    return fingerprint_source(data, target)


@task(**on("prepare"))
def prepare(data: str, target: str, config: DataConfig, source: str) -> Made:
    """Make the prepared data; ``source`` is the fingerprint of what ``data`` names."""

    def make(directory: Path, key: str) -> Artifact:
        from tasks.preprocess import engine
        from tasks.preprocess.workers import workers_for

        made_by = {"config": to_dict(config), "code": code_version("prepare"), "source": source, "target": target}
        kept = Store(STORE).checkpoints("prepare", key) if runs_locally() else None
        return engine.prepare(directory, data, target, config, made_by, workers_for(data), kept)

    return run_stage("prepare", {"data": data, "target": target, "config": config, "source": source}, make)
