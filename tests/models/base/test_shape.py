"""Arguments of a model that starts from a base."""

import json
from dataclasses import fields
from pathlib import Path

import pytest

from slipstream.shared.models.base import shape
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.transformer_config import TransformerConfig
from tests.support.bases import VOCABULARY, make_base, shaped_by_data, shaped_by_length


def test_all_arguments_are_the_bases_but_the_users_own(tmp_path: Path) -> None:
    base = str(make_base(tmp_path / "base", "qwen3", rms_norm_eps=3e-6, rope_theta=7e5))
    given = ModelConfig(base=base, arguments={"initializer_range": 0.5}, lora=LoraConfig(rank=4))
    shaped = shaped_by_length(given)
    assert shaped.name == "transformer" and shaped.base == base and shaped.lora.rank == 4
    assert set(shaped.arguments) == {one.name for one in fields(TransformerConfig)}
    expected = {"model_type": "qwen3", "vocab_size": VOCABULARY, "head_dim": 16, "num_key_value_heads": 2}
    expected |= {"rms_norm_eps": 3e-6, "rope_theta": 7e5, "initializer_range": 0.5, "max_position_embeddings": 64}
    assert shaped.arguments.items() >= expected.items()
    assert ModelConfig.from_dict(json.loads(json.dumps(vars(shaped), default=vars))) == shaped


def test_once_it_is_there_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shaped = shaped_by_length(ModelConfig(base=str(make_base(tmp_path / "base"))))
    monkeypatch.setattr(shape, "BaseDirectory", None)
    assert shaped_by_length(shaped) is shaped and shaped_by_data(shaped) is shaped
    plain = ModelConfig("mlp")
    assert shaped_by_length(plain) is plain and shaped_by_data(plain) is plain


def test_more_positions_than_a_row_has_are_fine_and_may_be_stretched(tmp_path: Path) -> None:
    base = ModelConfig(base=str(make_base(tmp_path / "base")))
    assert shaped_by_length(base, 64).arguments["max_position_embeddings"] == 64
    longer = ModelConfig(base=base.base, arguments={"max_position_embeddings": 100})
    assert shaped_by_length(longer, 100).arguments["max_position_embeddings"] == 100


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen3")
    content = json.loads((base / "config.json").read_text())
    for name in ("rms_norm_eps", "head_dim", "rope_parameters", "rope_scaling", "rope_theta", "tie_word_embeddings"):
        content.pop(name, None)
    (base / "config.json").write_text(json.dumps(content))
    found = shaped_by_length(ModelConfig(base=str(base))).arguments
    assert (found["rms_norm_eps"], found["head_dim"], found["rope_theta"]) == (1e-6, 128, 10_000.0)
    assert found["tie_word_embeddings"] is False
