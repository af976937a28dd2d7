"""Training whose data and checkpoints are in Google's or Azure's store, killed while the store answers badly."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.operations.proofs.processes import free_port
from slipstream.pipeline.train.command import main as train
from tests.support.command_line import invoke
from tests.support.faulty_stores import Remote
from tests.support.proving import first_few

STORES = ("gs", "abfs")


@pytest.mark.prove
@pytest.mark.parametrize("remote", STORES, indirect=True)
def test_a_killed_run_goes_on_from_the_store(
    remote: Remote, prepared: Path, tmp_path: Path, undisturbed: Callable[[int], dict[str, str]]
) -> None:
    job = TrainingJob(prepared, tmp_path, 2, f"{remote.base}/home", environment=remote.environment)
    remote.proxy.inject(remote.write, "500", "reset", "lost", "pass", "503", "corrupt")
    assert run_attempt(job, InjectedFault("step", rank=0, at=14)).fired == 1
    remote.proxy.inject("GET", "truncate", "503", "reset", "truncate", "500")
    assert run_attempt(job).finished
    assert not remote.proxy.plan and len(remote.proxy.fired) == 11
    assert "resumes from step" in (tmp_path / "log-0").read_text()
    assert result_digests(job) == undisturbed(2)


@pytest.mark.parametrize("remote", first_few(STORES), indirect=True)
def test_training_streams_from_the_store_what_it_reads_locally(remote: Remote, prepared: Path, tmp_path: Path) -> None:
    for path in prepared.iterdir():
        remote.storage.put(f"prepared/{path.name}", path.read_bytes())
    weights = {}
    for name, data in {"local": str(prepared), "streamed": f"{remote.base}/prepared"}.items():
        kept = f"{remote.base}/{name}" if name == "streamed" else str(tmp_path / name)
        settings = {"epochs": 1, "batch_size": 64, "checkpoint_every": 9, "checkpoint_uri": kept}
        (tmp_path / "run.yaml").write_text(json.dumps({"training": settings}))
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        environment = {**remote.environment, **place, "MASTER_PORT": str(free_port())}
        ended = invoke(train, tmp_path, [data, f"model-{name}", "run.yaml"], environment)
        assert ended.returncode == 0, ended.stdout
        weights[name] = hashlib.sha256((tmp_path / f"model-{name}" / "last.safetensors").read_bytes()).hexdigest()
    assert weights["local"] == weights["streamed"]
    assert any(key.startswith("streamed/step-") for key in remote.storage.list())
