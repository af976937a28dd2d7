"""Random changes of untrusted artifacts: accepted, or refused in one line, without a traceback, a hang, partial results
or files outside of the target.

A case is a number: the seed of its changes. ``make test`` has the first few of each kind, ``make prove`` as many new
ones as fit into :data:`.SECONDS`, which begin at the time of day, so that no two runs have the same; a failure names
its number.
"""

import json
from pathlib import Path

import pytest
import yaml

from slipstream.config import RunConfig
from slipstream.config_values import read_settings
from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.promote.store import Registry, manifest_digest
from slipstream.pipeline.report.engine import build_report
from slipstream.pipeline.report.stage_results import StageResults
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.history import ProfileHistory
from slipstream.shared.interconnect.profile import COURSE, MODEL, write_profile
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.settings import to_dict
from tests.support.bases import SIGNATURE, make_base
from tests.support.fuzzed import Kinds, Whole
from tests.support.network_profiles import network_profile
from tests.support.packages import package
from tests.support.proving import first_few
from tests.support.report_runs import STAGES, results
from tests.support.small_run import Run
from tests.support.toys import untrained
from tests.support.watched_runs import watched_files

# What is read, each made whole once


def run_artifacts(place: Path) -> None:
    results(place, ["no", "yes"], trained=watched_files())


def read_run(place: Path) -> None:
    found = StageResults.open(*(place / name for name in ("prepare", "train", "evaluate", "export", "collectives")))
    build_report(place / "runs", found, STAGES, to_dict(RunConfig()))


def prepared(place: Path) -> None:
    write_table(place, "classification")


def read_prepared(place: Path) -> None:
    data = PreparedData.open(place)
    data.artifact.check()
    for split in SPLITS:
        data.split(split)


def trained(place: Path) -> None:
    untrained(place, write_table(place.with_name("data"), "classification"))


def read_trained(place: Path) -> None:
    TrainedModel.open(place).load()


def exported(place: Path) -> None:
    package(place, write_table(place.with_name("data"), "classification"), 1)


def read_exported(place: Path) -> None:
    check_package(place)


def profiles(place: Path) -> None:
    measured = place.with_name("measured")
    write_profile(measured, network_profile(), {}, {COURSE: b"[]", MODEL: b"[]"})
    ProfileHistory(str(place), network_profile().fingerprint).add(measured, network_profile().measured_at)


def read_profiles(place: Path) -> None:
    history = ProfileHistory(str(place), network_profile().fingerprint)
    for name in history.names():
        history.fetch(name)


def promotions(place: Path) -> None:
    model, registry = place.with_name("model"), Registry(str(place))
    exported(model)
    for number in (1, 2):
        registry.point(number, registry.add(model), manifest_digest(model), "better by 2 points")


def read_promotions(place: Path) -> None:
    registry = Registry(str(place))
    registry.history()
    if promoted := registry.promoted():
        registry.fetch(promoted, place / "fetched")


def checkpoints(place: Path) -> None:
    run = Run(place)
    for step in (3, 6):
        run.steps(3)
        run.save(step)


def read_checkpoints(place: Path) -> None:
    restored = Run(place).checkpoints.restore()
    if restored is None:
        raise UserError("none is whole")
    assert restored.progress == {"step": restored.step} and restored.step in (3, 6)
    if restored.refused:
        raise UserError("; ".join(restored.refused))


def settings_file(place: Path) -> None:
    place.mkdir()
    (place / "run.json").write_text(json.dumps(to_dict(RunConfig())))
    (place / "run.yaml").write_text(yaml.safe_dump(to_dict(RunConfig())))


def read_run_settings(place: Path) -> None:
    for file in sorted(place.iterdir()):
        read_settings(RunConfig, [str(file)])


def base(place: Path) -> None:
    make_base(place, max_shard_size="20KB", tokenizer=False)


def read_base(place: Path) -> None:
    build_model(ModelConfig(base=str(place)), SIGNATURE, seed=0)


KINDS: Kinds = {
    "results of a run": (run_artifacts, read_run),
    "prepared data": (prepared, read_prepared),
    "trained model": (trained, read_trained),
    "exported model": (exported, read_exported),
    "network profiles": (profiles, read_profiles),
    "promotions": (promotions, read_promotions),
    "checkpoints": (checkpoints, read_checkpoints),
    "settings": (settings_file, read_run_settings),
    "base": (base, read_base),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return Whole(lambda: tmp_path_factory.mktemp("whole"), KINDS)


@pytest.mark.parametrize("kind", first_few(KINDS, 3))
def test_what_was_changed_is_taken_or_refused_in_one_line(kind: str, whole: Whole) -> None:
    whole.try_few(kind)


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_so_is_whatever_else_comes(kind: str, whole: Whole) -> None:
    whole.try_many(kind)
