"""Throughput and model FLOPs utilisation: counted operations and peak rates."""

import json
from pathlib import Path

import pytest
import torch

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.device_clock import compute_throughput, measured_peak
from slipstream.pipeline.train.loop.probe import probe_model
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from tests.support.groups import ALONE
from tests.support.training import table_of_numbers, trained
from tests.support.worker_groups import in_group

CPU = torch.device("cpu")


def test_the_products_of_a_table_network_are_counted_by_hand() -> None:
    signature = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
    network = build_model(ModelConfig("tests.support.nets:batch_norm"), signature, 0)
    first, second = 2 * 5 * 12, 2 * 12 * 3
    # A product for the outputs, one for the gradient of the weights, one for that of the inputs unless they are data.
    assert probe_model(network, CPU).flops_per_row == 2 * first + 3 * second


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_transformers_are_six_for_each_weight_and_token_and_those_of_attention(device: str) -> None:
    length, hidden, layers, vocabulary = 32, 64, 2, 96
    sizes = {"hidden_size": hidden, "intermediate_size": 128, "num_hidden_layers": layers, "num_attention_heads": 4}
    signature = Signature((TensorSpec("tokens", "int64", (length,)),), "next token", "next token", buckets=vocabulary)
    model = build_model(ModelConfig("transformer", sizes), signature, 0, empty=device == "meta")
    matrices = sum(p.numel() for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name)
    products = 6 * matrices * length
    # Scores and their products with the values, and twice that backward (Chowdhery et al.: 12 L H Q T for each token).
    attention = 12 * layers * hidden * length * length
    assert probe_model(model, torch.device(device)).flops_per_row == products + attention


def test_the_figures_are_of_all_processes() -> None:
    alone = in_group(1, figures)
    both = in_group(2, figures)
    assert both.rows_per_s == alone.rows_per_s == 250 and both.tokens_per_s == 2000
    assert both.utilisation == pytest.approx(250 * 1e6 / both.peak_flops)
    assert both.peak_flops == 2e9 and alone.peak_flops == 1e9
    assert 50e6 < both.memory_bytes < 10e9


def figures(child: object) -> object:
    import torch.distributed as dist

    from slipstream.pipeline.train import device_clock as module

    module.measured_peak = lambda device, kind: 1e9
    group = RankContext(dist.get_rank(), dist.get_world_size(), CPU, "gloo")
    return compute_throughput(rows=1000, seconds=4.0, tokens_per_row=8, flops_per_row=1e6, kind="fp32", group=group)


def test_a_measured_peak_is_what_a_product_reaches() -> None:
    assert 1e8 < measured_peak(CPU, "fp32") < 1e13


def test_without_a_step_there_is_no_figure() -> None:
    group = ALONE
    assert compute_throughput(rows=0, seconds=1, tokens_per_row=0, flops_per_row=1, kind="fp32", group=group) is None


@pytest.mark.prove
def test_the_trained_model_says_it(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", 512)
    model = trained(data, tmp_path / "run", 1, TrainingConfig(epochs=2, batch_size=64))
    found = json.loads((model / "attempt.json").read_text())["throughput"]
    assert found["rows_per_s"] > 0 and 0 < found["utilisation"] < 1 and found["peak_from"] == "measured"
