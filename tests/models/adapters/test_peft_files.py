"""Adapters as peft's files, written for peft and read from it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from slipstream.shared.artifacts.prepared.token_rows import ADAPTER as WEIGHTS
from slipstream.shared.artifacts.prepared.token_rows import ADAPTER_CONFIG as CONFIG
from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.network import add_adapters
from slipstream.shared.models.adapters.peft_files import NewAdapter, StoredAdapter, peft_files, read_peft
from slipstream.shared.models.base.directory import START, BaseDirectory
from slipstream.shared.models.config import LoraConfig
from slipstream.shared.models.transformer import Transformer
from slipstream.shared.models.transformer_config import to_hugging_face
from tests.support.adapters import LORA, adapted_network, adapters_of, draw_adapters, plain_network, tokens
from tests.support.wording import refuses

SOME = LoraConfig(3, alpha=5.0, dropout=0.25, targets=["v_proj", "gate_proj"])


def written(directory: Path, lora: LoraConfig = LORA, base: str = "there/base") -> Transformer:
    network = adapted_network(lora)
    directory.mkdir(exist_ok=True)
    for name, content in peft_files(NewAdapter(lora, base, adapters_of(network))).items():
        (directory / name).write_bytes(content)
    return network


def tensors_of(adapter: StoredAdapter) -> dict[str, Tensor]:
    found = {name: torch.empty(stored.shape) for name, stored in adapter.tensors.tensors.items()}
    for name, tensor in found.items():
        adapter.tensors.fill(tensor, name, (0, 0))
    return found


def in_transformers(network: Transformer) -> Any:
    """The same base as transformers has it."""
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hugging_face(network.config)))
    model.load_state_dict(plain_network().state_dict())
    return model.eval()


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model(tokens()).logits


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all", "some"])
def test_peft_loads_ours_onto_the_same_base(lora: LoraConfig, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    network = written(tmp_path, lora)
    base = in_transformers(network)
    before = logits_of(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    assert (before - logits_of(adapted)).abs().max() > 0.1
    assert (logits_of(adapted) - network(tokens())).abs().max() < 1e-5
    config = adapted.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (lora.rank, lora.alpha, lora.dropout)
    assert config.base_model_name_or_path == "there/base" and config.target_modules == set(lora.targets)


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all", "some"])
def test_we_load_what_peft_saved(lora: LoraConfig, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    network = plain_network()
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha),
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        task_type="CAUSAL_LM",
    )
    theirs = peft.get_peft_model(in_transformers(network), config).eval()
    draw_adapters(theirs)
    for name, parameter in theirs.named_parameters():
        if ".lora_" in name:
            nn.init.normal_(parameter, std=0.2)
    theirs.save_pretrained(tmp_path)
    adapter = read_peft(BaseDirectory.list(str(tmp_path), START))
    assert adapter.lora == lora
    add_adapters(network, adapter.lora)
    missing, unexpected = network.load_state_dict(tensors_of(adapter), strict=False)
    assert not unexpected and not [name for name in missing if "lora_" in name]
    assert (network.eval()(tokens()) - logits_of(theirs)).abs().max() < 1e-5


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    network = written(tmp_path, SOME)
    adapter, expected = read_peft(BaseDirectory.list(str(tmp_path), START)), adapters_of(network)
    found = tensors_of(adapter)
    assert (adapter.lora, found.keys()) == (SOME, expected.keys())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


REFUSED = {
    "peft_type": "IA3",
    "bias": "lora_only",
    "use_rslora": True,
    "use_dora": True,
    "fan_in_fan_out": True,
    "modules_to_save": ["lm_head"],
    "rank_pattern": {"q_proj": 8},
    "alpha_pattern": {"q_proj": 8},
    "layers_to_transform": [0],
    "target_modules": ["q_proj", {}],
    "init_lora_weights": "pissa",
    "lora_bias": True,
    "r": 0,
    "lora_alpha": True,
    "lora_dropout": "half",
}


def test_an_alpha_beyond_floating_point_numbers_is_refused_in_one_line(tmp_path: Path) -> None:
    written(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {"lora_alpha": 10**400}))
    with refuses(UserError, match="lora_alpha:"):
        read_peft(BaseDirectory.list(str(tmp_path), START))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_lora_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    written(tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    (tmp_path / CONFIG).write_text(json.dumps(config | {name: REFUSED[name]}))
    with pytest.raises(UserError) as refused:
        read_peft(BaseDirectory.list(str(tmp_path), START))
    line = f"model.lora.start: {tmp_path / CONFIG}: {name}: {REFUSED[name]!r} is not supported; expected "
    assert refused.value.message.startswith(line)


def damage(directory: Path, what: str) -> None:
    tensors = load_file(directory / WEIGHTS)
    first = next(name for name in sorted(tensors) if "lora_A" in name)
    if what == "lost":
        del tensors[first]
    elif what == "thin":
        tensors[first] = tensors[first][:2].contiguous()
    elif what == "foreign":
        tensors["base_model.model.lm_head.weight"] = torch.zeros(2, 2)
    elif what == "target without tensors":
        tensors = {name: tensor for name, tensor in tensors.items() if "q_proj" not in name}
    save_file(tensors, directory / WEIGHTS)
    if what == "cut":
        (directory / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes()[:-5])


@pytest.mark.parametrize("what", ["lost", "thin", "foreign", "target without tensors", "cut"])
def test_tensors_that_do_not_fit_are_refused_in_one_line(what: str, tmp_path: Path) -> None:
    network = written(tmp_path)
    read_peft(BaseDirectory.list(str(tmp_path), START)).check(LORA, network)
    damage(tmp_path, what)
    with refuses(UserError) as refused:
        read_peft(BaseDirectory.list(str(tmp_path), START)).check(LORA, network)
    assert str(tmp_path / WEIGHTS) in refused.value.message


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_directory_without_a_configuration_is_refused(content: str | None, tmp_path: Path) -> None:
    (tmp_path / WEIGHTS).touch()
    if content is not None:
        (tmp_path / CONFIG).write_text(content)
    with refuses(UserError):
        read_peft(BaseDirectory.list(str(tmp_path), START))
