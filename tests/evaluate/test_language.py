"""Language models are evaluated on whole held-out documents against a model without weights, and they learn."""

import lzma
import math
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import yaml
from torch import nn
from torch.nn import functional

from slipstream.config import RunConfig
from slipstream.pipeline.evaluate import language
from slipstream.pipeline.evaluate.engine import evaluate
from slipstream.pipeline.evaluate.language import (
    KneserNey,
    beside_bits,
    bits_per_byte,
    evaluate_language,
    graded_documents,
    held_out_documents,
    lzma_bits_per_byte,
)
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.documents import Document, read_documents
from slipstream.shared.artifacts.prepared.token_rows import read_tokens
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.predict import model_function
from slipstream.shared.models.trained import TrainedModel
from tests.support.corpora import prepare_language, rows_of, write_lines, write_stories
from tests.support.language_training import parameters, trained_steps
from tests.support.tokens import token_data
from tests.support.wording import refuses

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
EXAMPLE = RunConfig.from_dict(yaml.safe_load((ROOT / "examples/text.yaml").read_text()))


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    place = tmp_path_factory.mktemp("stories")
    return prepare_language(place / "data", write_stories(place / "stories", 120))


def by_hand(model: Predictor, document: Document, length: int) -> float:
    """The bits of a document, one piece after the other."""
    nats = 0.0
    for start in range(0, len(document.tokens) - 1, length):
        piece = torch.from_numpy(document.tokens[start : start + length + 1].astype(np.int64))
        row = torch.zeros(1, length, dtype=torch.int16)
        row[0, : len(piece) - 1] = read_tokens(piece)[0][:-1]
        with torch.no_grad():
            chances = model(row)[0].log_softmax(-1)
        for place, token in enumerate(piece[1:].tolist()):
            if token >= 0:
                nats -= chances[place, token].item()
    return nats / math.log(2)


def test_the_bits_of_documents_are_of_all_their_learned_tokens(stories: PreparedData) -> None:
    model = build_model(ModelConfig("transformer", SIZES), stories.signature, seed=0).eval()
    documents = read_documents(stories.artifact, "test")[:6]
    found = graded_documents(model_function(model), stories.signature, documents)
    for document, bits in zip(documents, found.bits, strict=True):
        assert len(document.tokens) > 65, "it is longer than a row"
        assert bits == pytest.approx(by_hand(model, document, 32), rel=1e-5)


def test_of_conversations_only_the_answers_count(tmp_path: Path) -> None:
    rows = [{"prompt": f"after {n}?", "completion": f"{n + 1}." * (1 + n % 5)} for n in range(90)]
    data = prepare_language(tmp_path / "data", write_lines(tmp_path / "t.jsonl", rows), length=80)
    model = build_model(ModelConfig("transformer", SIZES), data.signature, seed=0).eval()
    run, documents = model_function(model), read_documents(data.artifact, "test")
    for document, bits in zip(documents, graded_documents(run, data.signature, documents).bits, strict=True):
        assert bits == pytest.approx(by_hand(model, document, 80), rel=1e-5)
    found = evaluate_language(run, data)
    assert found.figures.bytes == sum(document.bytes for document in documents)
    assert found.figures.tokens == sum(document.bytes + 2 for document in documents)
    assert all("after " in each.prompt and each.prompt.endswith("assistant\n") for each in found.figures.continuations)


