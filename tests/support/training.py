"""Training in fresh processes, and a small table to train on."""

import os
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.operations.proofs.processes import FORK, free_port
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import TARGET, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.models.config import ModelConfig

SMALL = ModelConfig(arguments={"hidden": [16]})


def table_of_numbers(
    directory: Path, rows: int, spoilt: Mapping[int, float] | None = None, split: str = "train"
) -> Path:
    """Prepared data of five numbers and three classes, a standard deviation apart. The rows in ``spoilt`` of ``split``
    have that value for their first number."""
    signature = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
    writer = ArtifactWriter(directory)
    for seed, (name, count) in enumerate({"train": rows, "validation": 90, "test": 30}.items()):
        generator = np.random.default_rng(seed)
        records = np.zeros(count, signature.record)
        records[TARGET] = generator.integers(0, 3, count)
        records["numeric"] = generator.normal(size=(count, 5)) + records[TARGET][:, None]
        if name == split:
            for row, value in (spoilt or {}).items():
                records["numeric"][row, 0] = value
        with writer.create(f"{name}-00000.rows", 64 * signature.record.itemsize) as file:
            file.write(records.tobytes())
    write_record(writer, "signature.json", signature)
    writer.finish("prepare", {})
    return directory


def rank_body(rank: int, world: int, port: int, settings: dict[str, Any], environment: dict[str, str]) -> None:
    import torch

    from slipstream.pipeline.train.request import TrainingRequest
    from slipstream.pipeline.train.run import run_attempt
    from slipstream.shared.distributed.user_errors import torch_user_error
    from slipstream.shared.errors import UserError

    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()} | environment)
    log = os.open(f"{settings['directory']}.log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)  # several ranks and tests share the cores
    try:
        run_attempt(TrainingRequest(**settings))
    except Exception as error:
        refused = error if isinstance(error, UserError) else torch_user_error(error)
        if refused is None:
            raise
        Path(f"{settings['directory']}.refused{rank}").write_text(refused.message)


def started(
    prepared: Path,
    place: Path,
    world: int,
    training: TrainingConfig,
    model: ModelConfig = SMALL,
    environment: dict[str, str] | None = None,
    body: Callable[..., None] = rank_body,
    **more: Any,
) -> list[BaseProcess]:
    """Start training in ``world`` processes that run ``body``. ``more`` goes into the request."""
    settings = {
        "prepared": prepared,
        "model": model,
        "training": training,
        "directory": place / "model",
        "home": str(place / "checkpoints"),
        "made_by": {},
        **more,
    }
    place.mkdir(exist_ok=True)
    port = free_port()
    # Daemons: a hanging process fails its test and ends with the tests.
    arguments = [(rank, world, port, settings, environment or {}) for rank in range(world)]
    ranks: list[BaseProcess] = [FORK.Process(target=body, args=a, daemon=True) for a in arguments]
    for process in ranks:
        process.start()
    return ranks


def trained(prepared: Path, place: Path, world: int, *settings: Any, **more: Any) -> Path:
    """:func:`started`, and waited for; return the directory of the model, if no rank refused (:func:`refusal`)."""
    ranks = started(prepared, place, world, *settings, **more)
    for process in ranks:
        process.join(timeout=120)
    assert [process.exitcode for process in ranks] == [0] * world, log(place)
    return place / "model"


def refusal(place: Path, rank: int) -> str:
    """The one line with which a rank refused."""
    return (place / f"model.refused{rank}").read_text()


def log(place: Path, rank: int = 0) -> str:
    return (place / f"model.log{rank}").read_text()
