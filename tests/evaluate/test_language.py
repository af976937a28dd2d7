"""Language models are evaluated on whole held-out documents against a model without weights, and they learn."""

import math
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

from slipstream.pipeline.evaluate.engine import evaluate
from slipstream.pipeline.evaluate.language import (
    KneserNey,
    beside_bits,
    bits_per_byte,
    evaluate_language,
    graded_documents,
    held_out_documents,
)
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.documents import Document, read_documents
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.predict import model_function
from slipstream.shared.models.trained import TrainedModel
from tests.support.corpora import prepare_language, write_lines, write_stories
from tests.support.language_training import parameters, trained_steps
from tests.support.tokens import token_data
from tests.support.wording import refuses

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}


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
        row[0, : len(piece) - 1] = piece[:-1]
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


# On Python's standard library without its tests. In tokens and steps, never in seconds.


def measured(model: Predictor, data: PreparedData, documents: list[Document], context: int) -> tuple[float, float]:
    """Return the bits per byte of the model, and of the one without weights with ``context`` bytes."""
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


@pytest.mark.prove
def test_one_pass_is_better_than_five_bytes_of_context(tmp_path: Path) -> None:
    """By 0.05 bits per byte: 2.2 million parameters, each token seen once."""
    data = prepare_language(tmp_path / "data", "", tokenizer="train", vocabulary=2048, length=256)
    sizes = {
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
        # So narrow a model learns little at first with the 0.02 of wide ones.
        "initializer_range": 0.06,
    }
    config = TrainingConfig(batch_size=4, learning_rate=0.003)
    model = trained_steps(data, sizes, config, sum(data.segment_rows("train")) // config.rows_per_step)
    assert 2_000_000 < parameters(model) < 2_300_000
    ours, theirs = measured(model, data, read_documents(data.artifact, "test"), context=5)
    assert ours < theirs - 0.05, f"{ours:.3f} against {theirs:.3f}"