def test_a_trained_model_is_beside_one_without_weights_with_an_interval(stories: PreparedData) -> None:
    config = TrainingConfig(batch_size=16, learning_rate=0.01)
    steps = sum(stories.segment_rows("train")) // 16
    model = trained_steps(stories, SIZES, config, steps)
    found = evaluate_language(model_function(model), stories)
    untrained = evaluate_language(
        model_function(build_model(ModelConfig("transformer", SIZES), stories.signature, seed=0).eval()), stories
    )
    assert untrained.model.bits_per_byte == pytest.approx(math.log2(257), abs=0.2)
    assert untrained.model.perplexity == pytest.approx(257, rel=0.1)
    ours, before = found.model.bits_per_byte, untrained.model.bits_per_byte
    assert ours and before and ours < 0.8 * before and untrained.gain.shown == -1
    assert found.model.log_loss == pytest.approx(math.log(found.model.perplexity or 0))
    assert 0.2 < (found.model.accuracy or 0) < 1
    beside = found.baseline.bits_per_byte
    assert beside is not None and beside == untrained.baseline.bits_per_byte
    assert found.gain.value == pytest.approx(beside - ours, abs=1e-9)
    assert found.gain.low < found.gain.value < found.gain.high
    again = evaluate_language(model_function(model), stories)
    assert again.figures == found.figures, "texts are drawn with a seed"
    assert len(found.figures.continuations) == 3
    assert all(each.prompt and each.text for each in found.figures.continuations)
    assert len({each.document for each in found.figures.continuations}) == 3


def test_a_fine_tuned_model_is_beside_its_base(stories: PreparedData) -> None:
    config = TrainingConfig(batch_size=16, learning_rate=0.01)
    base = build_model(ModelConfig("transformer", SIZES), stories.signature, seed=0).eval()
    tuned = trained_steps(stories, SIZES, config, 20)
    graded = graded_documents(model_function(base), stories.signature, held_out_documents(stories))
    found = evaluate_language(model_function(tuned), stories, graded)
    alone = evaluate_language(model_function(base), stories)
    counted, compressed = found.figures.references
    assert counted.name == alone.baseline.name and counted.bits_per_byte == alone.baseline.bits_per_byte
    assert alone.figures.references == [compressed] and "lzma" in compressed.name
    assert found.baseline.name == "the base" and found.baseline.rows_trained == 0
    assert vars(alone.model).items() <= vars(found.baseline).items(), "the same scores as by itself"
    assert found.gain.low > 0 and found.gain.value == pytest.approx(
        (alone.model.bits_per_byte or 0) - (found.model.bits_per_byte or 0), abs=1e-9
    )
    nothing = evaluate_language(model_function(base), stories, graded)
    assert (nothing.gain.value, nothing.gain.low, nothing.gain.high) == (0, 0, 0) and nothing.gain.shown == 0


def test_tokens_without_their_documents_are_refused_in_one_line(tmp_path: Path) -> None:
    data = token_data(tmp_path / "tokens")
    trained = mock.Mock(spec=TrainedModel, signature=data.signature)
    with refuses(UserError):
        evaluate(tmp_path / "evaluation", trained, data, {})
    trained.load.assert_not_called()
    assert not (tmp_path / "evaluation").exists()


def test_lzma_is_that_of_xz_after_the_training_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "PRIMED_BYTES", 8 << 16)
    train = random.Random(0).randbytes(9 << 16)
    found = lzma_bits_per_byte(train, train[1 << 16 : 2 << 16])
    assert found < 0.1, "it lies in what primes"
    assert lzma_bits_per_byte(train, train[: 1 << 16]) > 8, "it does not"
    vocabulary = ["a", "rule", "of", "some", "words", "that", "follow", "others"]
    first, second = (" ".join(random.Random(n).choices(vocabulary, k=9000)).encode() for n in (1, 2))
    files = [len(lzma.compress(text)) for text in (first, first + second)]
    assert lzma_bits_per_byte(first, second) == pytest.approx(8 * (files[1] - files[0]) / len(second), rel=0.01)


# On Python's standard library without its tests. In tokens and steps, never in seconds.


def measured(model: Predictor, data: PreparedData, documents: list[Document], context: int) -> tuple[float, float]:
    """The bits per byte of the model, and of ``context`` bytes of context."""
    train = [text.encode() for each in read_documents(data.artifact, "train") for text in each.texts]
    sizes = np.array([document.bytes for document in documents], np.float64)
    bits = graded_documents(model_function(model), data.signature, documents).bits
    return bits_per_byte(bits, sizes), bits_per_byte(beside_bits(KneserNey(train, context), documents), sizes)


