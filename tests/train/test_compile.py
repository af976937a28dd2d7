"""Training with a compiled pass: results, no later compilation, refusals."""

import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.compiled import compile_blocks
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor
from tests.support.adapters import SIGNATURE, adapted_network, tokens
from tests.support.training import log, refusal, table_of_numbers, trained
from tests.support.wording import same_wording

COMPILER = shutil.which("g++")
#: 200 rows in batches of 48: the last is short.
ROWS = 200
COMPILED = TrainingConfig(epochs=3, batch_size=48, accumulation=2, compile=True, checkpoint_every=4)
#: Raises where anything is compiled a second time.
NEVER_AGAIN: dict[str, Any] = {"model": ModelConfig("tests.support.nets:never_compiled_again")}


@pytest.mark.skipif(not COMPILER, reason="there is no g++")
def test_a_compiled_pass_computes_the_same_and_is_never_compiled_again(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", ROWS)
    plain = trained(data, tmp_path / "plain", 1, replace(COMPILED, compile=False), **NEVER_AGAIN)
    fast = trained(data, tmp_path / "fast", 1, COMPILED, **NEVER_AGAIN)
    one, other = (load_file(model / "last.safetensors") for model in (plain, fast))
    assert one.keys() == other.keys()
    assert all((one[name] - other[name]).abs().max() < 1e-4 for name in one)
    found = json.loads((fast / "attempt.json").read_text())["compiled"]
    assert min(found.values()) > 0 and "times as fast as without" in log(tmp_path / "fast")
    assert json.loads((plain / "attempt.json").read_text())["compiled"] is None


@pytest.mark.prove
@pytest.mark.skipif(not COMPILER, reason="there is no g++")
def test_a_compiled_training_that_was_killed_ends_the_same(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", 600)
    jobs = []
    for name in ("whole", "killed"):
        home = str(tmp_path / name / "home")
        jobs.append(
            TrainingJob(data, tmp_path / name, 2, home, training={"compile": True}, patience_s=60, accumulation=2)
        )
    whole, killed = jobs
    assert run_attempt(whole).finished
    assert run_attempt(killed, InjectedFault("step", rank=0, at=14)).fired == 1
    assert run_attempt(killed).finished
    assert "resumes from step" in (killed.place / "log-0").read_text()
    assert result_digests(killed) == result_digests(whole)


@pytest.mark.prove
@pytest.mark.skipif(not COMPILER, reason="there is no g++")
def test_compiled_adapters_beside_four_bits_have_the_same_gradients() -> None:
    model = ReplicatedModel(Predictor(SIGNATURE, adapted_network(nf4=True)).train())
    batch = (tokens(4),)

    def gradients() -> list[torch.Tensor]:
        model.accumulate(batch, [slice(0, 4)], lambda outputs, _: outputs.square().mean())
        found = [p.grad.clone() for p in model.model.parameters() if p.grad is not None]
        model.model.zero_grad(set_to_none=True)
        return found

    plain = gradients()
    compile_blocks(model, batch, [slice(0, 4)], nullcontext)
    compiled = gradients()
    assert len(plain) == len(compiled) == 2 * 14
    assert any(not torch.equal(one, other) for one, other in zip(plain, compiled, strict=True)), "compiled"
    for one, other in zip(plain, compiled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_without_a_compiler_it_is_one_line(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", ROWS)
    place = tmp_path / "run"
    environment = {"CXX": "/nowhere/g++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "PATH": "/nowhere"}
    trained(data, place, 1, COMPILED, environment=environment)
    same_wording(refusal(place, 0))
    assert "\n" not in refusal(place, 0)


@pytest.mark.prove
def test_batch_normalisation_is_not_compiled(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", ROWS)
    trained(data, tmp_path / "run", 1, COMPILED, ModelConfig("tests.support.nets:batch_norm"))
    same_wording(refusal(tmp_path / "run", 0))
