"""Models with other questions, or with rows that may have been trained on, are not compared."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slipstream.pipeline.promote.comparison import ComparedPackage, Incomparable, check_unseen, evaluate_promotion
from slipstream.pipeline.promote.store import Registry
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.export import Holdout
from slipstream.shared.source.config import SplitConfig
from tests.support.packages import package
from tests.support.promotions import LENIENT, Models
from tests.support.proving import first_few
from tests.support.raw_tables import mixed_table
from tests.support.toys import images
from tests.support.wording import refuses, same_wording


def changed(model: Path, directory: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a model with another signature, sealed as if it had been exported so."""
    shutil.copytree(model, directory)
    path = directory / "signature.json"
    signature = json.loads(path.read_text())
    change(signature)
    path.write_text(json.dumps(signature))
    manifest = json.loads((directory / "manifest.json").read_text())
    content = path.read_bytes()
    manifest["files"]["signature.json"] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    digest = hashlib.sha256((directory / "manifest.json").read_bytes()).hexdigest()
    (directory / "manifest.sha256").write_text(f"{digest}  manifest.json\n")
    return directory


@pytest.mark.parametrize(
    "change",
    first_few(
        [
            lambda s: s.update(target="z"),
            lambda s: s.update(classes=["maybe", "yes"]),
            lambda s: s["holdout"]["settings"].update(seed=7),
            lambda s: s["holdout"].update(by="id"),
        ],
        2,
    ),
)
def test_another_question_or_another_split_is_no_comparison(
    change: Callable[[dict[str, Any]], None], models: Models, served: Registry, tmp_path: Path
) -> None:
    other = changed(models.trained(200), tmp_path / "other", change)
    verdict = evaluate_promotion(other, served, models.data, LENIENT)
    assert not verdict.passed
    same_wording(verdict.why)


def test_vocabularies_without_a_rule_of_spelling_are_of_their_texts(models: Models, tmp_path: Path) -> None:
    first = models.trained(200)
    earlier = Path(shutil.copytree(first, tmp_path / "earlier"))
    statistics = json.loads((earlier / "statistics.json").read_text())
    assert all(each.pop("spelling") for each in statistics["categorical"])
    (earlier / "statistics.json").write_text(json.dumps(statistics))
    assert ComparedPackage(earlier).encoding == ComparedPackage(first).encoding
    statistics["categorical"][0]["vocabulary"].append("another")
    (earlier / "statistics.json").write_text(json.dumps(statistics))
    assert ComparedPackage(earlier).encoding != ComparedPackage(first).encoding


def test_a_package_that_does_not_tell_is_believed(models: Models, served: Registry, tmp_path: Path) -> None:
    other = changed(models.trained(200), tmp_path / "other", lambda s: s.update(holdout=None))
    assert evaluate_promotion(other, served, models.data, LENIENT).passed


def test_the_split_is_the_prepared_datas_own(models: Models, served: Registry, tmp_path: Path) -> None:
    """Prepared for real with another seed, so that its test rows were trained on by the promoted one."""
    data = PreparedData.open(mixed_table(tmp_path / "data", "classification", split=SplitConfig(seed=1)))
    verdict = evaluate_promotion(package(tmp_path / "model", data, 5), served, data, LENIENT)
    assert not verdict.passed
    same_wording(verdict.why)


@pytest.mark.prove
def test_a_promoted_model_with_an_input_that_is_gone(models: Models, served: Registry, tmp_path: Path) -> None:
    data = PreparedData.open(mixed_table(tmp_path / "data", "classification", drop=["visits"]))
    model = changed(package(tmp_path / "model", data, 5), tmp_path / "untold", lambda s: s.update(holdout=None))
    verdict = evaluate_promotion(model, served, data, LENIENT)
    assert not verdict.passed
    same_wording(verdict.why)


@pytest.mark.prove
def test_another_preparation_of_the_same_rows(models: Models, served: Registry, tmp_path: Path) -> None:
    """More rows, and so other means and vocabularies: the old one gets the test rows by way of raw columns."""
    data = PreparedData.open(mixed_table(tmp_path / "data", "classification", seed=5, rows=3000))
    verdict = evaluate_promotion(package(tmp_path / "model", data, 150), served, data, LENIENT)
    assert verdict.passed and "on 4" in verdict.why, verdict.why


def by_time(column: str, validation: float, test: float) -> Holdout:
    return Holdout("time", {"column": column}, [validation, test])


def test_later_rows_were_not_trained_on() -> None:
    old = by_time("when", 100.0, 200.0)
    check_unseen(by_time("when", 50.0, 100.0), old)
    with refuses(Incomparable):
        check_unseen(by_time("when", 50.0, 99.0), old)
    with refuses(Incomparable):
        check_unseen(by_time("day", 300.0, 400.0), old)


@pytest.mark.prove
def test_images_and_tables_do_not_compare(served: Registry, tmp_path: Path) -> None:
    data = images(tmp_path / "data")
    verdict = evaluate_promotion(package(tmp_path / "model", data, 5), served, data, LENIENT)
    assert not verdict.passed
    same_wording(verdict.why)
