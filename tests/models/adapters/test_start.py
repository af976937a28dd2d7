"""Training that starts from an adapter in peft's files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from slipstream.config import RunConfig
from slipstream.shared.artifacts.prepared.token_rows import ADAPTER, ADAPTER_CONFIG
from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.peft_files import NewAdapter, peft_files
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import build_model, initial_values
from slipstream.shared.settings import to_dict
from tasks.config import config_sections
from tests.support.adapters import adapters_of, draw_adapters
from tests.support.bases import SIGNATURE, fingerprint_base, make_base, shaped_by_data, some_tokens
from tests.support.wording import refuses

LORA = LoraConfig(rank=4, alpha=6.0, targets=["v_proj", "down_proj"])


@pytest.fixture
def model(tmp_path: Path) -> ModelConfig:
    """Model of a base and an adapter for it in the same directory."""
    base = str(make_base(tmp_path / "base", tokenizer=False))
    network = build_model(ModelConfig(base=base, lora=LORA), SIGNATURE, 0).network
    draw_adapters(network)
    (tmp_path / "adapter").mkdir()
    for name, content in peft_files(NewAdapter(LORA, base, adapters_of(network))).items():
        (tmp_path / "adapter" / name).write_bytes(content)
    return ModelConfig(base=base, lora=replace(LORA, start=str(tmp_path / "adapter")))


def test_it_begins_with_pefts_logits(model: ModelConfig) -> None:
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model.base), model.lora.start).eval()
    ours, tokens = build_model(model, SIGNATURE, 0).eval(), some_tokens()
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-5
        drawn = build_model(replace(model, lora=LORA), SIGNATURE, 0).eval()
        assert (ours(tokens) - drawn(tokens)).abs().max() > 0.01


def test_a_device_reads_the_part_that_it_holds(model: ModelConfig) -> None:
    shaped = shaped_by_data(model)
    network = build_model(shaped, SIGNATURE, 0, empty=True).network
    values = initial_values(shaped, network, 0, ModelOrigin(shaped))
    for name, whole in adapters_of(build_model(model, SIGNATURE, 0).network).items():
        part = torch.empty(2, whole.shape[1])
        values.fill(part, name, whole.shape, (1, 0))
        assert torch.equal(part, whole[1:3])


def test_other_bytes_are_another_identity_and_the_place_is_none(model: ModelConfig, tmp_path: Path) -> None:
    def digests() -> tuple[str, str]:
        return ModelOrigin(model).digest, config_sections(RunConfig.from_dict({"model": to_dict(model)})).model_code

    before = digests()
    assert before[0] == before[1] != fingerprint_base(model.base) == before[0].partition(" ")[0]
    for name in (ADAPTER, ADAPTER_CONFIG):
        file = Path(model.lora.start, name)
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert digests()[0] == digests()[1] != before[0]
        file.write_bytes(content)
    Path(model.lora.start).rename(tmp_path / "moved")
    moved = replace(model, lora=replace(model.lora, start=str(tmp_path / "moved")))
    assert ModelOrigin(moved).digest == before[0] and moved.without_addresses() == model.without_addresses()


@pytest.mark.parametrize("changes", [{"rank": 2}, {"alpha": 8.0}, {"targets": ["v_proj"]}, {"start": "nowhere"}])
def test_settings_that_differ_are_refused_in_one_line(changes: dict[str, Any], model: ModelConfig) -> None:
    other = shaped_by_data(replace(model, lora=replace(model.lora, **changes)))
    network = build_model(other, SIGNATURE, 0, empty=True).network
    with refuses(UserError) as refused:
        initial_values(other, network, 0, ModelOrigin(other))
    assert refused.value.message.startswith("model.lora.start: ")


def test_an_adapter_of_another_base_is_refused(model: ModelConfig, tmp_path: Path) -> None:
    cases: tuple[dict[str, Any], ...] = ({"intermediate_size": 64}, {"num_hidden_layers": 3})
    for number, changes in enumerate(cases):
        base = make_base(tmp_path / str(number), tokenizer=False, **changes)
        with refuses(UserError, match=r"^model\.lora\.start: .*adapter_model\.safetensors: "):
            build_model(replace(model, base=str(base)), SIGNATURE, 0)
