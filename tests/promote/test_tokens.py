"""Promotion of models that predict tokens: both run on the same test rows and are compared by row."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.pipeline.export import engine
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.promote.comparison import (
    ComparedPackage,
    Incomparable,
    check_same_tokens,
    evaluate_promotion,
    promote_package,
)
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.promote.store import Registry
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.records import to_json
from slipstream.shared.models.trained import TrainedModel
from tests.support.tokens import LENGTH, VOCABULARY, data_with_words, small_transformer
from tests.support.wording import refuses


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return data_with_words(tmp_path_factory.mktemp("tokens"))


def exported(steps: int, data: PreparedData, directory: Path) -> Path:
    """Export a transformer that was trained for some steps."""
    small_transformer(directory / f"trained-{steps}", data, steps)
    trained = TrainedModel.open(directory / f"trained-{steps}")
    engine.export(directory / str(steps), trained, data, ExportConfig(seconds=0.5), {"trained": str(steps)})
    return directory / str(steps)


@pytest.fixture(scope="module")
def untrained(data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(0, data, tmp_path_factory.mktemp("untrained"))


@pytest.mark.prove
def test_only_the_better_model_takes_the_others_place(untrained: Path, data: PreparedData, tmp_path: Path) -> None:
    trained = exported(40, data, tmp_path)
    registry, config = Registry(str(tmp_path / "registry")), PromotionConfig(max_loss=-10.0)
    promote_package(untrained, registry, data, config, evaluate_promotion(untrained, registry, data, config))
    better = evaluate_promotion(trained, registry, data, config)
    assert better.passed and "points of accuracy over tokens on 200 test rows" in better.why
    assert promote_package(trained, registry, data, config, better).promoted
    worse = evaluate_promotion(untrained, registry, data, config)
    assert not worse.passed and "more than the -10 allowed" in worse.why


def copied(package: Path, to: Path) -> ComparedPackage:
    return ComparedPackage(Path(shutil.copytree(package, to)))


def test_other_tokens_are_refused(untrained: Path, tmp_path: Path) -> None:
    here = ComparedPackage(untrained)
    check_same_tokens(here, copied(untrained, tmp_path / "same"))
    other = copied(untrained, tmp_path / "tokenizer")
    path = other.directory / "hugging-face/tokenizer.json"
    path.write_text(path.read_text().replace('"w1"', '"W1"'))
    with refuses(Incomparable):
        check_same_tokens(here, other)
    longer = copied(untrained, tmp_path / "longer")
    outputs = [replace(longer.signature.outputs[0], shape=("batch", 2 * LENGTH, VOCABULARY))]
    (longer.directory / "signature.json").write_bytes(to_json(replace(longer.signature, outputs=outputs)))
    with refuses(Incomparable):
        check_same_tokens(here, ComparedPackage(longer.directory))
