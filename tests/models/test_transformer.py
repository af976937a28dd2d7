"""The transformer equals Hugging Face's implementation for the same weights; its initial weights are a pure function of
seed and name."""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from scipy.special import ndtri

from slipstream.pipeline.export.hugging_face import main
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.initial.drawn import DrawnValues, draw_slice, normal_sequence
from slipstream.shared.models.trained import Architecture, write_trained
from slipstream.shared.models.transformer import Transformer
from tests.support.proving import first_few
from tests.support.tokens import word_tokenizer
from tests.support.wording import refuses, same_wording

LENGTH, VOCABULARY = 48, 96
SIGNATURE = Signature((TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=VOCABULARY)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
MODEL = ModelConfig("transformer", {**SIZES, "max_position_embeddings": LENGTH})
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with scaled positions": {"rope_scaling": LLAMA3, "rope_theta": 500_000.0},
    "llama with shared keys": {"num_key_value_heads": 2},
    "llama with tied embeddings": {"tie_word_embeddings": True},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama with another head size": {"head_dim": 12},
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": None},
    "mistral with a window of a row": {"model_type": "mistral", "sliding_window": LENGTH},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen3": {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 16},
}


def peer(changes: dict[str, Any]) -> Any:
    """Hugging Face's network with random weights; biases and normalisations, too, since ones and zeros hide errors."""
    settings = {**SIZES, "model_type": "llama", **changes}
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    network = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return network


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", first_few(FAMILIES, 4))
def test_same_logits_as_transformers_and_back(family: str, tmp_path: Path) -> None:
    theirs = peer(FAMILIES[family])
    theirs.config.save_pretrained(tmp_path)
    model = ModelConfig("transformer", {"config": str(tmp_path / "config.json")})
    predictor = build_model(model, SIGNATURE, seed=0).eval()
    weights = theirs.state_dict()
    if theirs.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    predictor.network.load_state_dict(weights)
    with torch.no_grad():
        expected, found = theirs(tokens()).logits, predictor(tokens())
    assert expected.std() > 0.5
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    found_weights = predictor.state_dict()
    write_trained(tmp_path / "trained", Architecture(model, SIGNATURE), found_weights, found_weights, {})
    written = CliRunner().invoke(main, [str(tmp_path / "trained"), str(tmp_path / "back")], catch_exceptions=False)
    assert written.exit_code == 0, written.output
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(back(tokens()).logits, expected, rtol=0, atol=1e-5)


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    weights = build_model(MODEL, SIGNATURE, seed=0).state_dict()
    write_trained(tmp_path / "trained", Architecture(MODEL, SIGNATURE), weights, weights, {})
    return tmp_path / "trained"


def write(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, [*map(str, arguments)])


