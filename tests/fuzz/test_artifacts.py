"""What enters from outside, changed at random: it is taken, or refused in one line; never a traceback, a hang, a file
outside of the target, or a result that is half there.

A case is a number: the seed of its changes. ``make test`` has the first few of each kind, ``make prove`` as many new
ones as fit into :data:`SECONDS`, which begin at the time of day, so that no two runs have the same; a failure names
its number.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.artifacts.format import BLOCK_BYTES, MANIFEST, hash_file
from slipstream.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.config import RunConfig
from slipstream.errors import UserError
from slipstream.export.check import DIGEST, BadPackage, check, digest_line
from slipstream.interconnect.history import ProfileHistory
from slipstream.interconnect.profile import COURSE, MODEL, write_profile
from slipstream.models.config import ModelConfig
from slipstream.models.factory import build as build_model
from slipstream.models.trained import TrainedModel
from slipstream.one_line import MOST_CHARACTERS
from slipstream.promote.store import Registry, manifest_digest
from slipstream.report.engine import build
from slipstream.report.stage_results import Results
from slipstream.settings import to_dict
from tests.support.bases import SIGNATURE, make_base
from tests.support.hostile_names import outside, target_among_others
from tests.support.mutations import changed_bytes, changed_json
from tests.support.network_profiles import network_profile
from tests.support.packages import package
from tests.support.report_runs import STAGES, results
from tests.support.small_run import Run
from tests.support.toys import table, untrained
from tests.support.watched_runs import watched_files

#: Of each kind in ``make prove``; with ``test_tables.py`` they take half an hour.
SECONDS = 150.0
#: Of each kind in ``make test``.
CASES = 25
#: The longest that one case may take.
HANG_S = 20.0


class Refused(Exception):
    """In one line."""


def one_line(error: UserError | BadPackage) -> None:
    text = str(error)
    assert text and text.isprintable(), f"not one line to read: {text!r}"
    assert len(text) <= MOST_CHARACTERS + 3, f"{len(text)} characters: {text[:200]!r}"


# What is read, each made whole once


def run_artifacts(place: Path) -> None:
    results(place, ["no", "yes"], trained=watched_files())


def read_run(place: Path) -> None:
    found = Results.open(*(place / name for name in ("prepare", "train", "evaluate", "export", "collectives")))
    build(place / "runs", found, STAGES, to_dict(RunConfig()))


def prepared(place: Path) -> None:
    table(place, "classification")


def read_prepared(place: Path) -> None:
    data = PreparedData.open(place)
    data.artifact.check()
    for split in SPLITS:
        data.split(split)


def trained(place: Path) -> None:
    untrained(place, table(place.with_name("data"), "classification"))


def read_trained(place: Path) -> None:
    TrainedModel.open(place).load()


def exported(place: Path) -> None:
    package(place, table(place.with_name("data"), "classification"), 1)


def read_exported(place: Path) -> None:
    check(place)


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


def read_settings(place: Path) -> None:
    for file in sorted(place.iterdir()):
        RunConfig.from_file(file)


def base(place: Path) -> None:
    make_base(place, max_shard_size="20KB", tokenizer=False)


def read_base(place: Path) -> None:
    build_model(ModelConfig(base=str(place)), SIGNATURE, seed=0)


#: How each is made, and how it is read.
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "results of a run": (run_artifacts, read_run),
    "prepared data": (prepared, read_prepared),
    "trained model": (trained, read_trained),
    "exported model": (exported, read_exported),
    "network profiles": (profiles, read_profiles),
    "promotions": (promotions, read_promotions),
    "checkpoints": (checkpoints, read_checkpoints),
    "settings": (settings_file, read_settings),
    "base": (base, read_base),
}
#: Other libraries read them, and need not see what was changed if the manifest vouches for it. Nor does a training: who
#: writes to the home of its checkpoints is trusted.
BINARY = {".onnx", ".parquet", ".npz", ".bin"}


def spoil(draw: random.Random, kind: str, place: Path) -> None:
    """Change a file. As often as not the artifact vouches for it, as that of a hostile or another version's would."""
    path = draw.choice(sorted(path for path in place.rglob("*") if path.is_file()))
    data = path.read_bytes()
    if path.suffix == ".json":
        path.write_bytes(changed_json(draw, data))
    else:
        path.write_bytes(changed_bytes(draw, data))
    vouched = path.suffix not in BINARY and kind != "checkpoints"
    if vouched and draw.random() < 0.5:
        vouch(path)


def vouch(path: Path) -> None:
    manifest = next((up / MANIFEST for up in path.parents if (up / MANIFEST).is_file()), None)
    if manifest is None:
        return
    if path != manifest:
        tree = json.loads(manifest.read_bytes())
        name = path.relative_to(manifest.parent).as_posix()
        block_bytes = tree["files"][name]["block_bytes"] if name in tree["files"] else BLOCK_BYTES
        tree["files"][name] = vars(hash_file(path, block_bytes))
        manifest.write_text(json.dumps(tree))
    digest = manifest.with_name(DIGEST)
    if digest.is_file():
        digest.write_text(digest_line(manifest.read_bytes()))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp("whole") / "made"
            KINDS[kind][0](made[kind])
            KINDS[kind][1](Path(shutil.copytree(made[kind], made[kind].with_name("copy"))))
        return made[kind]

    return of


def try_case(kind: str, seed: int, whole: Path) -> str:
    """What came of it: "taken" or "refused"."""
    with target_among_others() as (place, target):
        shutil.copytree(whole, target, dirs_exist_ok=True)
        spoil(random.Random(seed), kind, target)
        others, started = outside(place, target), time.monotonic()
        try:
            KINDS[kind][1](target)
        except (UserError, BadPackage) as error:
            one_line(error)
            found = "refused"
        else:
            found = "taken"
        assert outside(place, target) == others, "wrote outside of its target"
        assert time.monotonic() - started < HANG_S
    return found


def try_cases(kind: str, seeds: Any, whole: Path, until: float = float("inf")) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        if time.monotonic() > until:
            break
        try:
            found[try_case(kind, seed, whole)] += 1
        except Exception as error:
            raise AssertionError(f"{kind}, case {seed}: {type(error).__name__}: {error}") from error
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_changed_is_taken_or_refused_in_one_line(kind: str, whole: Callable[[str], Path]) -> None:
    found = try_cases(kind, range(CASES), whole(kind))
    assert found["refused"] > CASES / 4, found


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
def test_so_is_whatever_else_comes(kind: str, whole: Callable[[str], Path]) -> None:
    first = time.time_ns() // 1000
    made = whole(kind)
    found = try_cases(kind, range(first, first + 10**9), made, time.monotonic() + SECONDS)
    print(f"\n{kind}: {dict(found)}, from case {first} on")
    assert found["refused"] > found.total() / 4
