"""A killed training of adapters ends bit for bit like an undisturbed one."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.models.adapters.layers import is_adapter
from slipstream.shared.models.config import LoraConfig, ModelConfig
from tests.support.adapted_runs import SIZES
from tests.support.bases import LENGTH, make_base
from tests.support.corpora import prepare_language, write_stories

FSDP, PIPELINE = ParallelConfig(shard="weights"), ParallelConfig(pipeline=2)
STEPS = 8


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "base", **SIZES)


@pytest.fixture(scope="module")
def data(base: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    place = tmp_path_factory.mktemp("data")
    stories = write_stories(place / "stories", 40)
    return prepare_language(place / "prepared", stories, tokenizer=str(base), length=LENGTH)


def killed_and_not(job: TrainingJob, place: Path, at: int) -> tuple[TrainingJob, TrainingJob]:
    """Both were run: the one was killed amid its ``at``-th step and resumed, the other was not."""
    whole, killed = (
        dataclasses.replace(job, place=place / n, home=str(place / n / "home")) for n in ("whole", "killed")
    )
    assert run_attempt(whole).finished
    struck = run_attempt(killed, InjectedFault("step", rank=job.world - 1, at=at))
    assert struck.fired == 1 and not struck.finished
    assert run_attempt(killed).finished
    assert "resumes from step" in (killed.place / "log-0").read_text()
    return whole, killed


@pytest.mark.prove
@pytest.mark.parametrize(
    ("world", "quantise", "training"),
    [
        (2, "nf4", {"parallel": FSDP}),
        (2, "none", {}),
        (2, "none", {"parallel": FSDP}),
        (2, "nf4", {}),
        (2, "nf4", {"precision": "bf16"}),
        (3, "nf4", {"parallel": FSDP, "precision": "bf16"}),
        (2, "nf4", {"parallel": PIPELINE}),
    ],
)
def test_killed_amid_a_step_it_ends_the_same(
    world: int, quantise: Any, training: dict[str, Any], base: Path, data: PreparedData, tmp_path: Path
) -> None:
    """With dropout, whose numbers are drawn again where blocks are recomputed."""
    model = ModelConfig(base=str(base), lora=LoraConfig(4, dropout=0.1), quantise=quantise)
    more = {"recompute": "full", "learning_rate": 1e-2, **training}
    job = TrainingJob(
        data.artifact.directory, tmp_path, world, "", STEPS, 2, accumulation=2, model=model, training=more
    )
    whole, killed = killed_and_not(job, tmp_path, at=8)
    assert result_digests(killed) == result_digests(whole)
    weights = load_file(whole.output / "last.safetensors")
    assert weights and all(map(is_adapter, weights))
    assert all(tensor.any() for tensor in weights.values())