def test_the_directory_for_hugging_face_is_whole_or_not_there(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(network: Any, **settings: Any) -> Any:
        yield "config.json", [b"{}"]
        raise OSError("No space left on device")

    monkeypatch.setattr("slipstream.pipeline.export.hugging_face.hugging_face_files", broken)
    assert isinstance(write(trained, tmp_path / "new" / "out").exception, OSError)
    assert list((tmp_path / "new").iterdir()) == []
    monkeypatch.undo()
    assert write(trained, tmp_path / "new" / "out").exit_code == 0
    assert {path.name for path in (tmp_path / "new" / "out").iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    again = write(trained, tmp_path / "new" / "out")
    assert again.exit_code == 1
    same_wording(again.output)


def test_a_tokenizer_comes_with_it(trained: Path, tmp_path: Path) -> None:
    words = tmp_path / "words"
    word_tokenizer(VOCABULARY).save_pretrained(words)
    assert write(trained, tmp_path / "out", "--tokenizer", words).exit_code == 0
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert found("w3 w7 w95")["input_ids"] == [3, 7, 95]


@pytest.mark.parametrize("size", [0, VOCABULARY + 5, -1])
def test_what_is_no_tokenizer_of_the_model_is_one_line(size: int, trained: Path, tmp_path: Path) -> None:
    words = tmp_path / "words"
    words.mkdir()
    if size > 0:
        word_tokenizer(size).save_pretrained(words)
    elif size < 0:
        (words / "tokenizer.json").write_text('{"model": 3}')
    ended = write(trained, tmp_path / "out", "--tokenizer", words)
    assert ended.exit_code == 1 and not (tmp_path / "out").exists()
    same_wording(ended.output)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type: 'gpt2'"),
        ({"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"sliding_window": LENGTH - 1}, f"sliding_window: {LENGTH - 1}"),
        ({"num_key_value_heads": 3}, "model.arguments.num_key_value_heads: 3"),
        ({"vocab_size": VOCABULARY + 1}, f"model.arguments.vocab_size: {VOCABULARY + 1}"),
        ({"max_position_embeddings": LENGTH - 1}, "model.arguments.max_position_embeddings"),
    ],
)
def test_what_the_network_cannot_do_is_one_line(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama", **changes}))
    with pytest.raises(UserError) as error:
        build_model(ModelConfig("transformer", {"config": str(tmp_path / "config.json")}), SIGNATURE, seed=0)
    assert named in error.value.message and "\n" not in error.value.message


def test_other_data_than_token_rows_is_refused() -> None:
    table = Signature((TensorSpec("numeric", "float32", (3,)),), "classification", "y", ("a", "b"))
    with refuses(UserError, match=r"model\.name:"):
        build_model(ModelConfig("transformer"), table, seed=0)


def test_parts_of_the_initial_weights_are_those_of_the_whole() -> None:
    network = build_model(ModelConfig("transformer", SIZES), SIGNATURE, seed=7).network
    for name, whole in network.named_parameters():
        for begin, end in ((0, 1), (1, 3), (len(whole) // 3, len(whole))):
            columns = slice(5, 11) if whole.ndim == 2 else slice(None)
            part = torch.full_like(whole[begin:end][:, columns] if whole.ndim == 2 else whole[begin:end], torch.nan)
            offsets = (begin, 5) if whole.ndim == 2 else (begin,)
            DrawnValues(network, 7).fill(part, name, whole.shape, offsets)
            torch.testing.assert_close(part, whole[begin:end, columns] if whole.ndim == 2 else part, rtol=0, atol=0)


def test_initial_weights_stay_what_they_are() -> None:
    """Or trainings that were begun before would have other ones."""
    first = [0.16325578911435887, 0.6214719465000089, 0.9072585303717481, 0.24275556843752225]
    assert np.abs(normal_sequence(7, "model.norm.weight", 5, 4) - first).max() < 1e-14
    assert np.abs(normal_sequence(0, "a", 1 << 40, 2) - [0.41021225500036335, -0.8779659147844058]).max() < 1e-14


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_the_number_of_threads_changes_no_bit_of_the_initial_weights(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = np.frombuffer(hashlib.blake2b(b"3/w", digest_size=16).digest(), np.uint64)
    raw = np.random.Philox(key=key).random_raw(700_000)
    expected = ndtri(((raw >> np.uint64(11)) + 0.5) * 2.0**-53) * 0.02
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    part = torch.nn.Parameter(torch.full((1000, 700), torch.nan))
    with torch.no_grad():
        draw_slice(part, "w", part.shape, (0, 0), std=0.02, seed=3)
    assert torch.equal(part.detach(), torch.from_numpy(expected.reshape(1000, 700)).float())


def test_initial_weights_are_independent_normal_numbers() -> None:
    of = {(seed, name): normal_sequence(seed, name, 0, 200_000) for seed in (0, 1) for name in ("a", "b")}
    for drawn in of.values():
        assert abs(drawn.mean()) < 0.01 and abs(drawn.std() - 1) < 0.01
        assert abs(np.mean(np.abs(drawn) < 1) - 0.6827) < 0.005
    assert np.abs(np.corrcoef(list(of.values())) - np.eye(4)).max() < 0.01


def test_another_seed_gives_other_weights_and_the_same_seed_the_same() -> None:
    first, same, other = (build_model(ModelConfig("transformer", SIZES), SIGNATURE, seed=seed) for seed in (1, 1, 2))
    name = "network.lm_head.weight"
    assert torch.equal(first.state_dict()[name], same.state_dict()[name])
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])
    assert isinstance(first.network, Transformer)


@pytest.mark.parametrize("family", ["llama", "llama with shared keys", "qwen3"])
def test_autocast_computes_what_weights_in_bf16_compute(family: str) -> None:
    """As with DDP and with sharded weights: no step of the network is left in float32 by one of them."""
    settings = {**SIZES, "max_position_embeddings": LENGTH, **FAMILIES[family]}
    model = build_model(ModelConfig("transformer", settings), SIGNATURE, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin with ones, which bf16 holds exactly
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        cast = model(tokens())
        whole = copy.deepcopy(model).bfloat16()(tokens())
    assert cast.dtype == torch.bfloat16 and torch.equal(cast, whole)


def test_initial_weights_are_spread_as_those_of_gpt2() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4}
    ours = build_model(ModelConfig("transformer", {**sizes, "initializer_range": 0.05}), SIGNATURE, seed=0).network
    theirs_sizes: dict[str, Any] = {
        "n_embd": 128,
        "n_layer": 3,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.05,
    }
    config = transformers.GPT2Config(**theirs_sizes, bos_token_id=0, eos_token_id=0)
    theirs = transformers.GPT2LMHeadModel(config)
    pairs = {"self_attn.o_proj": "attn.c_proj", "mlp.down_proj": "mlp.c_proj", "mlp.up_proj": "mlp.c_fc"}
    ours_by_name, theirs_by_name = (
        {name: float(parameter.detach().std()) for name, parameter in model.named_parameters() if parameter.ndim == 2}
        for model in (ours, theirs)
    )
    for block in range(3):
        for our, their in pairs.items():
            expected = theirs_by_name[f"transformer.h.{block}.{their}.weight"]
            assert ours_by_name[f"model.layers.{block}.{our}.weight"] == pytest.approx(expected, rel=0.03)
    assert theirs_by_name["transformer.wte.weight"] == pytest.approx(
        ours_by_name["model.embed_tokens.weight"], rel=0.03
    )
