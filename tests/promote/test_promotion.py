"""The model in service is replaced only by a model that is shown to be as good; a refusal has a reason."""

from pathlib import Path

import pytest

from slipstream.pipeline.promote.comparison import evaluate_promotion
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.promote.store import Registry, package_version
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from tests.support.faulty_s3 import FaultyS3
from tests.support.packages import package
from tests.support.promotions import LENIENT, Models, in_service, put
from tests.support.raw_tables import mixed_table
from tests.support.wording import refuses


@pytest.mark.parametrize("registry", ["directory", pytest.param("s3", marks=pytest.mark.prove)], indirect=True)
def test_one_after_the_other(models: Models, registry: Registry, tmp_path: Path) -> None:
    assert registry.promoted() is None
    first = put(models.trained(150), registry, models.data)
    assert (first.promoted, first.why) == (True, "it is the first in this registry")
    again = put(models.trained(150), registry, models.data)
    assert (again.promoted, again.why) == (False, f"it is version {first.version}, which is already in service")
    worse = put(models.trained(1), registry, models.data)
    assert not worse.promoted and "points of accuracy on" in worse.why and "more than the 8 allowed" in worse.why
    assert in_service(registry, tmp_path / "served") == first.version
    better = put(models.trained(200), registry, models.data)
    assert better.promoted and f"against version {first.version}" in better.why
    assert in_service(registry, tmp_path / "served") == better.version == package_version(models.trained(200))
    assert [pointer.version for pointer in registry.history()] == [first.version, better.version]


def test_too_few_rows_keep_what_is_there_or_not(models: Models, tmp_path: Path) -> None:
    registry = Registry(str(tmp_path / "registry"))
    put(models.trained(150), registry, models.data)
    strict = evaluate_promotion(models.trained(200), registry, models.data, PromotionConfig(max_loss=0.1))
    assert not strict.passed and "not significant with" in strict.why
    bold = PromotionConfig(max_loss=0.1, when_in_doubt="take")
    taken = evaluate_promotion(models.trained(200), registry, models.data, bold)
    assert taken.passed and "taken anyway: promotion.when_in_doubt" in taken.why


@pytest.mark.prove
def test_regressions_are_compared_by_their_rmse(tmp_path: Path) -> None:
    data = PreparedData.open(mixed_table(tmp_path / "data", "regression"))
    registry = Registry(str(tmp_path / "registry"))
    usual, overfitted = (package(tmp_path / str(steps), data, steps) for steps in (5, 150))
    assert put(usual, registry, data).promoted
    worse = put(overfitted, registry, data, PromotionConfig(max_loss=0.0))
    assert not worse.promoted and "% of RMSE on" in worse.why and "more than the 0 allowed" in worse.why
    assert put(overfitted, registry, data, PromotionConfig(max_loss=60.0)).promoted


def test_a_directory_that_is_no_model_is_refused(models: Models, tmp_path: Path) -> None:
    with refuses(UserError):
        evaluate_promotion(tmp_path, Registry(str(tmp_path / "registry")), models.data, LENIENT)
    assert not (tmp_path / "registry").exists()


def test_a_key_that_is_missing_promotes_nothing(models: Models, tmp_path: Path) -> None:
    registry, config = Registry(str(tmp_path / "registry")), PromotionConfig(signing_key=str(tmp_path / "none.pem"))
    with refuses(UserError, match=r"none\.pem:"):
        put(models.trained(150), registry, models.data, config)
    assert registry.history() == []


def test_a_bucket_that_is_missing_is_one_line(models: Models, store: FaultyS3) -> None:
    registry = Registry("s3://no-such-bucket/models")
    with refuses(UserError):
        put(models.trained(150), registry, models.data)
