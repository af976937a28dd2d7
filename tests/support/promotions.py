"""Models to promote, and promotions by a run."""

import shutil
from pathlib import Path

from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.promote.comparison import evaluate_promotion, promote_package
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.promote.store import Registry
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.scoring import Promotion
from tests.support.once import made_once
from tests.support.packages import package
from tests.support.raw_tables import mixed_table

#: A limit in points that is high enough to be shown with 200 test rows.
LENIENT = PromotionConfig(max_loss=8.0)


class Models:
    """Exported models of one table, by how long they were trained.

    Each is made by the first process that asks for it; what is made is never changed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        made_once(directory / "data", lambda place: mixed_table(place, "classification"))
        self.data = PreparedData.open(directory / "data")

    def trained(self, steps: int) -> Path:
        return made_once(self.directory / f"model-{steps}", lambda place: package(place, self.data, steps))


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
