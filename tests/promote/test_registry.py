"""Damaged and untrusted registries, and the registry's command."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.promote.comparison import evaluate_promotion
from slipstream.pipeline.promote.store import Registry, main, package_version
from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.errors import UserError
from tests.support.promotions import LENIENT, Models, flip, in_service, put
from tests.support.proving import first_few
from tests.support.wording import refuses, same_wording


@pytest.mark.parametrize(
    "damage",
    first_few(
        [
            lambda version: flip(version / "model.onnx"),
            lambda version: (version / "model.onnx").unlink(),
            lambda version: (version / "manifest.json").write_text("{}"),
            lambda version: (version / "stray").write_text("of others"),
        ],
        2,
    ),
    ids=["changed", "missing", "manifest", "stray"],
)
def test_a_damaged_package_that_lies_there_is_stored_again(
    damage: Callable[[Path], None], models: Models, tmp_path: Path
) -> None:
    """The damaged version was stored by a run that decided too late."""
    registry, model = Registry(str(tmp_path / "registry")), models.trained(150)
    damage(Path(registry.uri, "versions", registry.add(model)))
    assert put(model, registry, models.data).promoted
    assert in_service(registry, tmp_path / "served") == package_version(model)


def test_a_damaged_model_in_service_is_named(models: Models, served: Registry) -> None:
    pointer = served.promoted()
    assert pointer is not None
    path = Path(served.uri, "versions", pointer.version, "model.onnx")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=rf"{pointer.version}: .*model\.onnx: [\d,]+ bytes"):
        evaluate_promotion(models.trained(200), served, models.data, LENIENT)


def test_the_same_model_is_in_service_only_if_it_is_whole_there(models: Models, served: Registry) -> None:
    pointer = served.promoted()
    assert pointer is not None
    flip(Path(served.uri, "versions", pointer.version, "model.onnx"))
    with refuses(UserError, match=f"{pointer.version}:"):
        evaluate_promotion(models.trained(150), served, models.data, LENIENT)


def test_what_others_put_beside_the_promotions_is_none(models: Models, served: Registry) -> None:
    for name in (".DS_Store", "notes.txt", "zz.json", "00000002.json~", "old/00000009.json", "000000003.json"):
        path = Path(served.uri, "promoted", name)
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    before = served.promoted()
    assert before is not None and served.history() == [before] and before.number == 1
    assert put(models.trained(200), served, models.data).promoted
    assert [pointer.number for pointer in served.history()] == [1, 2]


def test_a_promotion_under_the_number_of_another_is_named(served: Registry) -> None:
    """If it was trusted, the next number would always be taken."""
    shutil.copy(Path(served.uri, "promoted", "00000001.json"), Path(served.uri, "promoted", "00000002.json"))
    with refuses(UserError, match=r"promoted/00000002\.json:"):
        served.promoted()


@pytest.mark.parametrize(
    "changed", [{"version": "../../outside"}, {"version": ""}, {"manifest": "x"}, {"version": "0123456789abcdef\n"}]
)
def test_a_pointer_leads_nowhere_but_to_a_version(served: Registry, changed: dict[str, str]) -> None:
    pointer = served.promoted()
    assert pointer is not None
    forged = canonical_json({**vars(pointer), "number": 2, **changed})
    Path(served.uri, "promoted", "00000002.json").write_bytes(forged)
    with refuses(UserError, match=r"promoted/00000002\.json:"):
        served.promoted()


def test_a_record_forges_no_line_of_the_list(served: Registry) -> None:
    pointer = served.promoted()
    assert pointer is not None
    forged = canonical_json({**vars(pointer), "number": 2, "why": "better\n   3  today  0123\x1b[2J", "at": "now\n"})
    Path(served.uri, "promoted", "00000002.json").write_bytes(forged)
    lines = CliRunner().invoke(main, [served.uri]).output.splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    assert lines[1].endswith(r"better 3 today 0123\x1b[2J")


def test_a_damaged_record_of_an_earlier_promotion_hides_none(models: Models, served: Registry, tmp_path: Path) -> None:
    assert put(models.trained(200), served, models.data).promoted
    Path(served.uri, "promoted", "00000001.json").write_text("{")
    ran = CliRunner().invoke(main, [served.uri, "--fetch", str(tmp_path / "model")])
    assert ran.exit_code == 0, ran.output
    damaged, second, fetched = ran.output.splitlines()
    assert "promoted/00000001.json: " in damaged and package_version(models.trained(200)) in second
    assert package_version(tmp_path / "model") == package_version(models.trained(200)) and str(tmp_path) in fetched


def test_the_command_lists_and_fetches(models: Models, served: Registry, tmp_path: Path) -> None:
    ran = CliRunner().invoke(main, [served.uri, "--fetch", str(tmp_path / "out" / "model")])
    assert ran.exit_code == 0, ran.output
    assert package_version(models.trained(150)) in ran.output and "it is the first in this registry" in ran.output
    check_package(tmp_path / "out" / "model")
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / "model"]
    again = CliRunner().invoke(main, [served.uri, "--fetch", str(tmp_path / "out" / "model")])
    assert again.exit_code == 1 and "already exists" in again.output
    empty = CliRunner().invoke(main, [str(tmp_path / "empty")])
    assert empty.exit_code == 1
    same_wording(empty.output)