@pytest.mark.prove
def test_150_steps_are_better_than_one_byte_of_context(tmp_path: Path) -> None:
    """By 0.3 bits per byte: 0.5 million parameters, 150 steps of 1,024 tokens."""
    data = prepare_language(tmp_path / "data", "", tokenizer="train", vocabulary=2048, length=128)
    sizes = {
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    }
    model = trained_steps(data, sizes, TrainingConfig(batch_size=8, learning_rate=0.005), 150)
    assert 450_000 < parameters(model) < 550_000
    small = [document for document in read_documents(data.artifact, "test") if document.bytes < 6_000]
    ours, theirs = measured(model, data, small, context=1)
    assert ours < theirs - 0.3, f"{ours:.3f} against {theirs:.3f}"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    sizes = {"vocabulary": EXAMPLE.data.vocabulary, "length": EXAMPLE.data.length}
    return prepare_language(tmp_path_factory.mktemp("library") / "data", "", tokenizer="train", **sizes)


@pytest.mark.prove
def test_the_example_is_better_than_five_bytes_of_context(library: PreparedData) -> None:
    config = EXAMPLE.training
    steps = sum(library.segment_rows("train")) // config.rows_per_step
    model = trained_steps(library, dict(EXAMPLE.model.arguments), config, steps)
    assert config.epochs == 1 and 600_000 < parameters(model) < 700_000
    ours, theirs = measured(model, library, read_documents(library.artifact, "test"), context=5)
    assert ours < theirs - 0.05, f"{ours:.3f} against {theirs:.3f}"


class PlainBlock(nn.Module):
    """Block of nanoGPT's ``model.py``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.attention_projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp, self.mlp_projection = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        of_heads = self.attention(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key, value = of_heads
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attention_projection(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_projection(functional.gelu(self.mlp(self.before_mlp(x))))


class PlainGpt(nn.Module):
    """GPT-2 with nanoGPT's initial weights."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.last = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = math.sqrt(2 * layers) if "projection" in name else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids.long()) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.last(x), self.tokens.weight)


def plainly_trained(data: PreparedData, config: TrainingConfig, steps: int, width: int, layers: int) -> PlainGpt:
    """The model after ``steps`` steps in plain torch."""
    torch.manual_seed(config.seed)
    length, rows = data.signature.inputs[0].shape[0], config.rows_per_step
    model = PlainGpt(data.signature.buckets, length, width, layers, heads=4)
    decayed = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, weight_decay=config.weight_decay)
    tokens = torch.from_numpy(rows_of(data, "train").astype(np.int64))
    order = torch.randperm(len(tokens))
    rising = math.ceil(config.warmup * steps)
    for step in range(steps):
        falling = 0.5 * (1 + math.cos(math.pi * (step - rising) / (steps - rising)))
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * ((step + 1) / rising if step < rising else falling)
        batch = tokens[order[step * rows : (step + 1) * rows]]
        functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@pytest.mark.prove
def test_the_example_learns_as_much_as_a_plain_gpt_with_nanogpts_initial_weights(library: PreparedData) -> None:
    """Within 0.02 bits per byte, after as many steps."""
    data, steps = library, 300
    sizes: dict[str, Any] = dict(EXAMPLE.model.arguments)
    ours = trained_steps(data, sizes, EXAMPLE.training, steps)
    theirs = plainly_trained(data, EXAMPLE.training, steps, sizes["hidden_size"], sizes["num_hidden_layers"])
    assert parameters(ours) == pytest.approx(sum(each.numel() for each in theirs.parameters()), rel=0.06)
    documents = [each for each in read_documents(data.artifact, "test") if each.bytes < 12_000]
    bytes_of = np.array([each.bytes for each in documents], np.float64)
    found = [
        bits_per_byte(graded_documents(run, data.signature, documents).bits, bytes_of)
        for run in (model_function(ours), lambda inputs: plain_logits(theirs, inputs))
    ]
    assert found[0] < found[1] + 0.02, found


def plain_logits(model: PlainGpt, inputs: list[np.ndarray]) -> np.ndarray:
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(inputs[0])).numpy()
    return found
