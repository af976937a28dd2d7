"""Models with special needs: batch normalisation, unused parameters, fixed shapes."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.numpy import load_file

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.probe import probe_model
from slipstream.pipeline.train.loop.state import copy_weights
from slipstream.pipeline.train.loop.step import micro_batches, padded_rows, whole_micro_batches
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.distributed.user_errors import torch_user_error
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import BATCH_BYTES, Predictor, batch_rows, build_model
from slipstream.shared.models.tables_and_images import MLP
from tests.support import nets
from tests.support.groups import on_cpu
from tests.support.layout_runs import on_ranks
from tests.support.training import refusal, table_of_numbers, trained
from tests.support.wording import same_wording

CPU = torch.device("cpu")
NETS = "tests.support.nets:"
ROWS = 257  # with a batch of 64 an epoch's tail is a single row: of two ranks one has none


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("data") / "prepared", ROWS)


def steps(model: Path) -> list[float]:
    return [point["loss"] for point in json.loads((model / "history.json").read_text())["steps"]]


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.prove), 3])
def test_batch_normalisation_trains_though_a_rank_has_a_row_or_none(
    prepared: Path, tmp_path: Path, accumulation: int
) -> None:
    config = TrainingConfig(epochs=3, batch_size=64, patience=0, accumulation=accumulation, learning_rate=0.05)
    model = trained(prepared, tmp_path, 2, config, ModelConfig(f"{NETS}batch_norm"))
    assert steps(model)[-2] < 0.8 * steps(model)[0], "the last point is that of a single row"
    seen = load_file(model / "last.safetensors")["network.layers.1.num_batches_tracked"]
    # Rank 0's: of the last batch of each epoch, a single row, it has none, and its zeros change no statistics.
    assert seen == 3 * 4 * accumulation


@pytest.mark.prove
@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.prove), 2])
def test_parameters_that_take_no_part_stay_as_they_are(prepared: Path, tmp_path: Path, world: int) -> None:
    config = TrainingConfig(epochs=2, batch_size=64, patience=0)
    model = trained(prepared, tmp_path, world, config, ModelConfig(f"{NETS}with_unused"))
    initial = build_model(ModelConfig(f"{NETS}with_unused"), numbers_signature(), seed=0).state_dict()
    last = load_file(model / "last.safetensors")
    assert (last["network.extra.weight"] == initial["network.extra.weight"].numpy()).all()
    assert (last["network.layers.0.weight"] != initial["network.layers.0.weight"].numpy()).any()


def test_parameters_that_take_part_in_some_batches_only_are_refused_in_one_line(prepared: Path, tmp_path: Path) -> None:
    config = TrainingConfig(epochs=5, batch_size=4, patience=0)
    trained(prepared, tmp_path, 1, config, ModelConfig(f"{NETS}with_sometimes_unused"))
    same_wording(refusal(tmp_path, 0))


@pytest.mark.prove
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.prove), 3])
def test_micro_batches_have_one_shape(prepared: Path, tmp_path: Path, accumulation: int) -> None:
    config = TrainingConfig(epochs=2, batch_size=64, patience=0, accumulation=accumulation)
    environment = {"NOTES": str(tmp_path / "notes")}
    trained(prepared, tmp_path, 1, config, ModelConfig(f"{NETS}notes_shapes"), environment)
    noted = (tmp_path / "notes").read_text().split()
    assert set(noted) == {str(-(-64 // accumulation))} and len(noted) >= 2 * 5


def test_shares_are_cut_into_slices_of_one_length_and_batch_statistics_never_stand_alone() -> None:
    for largest in range(1, 40):
        for accumulation in range(1, 9):
            rows = padded_rows(largest, accumulation)
            pieces = micro_batches(rows, accumulation)
            assert len(pieces) <= accumulation and len({piece.stop - piece.start for piece in pieces}) == 1
            assert pieces[-1].stop == rows < largest + -(-largest // accumulation)
            pieces = whole_micro_batches(largest, accumulation)
            assert len(pieces) <= accumulation and pieces[-1].stop == largest
            assert largest == 1 or min(piece.stop - piece.start for piece in pieces) >= 2


def numbers_signature() -> Signature:
    return Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))


def test_a_probe_finds_what_a_model_needs_and_leaves_it_as_it_was() -> None:
    signature = numbers_signature()
    torch.manual_seed(3)
    model = Predictor(signature, nets.batch_norm(signature))
    before, random = copy_weights(model), torch.get_rng_state()
    traits = probe_model(model, CPU)
    assert traits.has_batch_statistics and traits.unused == ()
    assert traits.changing == tuple(
        f"network.layers.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")
    )
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state()) and all(p.grad is None for p in model.parameters())
    plain = probe_model(Predictor(signature, MLP(signature)), CPU)
    assert plain.changing == plain.unused == () and not plain.has_batch_statistics
    assert probe_model(Predictor(signature, nets.with_unused(signature)), CPU).unused == (
        "network.extra.weight",
        "network.extra.bias",
    )


def check_buffers() -> None:
    from slipstream.pipeline.train.parallel.replicas import replicate_model

    signature = numbers_signature()
    for network in (MLP(signature), nets.batch_norm(signature), nets.with_unused(signature)):
        model = Predictor(signature, network)
        ddp = replicate_model(model, probe_model(model, CPU), on_cpu(dist.get_rank(), 2)).ddp
        assert ddp and [*ddp.buffers()] and not ddp.will_sync_module_buffers()


@pytest.mark.prove
def test_no_buffer_is_broadcast_before_every_forward_pass(tmp_path: Path) -> None:
    on_ranks(2, check_buffers, tmp_path)


def test_a_larger_model_is_evaluated_on_fewer_rows() -> None:
    small = build_model(ModelConfig(arguments={"hidden": [16]}), numbers_signature(), 0)
    wide = build_model(ModelConfig(arguments={"hidden": [200_000]}), numbers_signature(), 0)
    assert batch_rows(small.row_bytes) == 1024
    # Linear, LayerNorm and ReLU each leave as many numbers.
    assert 3 * 4 * 200_000 <= wide.row_bytes <= 6 * 4 * 200_000
    assert 1 < batch_rows(wide.row_bytes) <= BATCH_BYTES // (3 * 4 * 200_000)
    assert batch_rows(2 * BATCH_BYTES) == 1


def test_too_little_memory_is_a_mistake_and_no_bug() -> None:
    with pytest.raises(RuntimeError) as failed:
        torch.empty(2**48)
    mistake = torch_user_error(failed.value)
    assert mistake is not None and mistake.message.startswith("training.accumulation:")
    assert torch_user_error(RuntimeError("a bug")) is None


def test_an_operation_without_a_deterministic_kernel_is_refused_in_one_line() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError) as failed:
            torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))
    finally:
        torch.use_deterministic_algorithms(False)
    mistake = torch_user_error(failed.value)
    assert mistake is not None and mistake.message.startswith("training.deterministic:")
    same_wording(mistake.message)
