"""A rehearsal of training on Google's and Azure's clouds: Flyte's prefixes are ``gs://`` and ``abfs://``.

The packaged command of the training task runs as a pod, is killed once it has saved, and runs again as the next
attempt.
"""

import time
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.literals_pb2 import LiteralMap
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.types.directory import FlyteDirectory

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.rendering import primary_container, raw_output, rendered, values_of
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.storage import download_all
from tests.support.faulty_stores import Remote
from tests.support.package import package

TRAIN = "tasks.train.train"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory = tmp_path_factory.mktemp("package")
    (directory / "one.toml").write_text("[stages.train]\nprocesses = 1\nretries = 1\n")
    return package(directory, str(directory / "one.toml")).tasks[TRAIN]


def put_inputs(remote: Remote, prepared: Path) -> None:
    for path in prepared.iterdir():
        remote.storage.put(f"prepared/{path.name}", path.read_bytes())
    inputs: dict[str, tuple[Any, type]] = {
        "prepared": (FlyteDirectory(f"{remote.base}/prepared", remote_directory=False), FlyteDirectory),
        "model": (ModelConfig("mlp", {"hidden": [16]}), ModelConfig),
        "training": (TrainingConfig(epochs=30, batch_size=50, patience=0, checkpoint_every=150), TrainingConfig),
        "code": ("", str),
    }
    context = FlyteContextManager.current_context()
    literals = {
        name: TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind)).to_flyte_idl()
        for name, (value, kind) in inputs.items()
    }
    remote.storage.put("inputs.pb", LiteralMap(literals=literals).SerializeToString())


def start(remote: Remote, template: Any, workdir: Path, name: str, attempt: int) -> PodProcess:
    container = primary_container(template)
    raw = raw_output(f"{remote.base}/raw", "stores", "n0", attempt)
    values = values_of(f"{remote.base}/inputs.pb", f"{remote.base}/{name}", raw)
    environment = {
        **remote.environment,
        "FLYTE_INTERNAL_EXECUTION_ID": "stores",
        "FLYTE_ATTEMPT_NUMBER": str(attempt),
        # gcsfs, with which flytekit transfers outputs, else asks Google what kind of bucket it is.
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        **container.environment,
    }
    return PodProcess.start(name, rendered(container.command, values), environment, workdir / name)


@pytest.mark.prove
@pytest.mark.parametrize("remote", ["gs", "abfs"], indirect=True)
def test_a_killed_training_pod_goes_on_where_its_store_is(remote: Remote, template: Any, tmp_path: Path) -> None:
    write_table(tmp_path / "prepared", "classification")
    put_inputs(remote, tmp_path / "prepared")
    pod = start(remote, template, tmp_path, "first", 0)
    deadline = time.monotonic() + 120
    while not any(key.endswith("/manifest.json") for key in remote.storage.list("raw/checkpoints/")):
        assert pod.running and time.monotonic() < deadline, pod.said()
        time.sleep(0.1)
    pod.kill()
    pod.finish()
    again = start(remote, template, tmp_path, "second", 1)
    said = again.finish()
    assert again.exit_code == 0 and "resumes from step" in said, said
    assert "second/error.pb" not in remote.storage.list("second"), said
    outputs = LiteralMap.FromString(remote.storage.get("second/outputs.pb", tmp_path).read_bytes())
    made = download_all(outputs.literals["artifact"].scalar.blob.uri, tmp_path / "made")
    assert (made / "best.safetensors").exists()
