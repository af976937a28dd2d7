"""Models to promote, and promotions by a run."""

import shutil
from pathlib import Path

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.results.promotion import Promotion
from slipstream.export.check import check_package
from slipstream.promote.config import PromotionConfig
from slipstream.promote.engine import evaluate_promotion, promote_package
from slipstream.promote.store import Registry
from tests.support.packages import package
from tests.support.raw_tables import mixed_table

#: A limit in points that is high enough to be shown with 200 test rows.
LENIENT = PromotionConfig(max_loss=8.0)


class Models:
    """Exported models of one table, by how long they were trained; made when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.data = PreparedData.open(mixed_table(directory / "data", "classification"))

    def trained(self, steps: int) -> Path:
        place = self.directory / f"model-{steps}"
        return place if place.exists() else package(place, self.data, steps)


def put(model: Path, registry: Registry, data: PreparedData, config: PromotionConfig = LENIENT) -> Promotion:
    """What the workflow does: judge, and promote what has passed."""
    verdict = evaluate_promotion(model, registry, data, config)
    if not verdict.passed:
        return Promotion(False, registry.uri, "", verdict.why)
    return promote_package(model, registry, data, config, verdict)


def in_service(registry: Registry, directory: Path) -> str:
    """The version in service, fetched and checked as a server would."""
    pointer = registry.promoted()
    assert pointer is not None
    shutil.rmtree(directory, ignore_errors=True)
    check_package(registry.fetch(pointer, directory))
    return pointer.version


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
