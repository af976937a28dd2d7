"""Documents that share a row attend only to themselves."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import EXAMPLE_ROWS, to_onnx
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.token_rows import attention_mask

LENGTH, END = 12, 9
SIGNATURE = Signature(
    (TensorSpec("tokens", "int16", (LENGTH,)),), "next token", "next token", buckets=10, document_end=END
)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}


def small_model(signature: Signature = SIGNATURE) -> Predictor:
    return build_model(ModelConfig("transformer", {**SIZES, "num_key_value_heads": 2}), signature, seed=1).eval()


def row(*tokens: int) -> torch.Tensor:
    return torch.tensor([tokens], dtype=torch.int16)


def test_a_place_attends_to_its_document_up_to_itself() -> None:
    mask = attention_mask(torch.tensor([[1, 2, END, 3, 4]]), END)[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]]


def test_what_goes_before_a_document_does_not_count_but_across_documents() -> None:
    model, across = small_model(), small_model(replace(SIGNATURE, document_end=-1))
    one, other = row(1, 2, 3, 4, END, 5, 6, 7, 8, 5, 6, 7), row(8, 7, 6, 5, END, 5, 6, 7, 8, 5, 6, 7)
    with torch.no_grad():
        assert torch.equal(model(one)[0, 4:], model(other)[0, 4:])
        assert not torch.allclose(across(one)[0, 4:], across(other)[0, 4:])
        alone = model(row(END, 5, 6, 7, 8, 5, 6, 7, 0, 0, 0, 0))
    # Positions are relative: it is the same wherever in a row it lies.
    torch.testing.assert_close(model(one)[0, 4:], alone[0, :8], atol=1e-5, rtol=1e-4)


@pytest.mark.prove
def test_it_is_exported_as_it_is(tmp_path: Path) -> None:
    import onnxruntime

    model, rows = small_model(), np.random.default_rng(0).integers(0, 10, (3, LENGTH)).astype(np.int16)
    rows[:, 2] = -1 - rows[:, 2]
    path = tmp_path / "model.onnx"
    to_onnx(model, SIGNATURE, [rows[:EXAMPLE_ROWS]], ExportConfig().opset, path)
    (found,) = onnxruntime.InferenceSession(path).run(None, {"tokens": rows})
    with torch.no_grad():
        np.testing.assert_allclose(found, model(torch.from_numpy(rows)).numpy(), atol=1e-4)
