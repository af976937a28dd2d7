"""Export of transformers: the gate over tokens, and a directory that Hugging Face's library loads."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from slipstream.pipeline.export import engine
from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.package.triton import write_repository
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.comparison.quality import ERROR, quality_loss
from slipstream.shared.comparison.tokens import rows_enough, upper_limit
from slipstream.shared.errors import UserError
from slipstream.shared.models.metrics import compute_scores
from slipstream.shared.models.predict import grade_tokens, predict_records
from slipstream.shared.models.trained import TrainedModel
from tests.support.tokens import LENGTH, VOCABULARY, data_with_words, small_transformer
from tests.support.wording import refuses


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return data_with_words(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def exported(data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    small_transformer(directory / "trained", data)
    trained = TrainedModel.open(directory / "trained")
    # By their sizes, since on a busy machine none of so small files may be clearly faster; and in no time, so that only
    # the first recipe is tried, on any machine.
    engine.export(directory / "out", trained, data, ExportConfig(seconds=0.01, half=True, optimise="size"), {})
    return directory / "out"


def test_hugging_faces_library_gives_the_same_logits(exported: Path, data: PreparedData) -> None:
    rows = np.array(data.split("test")["tokens"][:8])
    network = transformers.AutoModelForCausalLM.from_pretrained(exported / "hugging-face", dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = network(torch.from_numpy(rows)).logits.numpy()
    signature = json.loads((exported / "signature.json").read_text())
    assert signature["outputs"][0]["shape"] == ["batch", LENGTH, VOCABULARY]
    ours = onnx_predictor(exported / "model.fp32.onnx", 1)([rows])
    assert ours.std() > 0.05 and np.abs(ours - theirs).max() < 1e-4
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported / "hugging-face")
    assert tokenizer("w1 w40")["input_ids"] == [1, 40]
    check_package(exported)


def test_the_report_is_of_tokens(exported: Path, data: PreparedData) -> None:
    report = json.loads((exported / "export.json").read_text())
    variants = {each["recipe"] or each["name"]: each for each in report["variants"]}
    scores = variants["onnx-fp32"]["metrics"]
    assert report["task"] == "next token" and {name for name in scores if scores[name]} == {"accuracy", "log_loss"}
    assert variants["onnx-fp32"]["metrics"]["log_loss"] == pytest.approx(np.log(VOCABULARY), rel=0.1)
    judged = [each["quality"] for each in report["variants"] if each["quality"]]
    assert len(judged) == 1 and judged[0]["rows"] == 200
    assert variants["dynamic"]["verdict"] == "not tried"
    assert variants["fp16"]["verdict"] == variants["bf16"]["verdict"] == "for GPUs"


def test_the_card_states_the_longest_text_and_padding_at_its_end_changes_nothing(exported: Path) -> None:
    assert f"The longest text has {LENGTH} tokens" in (exported / "MODEL_CARD.md").read_text()
    padded = np.random.default_rng(0).integers(0, VOCABULARY, (2, LENGTH))
    padded[1, :5] = padded[0, :5]
    one, other = onnx_predictor(exported / "model.fp32.onnx", 1)([padded])
    np.testing.assert_allclose(one[:5], other[:5], rtol=1e-5, atol=1e-6)
    assert np.abs(one[5:] - other[5:]).max() > 0.01


def test_triton_serves_it(exported: Path, tmp_path: Path) -> None:
    (made,) = write_repository(exported, tmp_path / "repository")
    config = (made / "config.pbtxt").read_text()
    assert "TYPE_INT64" in config and made.name == "next_token"


def test_a_token_is_graded_by_its_logits() -> None:
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]], np.float32))
    found = grade_tokens(logits, np.array([[1, 2]]))
    assert found[..., 0].tolist() == [[0, 1]]
    assert np.exp(found[..., 1]) == pytest.approx(np.array([[0.25, 0.7]]), rel=1e-5)
    told = compute_scores("next token", found, np.array([[1, 2]]))
    assert (told.accuracy, told.log_loss) == pytest.approx((0.5, -np.log(0.25 * 0.7) / 2))


def test_tokens_that_are_not_learned_do_not_count() -> None:
    logits = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]], np.float32))
    truth = np.array([[-2, 2]])
    found = grade_tokens(logits, truth)
    assert found[0, 0].tolist() == [0, 0] and np.exp(found[0, 1, 1]) == pytest.approx(0.7)
    told = compute_scores("next token", found, truth)
    assert (told.accuracy, told.log_loss) == pytest.approx((1.0, -np.log(0.7)))
    # Of 20 rows one loses one of two learned tokens: a fortieth of all that are learned.
    targets = np.where(np.arange(8) < 6, -1, 1) * np.ones((20, 1), int)
    before = np.stack([targets > 0, targets * 0], axis=-1).astype(np.float32)
    after = before.copy()
    after[0, 7, 0] = 0
    assert quality_loss("next token", targets, before, after, 1.0).loss == pytest.approx(100 / 40)


def test_logits_of_many_rows_are_not_held_at_once(data: PreparedData, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        (rows,) = inputs
        sizes.append(len(rows))
        return np.zeros((len(rows), LENGTH, VOCABULARY), np.float32)

    monkeypatch.setattr("slipstream.shared.models.predict.MOST_LOGITS", 7 * LENGTH * VOCABULARY)
    assert predict_records(run, data.signature, data.split("test")).shape == (200, LENGTH, 2)
    assert max(sizes) == 7 and sum(sizes) == 200
    with refuses(UserError):
        predict_records(lambda inputs: inputs[0], data.signature, data.split("test"))


def losses(rows: int, spread: str, draws: int) -> Iterator[np.ndarray]:
    """By row the share of 32 tokens that is lost, 2 % on average: by all rows alike, by rows of unequal difficulty, all
    at once by one row of fifty, or all at once by one of 25 while four in ten of the others gain a little; or half
    of it by one of 25 while all others differ a little."""
    random = np.random.default_rng(0)
    for _ in range(draws):
        if spread == "whole rows":
            yield (random.random(rows) < 0.02).astype(float)
        elif spread == "gains and whole rows":
            whole, gain = random.random(rows) < 0.04, random.random(rows) < 0.4
            yield np.where(whole, 1.0, gain * -0.02 / (0.4 * 0.96))
        elif spread == "noise and half rows":
            yield np.where(random.random(rows) < 0.04, 0.5, random.normal(0, 0.02, rows))
        else:
            shares = np.full(rows, 0.02) if spread == "alike" else random.gamma(0.5, 0.04, rows).clip(0, 1)
            yield random.binomial(32, shares) / 32


@pytest.mark.parametrize("spread", ["alike", "unequal", "whole rows", "gains and whole rows", "noise and half rows"])
@pytest.mark.parametrize("rows", [100, *(pytest.param(rows, marks=pytest.mark.prove) for rows in (265, 1000))])
def test_the_limit_is_below_the_true_loss_in_one_of_twenty(rows: int, spread: str) -> None:
    """Two standard errors of 1,000 draws are 1.4 %."""
    missed = np.mean([upper_limit(lost, ERROR) < 0.02 for lost in losses(rows, spread, 1000)])
    assert missed <= 0.065


def test_what_gains_much_is_shown_by_few_rows() -> None:
    gained = -np.random.default_rng(0).random((200, 1))[:, 0]
    assert upper_limit(gained, ERROR) < -0.4
    assert upper_limit(np.where(np.arange(200) < 25, gained, 0.0), ERROR) > 0.01, "too few rows gain to count on it"


def test_what_loses_nothing_passes_with_enough_rows() -> None:
    right = np.random.default_rng(0).random((400, 32)) < 0.6
    graded_rows = np.stack([right, np.zeros(right.shape)], axis=-1).astype(np.float32)
    changed = graded_rows.copy()
    changed[::20, :1, 0] = 1 - changed[::20, :1, 0]
    loss = quality_loss("next token", np.zeros(right.shape), graded_rows, changed, 1.0)
    assert loss.answer(1.0) == "passed" and loss.rows == 400 and loss.low < loss.loss < loss.high
    assert (
        quality_loss("next token", np.zeros(right.shape), graded_rows[:20], changed[:20], 1.0).answer(1.0)
        == "can't tell"
    )
    assert rows_enough(np.zeros(20), 0.01, ERROR) == 299 and rows_enough(np.full(9, 0.02), 0.01, ERROR) is None
