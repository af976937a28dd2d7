"""Training with a compiled pass: results, no later compilation, refusals."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.pipeline.train import run as run_module
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.compiled import compile_blocks
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.pipeline.train.setup import suits_compilation
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.models.arithmetic import DeviceCapability
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.trained import Architecture
from tests.support.adapters import SIGNATURE, adapted_network, tokens
from tests.support.proving import first_few
from tests.support.training import log, rank_body, refusal, started, table_of_numbers, trained
from tests.support.wording import same_wording

COMPILER = shutil.which("g++")
#: 200 rows in batches of 48: the last is short.
ROWS = 200
COMPILED = TrainingConfig(epochs=3, batch_size=48, accumulation=2, compile=True, checkpoint_every=4)
#: Raises where anything is compiled a second time.
NEVER_AGAIN: dict[str, Any] = {"model": ModelConfig("tests.support.nets:never_compiled_again")}


@pytest.mark.prove
@pytest.mark.skipif(not COMPILER, reason="there is no g++")
def test_a_compiled_pass_computes_the_same_and_is_never_compiled_again(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", ROWS)
    plain = trained(data, tmp_path / "plain", 1, replace(COMPILED, compile=False), **NEVER_AGAIN)
    fast = trained(data, tmp_path / "fast", 1, COMPILED, **NEVER_AGAIN)
    one, other = (load_file(model / "last.safetensors") for model in (plain, fast))
    assert one.keys() == other.keys()
    assert all((one[name] - other[name]).abs().max() < 1e-4 for name in one)
    found = json.loads((fast / "attempt.json").read_text())["compiled"]
    assert (
        found.pop("recompilations") == 0
        and min(found.values()) > 0
        and "times as fast as without" in log(tmp_path / "fast")
    )
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


def as_on_a_gpu() -> None:
    vars(run_module)["suits_compilation"] = lambda *_: True


def body_without_a_compiler(rank: int, *arguments: Any) -> None:
    as_on_a_gpu()
    os.environ |= {"CXX": "/nowhere/g++", "PATH": "/nowhere"} if rank else {}
    rank_body(rank, *arguments)


def body_that_cannot_compile(rank: int, *arguments: Any) -> None:
    def refuse(*_: object) -> None:
        raise UserError("training.compile: the model cannot be compiled here")

    as_on_a_gpu()
    if rank:
        vars(run_module)["compile_for"] = refuse
    rank_body(rank, *arguments)


def body_as_on_a_gpu(rank: int, *arguments: Any) -> None:
    as_on_a_gpu()
    rank_body(rank, *arguments)


def stop(evaluations: Sequence[object]) -> bool:
    return len(evaluations) == 2


def compiled_pass(model: Path) -> object:
    return json.loads((model / "attempt.json").read_text())["compiled"]


@pytest.mark.skipif(not COMPILER, reason="there is no g++")
@pytest.mark.parametrize("body", first_few([body_without_a_compiler, body_that_cannot_compile]))
def test_what_one_rank_cannot_compile_no_rank_does(body: Callable[..., None], tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", ROWS)
    training = replace(COMPILED, compile="auto", epochs=1)
    model = trained(data, tmp_path / "run", 2, training, body=body)
    (line,) = (line for line in log(tmp_path / "run").splitlines() if "torch.compile" in line)
    same_wording(line.partition("train: ")[2] or line)
    assert compiled_pass(model) is None


@pytest.mark.prove
@pytest.mark.skipif(not COMPILER, reason="there is no g++")
def test_auto_goes_on_as_the_checkpoint_was_trained(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", ROWS)
    training = replace(COMPILED, compile="auto")
    model = trained(data, tmp_path / "fresh", 1, training, body=body_as_on_a_gpu)
    assert compiled_pass(model), "nothing speaks against it"
    for body in (rank_body, body_as_on_a_gpu):
        places = [tmp_path / f"{body.__name__}, {name}" for name in ("whole", "cut")]
        whole = trained(data, places[0], 1, training, body=body)
        for process in started(data, places[1], 1, training, told=stop, body=body):
            process.join(120)
        resumed = trained(data, places[1], 1, training, body=body_as_on_a_gpu)
        assert "training resumes from step" in log(places[1]) and "not bit for bit" not in log(places[1])
        assert bool(compiled_pass(resumed)) == bool(compiled_pass(whole)) == (body is body_as_on_a_gpu)
        ours, theirs = (load_file(model / "last.safetensors") for model in (resumed, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_auto_compiles_transformers_on_gpus() -> None:
    table = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b"))
    gpu, cpu = DeviceCapability(True, True), DeviceCapability(False, False)
    cases = {
        (True, gpu): Architecture(ModelConfig(), SIGNATURE),
        (False, cpu): Architecture(ModelConfig("transformer"), SIGNATURE),
        (False, gpu): Architecture(ModelConfig(), table),
    }
    for (expected, device), architecture in cases.items():
        assert suits_compilation(architecture, [gpu, device]) == expected
    assert not suits_compilation(Architecture(ModelConfig("tests.support.nets:causal"), SIGNATURE), [gpu])


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
