"""``--config``: files, JSON and single values combine in their order."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.config import FineTuneConfig, RunConfig
from slipstream.config_values import read_settings
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.shared.errors import UserError
from tests.support.wording import refuses


@pytest.fixture
def in_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("training:\n  epochs: 9\n  seed: 4\ncollectives:\n  launches: 2\n", encoding="utf-8")


@pytest.mark.usefixtures("in_files")
def test_later_values_override() -> None:
    config = read_settings(RunConfig, ["run.yaml", "training.epochs=3", '{"model": {"arguments": {"hidden": [8]}}}'])
    assert (config.training.epochs, config.training.seed, config.collectives.launches) == (3, 4, 2)
    assert config.model.arguments == {"hidden": [8]}
    assert read_settings(RunConfig, ["training.epochs=3", "run.yaml"]).training.epochs == 9
    assert read_settings(RunConfig, []) == RunConfig()
    assert read_settings(FineTuneConfig, ["training.epochs=3"]).training.batch_size == 16


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("training.learning_rate=1e-3", "training.learning_rate 0.001"),
        ("training.deterministic=false", "training.deterministic False"),
        ("data.missing=[a, b]", "data.missing ['a', 'b']"),
        ("data.delimiter=;", "data.delimiter ;"),
        ("data.delimiter=,", "data.delimiter ,"),
        ('data.quote="', 'data.quote "'),
        ("data.quote=null", "data.quote "),
        *((f"data.delimiter={mark}", f"data.delimiter {mark}") for mark in ("|", "#", "&", "*", "\t", " ", "'")),
        *((f"data.thousands={mark}", f"data.thousands {mark}") for mark in (" ", "'", "_")),
        ("data.delimiter='|'", "data.delimiter |"),
        ('data.delimiter="\\t"', "data.delimiter \t"),
        *((f"data.delimiter={null}", "data.delimiter ") for null in ("", "~", "Null", "''")),
        ("data.decimal=,", "data.decimal ,"),
        ("data.id=a #b", "data.id a #b"),
        ("data.id=&a b", "data.id &a b"),
        ("data.id='a': 'b'", "data.id 'a': 'b'"),
        ("data.id=7", "data.id 7"),
        ("data.id=007", "data.id 007"),
        ("training.epochs=010", "training.epochs 10"),
        ("training.batch_size=08", "training.batch_size 8"),
        ("training.learning_rate=00.5", "training.learning_rate 0.5"),
        ("model.arguments.hidden=[010, 0o7]", "model.arguments {'hidden': [10, '0o7']}"),
        ("data.types.a.b=text", "data.types {'a.b': 'text'}"),
        ("model.arguments.hidden=[8, 4]", "model.arguments {'hidden': [8, 4]}"),
        ("sweep.space.training.epochs={low: 1, high: 3}", "sweep.space {'training.epochs': {'low': 1, 'high': 3}}"),
        ("model.base=s3://bucket/a=b", "model.base s3://bucket/a=b"),
    ],
)
def test_a_single_value(text: str, value: str) -> None:
    path, _, expected = value.partition(" ")
    found: object = read_settings(RunConfig, [text])
    for name in path.split("."):
        found = getattr(found, name)
    assert str(found) == expected


@pytest.mark.usefixtures("in_files")
def test_a_file_has_decimal_numbers() -> None:
    Path("zeros.yaml").write_text("training: {epochs: 010, seed: -0, batch_size: 0x10}\n", encoding="utf-8")
    training = read_settings(RunConfig, ["zeros.yaml"]).training
    assert (training.epochs, training.seed, training.batch_size) == (10, 0, 16)


@pytest.mark.usefixtures("in_files")
def test_one_shape_of_file_serves_every_command() -> None:
    for given in ("run.yaml", '{"launches": 2}', "collectives.launches=2", "launches=2"):
        assert read_settings(CollectivesConfig, [given]) == CollectivesConfig(launches=2)
    assert read_settings(CollectivesConfig, ["training.epochs=3"]) == CollectivesConfig()
    assert read_settings(CollectivesConfig, ["run.yaml", "pairs=false"]) == CollectivesConfig(launches=2, pairs=False)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("training.epoch=3", "training.epoch"),
        ("trainin.epochs=3", "trainin"),
        ("training.epochs=[", "training.epochs=["),
        ("training.epochs=1:30", "training.epochs"),
        ("training=3", "training"),
        ("training.epochs.a=3", "training.epochs"),
        ("./a=b.yaml", "a=b.yaml"),
        ("[1]", "config"),
    ],
)
def test_a_wrong_value_is_one_line(text: str, place: str) -> None:
    with refuses(UserError) as refusal:
        read_settings(RunConfig, ["{}", text])
    assert refusal.value.message.startswith(f"{place}: ")


def test_a_wrong_section_is_one_line() -> None:
    with refuses(UserError, match=r"^collectives\.launchs: "):
        read_settings(CollectivesConfig, ["launchs=2"])
