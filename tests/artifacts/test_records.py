"""Records are read back unchanged; an error names the field."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from pydantic import Field

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact
from slipstream.shared.artifacts.records import from_json, from_tree, read_record, to_json, to_tree, write_record
from slipstream.shared.artifacts.results.evaluation import Evaluation, Headline
from slipstream.shared.artifacts.results.export import ExportReport
from tests.support.report_runs import evaluation, export, signature_of
from tests.support.wording import refuses


@dataclass(frozen=True)
class Point:
    x: float
    start: Annotated[int, Field(alias="from")] = 0


@dataclass(frozen=True)
class OldMap:
    REMEDY: ClassVar = "draw it again"
    title: str
    points: tuple[Point, ...]
    best: Point | None = None
    shares: dict[str, float | None] = field(default_factory=dict)
    anything: dict[str, Any] = field(default_factory=dict)


MAP = OldMap("a map", (Point(0.5, 3), Point(-0.0)), Point(1.0), {"a": 0.1, "b": None}, {"deep": [1, {"x": None}]})
TREE = to_tree(MAP)


def test_a_record_comes_back_as_it_was() -> None:
    assert from_json(to_json(MAP), OldMap, "file") == MAP == from_tree(TREE, OldMap, "file")
    assert from_json(to_json([*MAP.points], list[Point]), list[Point], "file") == [*MAP.points]


def test_every_field_is_written_in_one_order_under_its_name() -> None:
    assert json.loads(to_json(Point(1.0, 2))) == {"from": 2, "x": 1.0}
    assert json.loads(to_json(OldMap("m", ()))) == {
        "title": "m",
        "points": [],
        "best": None,
        "shares": {},
        "anything": {},
    }
    assert to_json(MAP).index(b'"anything"') < to_json(MAP).index(b'"title"')


def test_a_field_with_a_default_may_be_missing() -> None:
    assert from_json(b'{"title": "m", "points": []}', OldMap, "file") == OldMap("m", ())


@pytest.mark.parametrize(
    "tree",
    [
        {**TREE, "title": 3},
        {**TREE, "extra": 1},
        {name: value for name, value in TREE.items() if name != "points"},
        {**TREE, "points": [{"x": True}]},
        {**TREE, "points": [{"x": "1"}]},
        {**TREE, "points": [{"x": 1.0, "start": 3}]},
        {**TREE, "points": [{"x": 1.0, "from": 3.0}]},
        {**TREE, "best": []},
        [],
    ],
)
def test_what_is_not_of_the_type_is_named(tree: object) -> None:
    with refuses(DamagedArtifact, match="^dir/file:") as error:
        from_json(json.dumps(tree).encode(), OldMap, "dir/file")
    assert "\n" not in error.value.message


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_finite(number: str) -> None:
    with refuses(DamagedArtifact):
        from_json(f'{{"x": {number}}}'.encode(), Point, "file")
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            to_json(Point(value))


@pytest.mark.parametrize("record", [Point("x"), Point(1.0, 2.5), OldMap("m", [Point(1.0)])])  # type: ignore[arg-type]
def test_a_writer_that_is_wrong_is_told(record: object) -> None:
    with refuses(ValueError):
        to_json(record)


def test_an_export_that_contradicts_itself_is_refused() -> None:
    whole = json.loads(to_json(export("accuracy")))
    changes: list[dict[str, object]] = [{"chosen": "int4"}, {"decided_at_batch": 7}, {"variants": []}, {"task": "name"}]
    for change in changes:
        with refuses(DamagedArtifact, match=r"export\.json:"):
            from_json(json.dumps(whole | change).encode(), ExportReport, "export.json")


@pytest.mark.parametrize("task", ["name", "regression"])
def test_an_evaluation_of_no_task_or_by_another_tasks_metric_is_refused(task: str) -> None:
    whole = json.loads(to_json(evaluation(signature_of(["no", "yes"]))))
    with refuses(DamagedArtifact, match=r"evaluation\.json:"):
        from_json(json.dumps(whole | {"task": task}).encode(), Evaluation, "evaluation.json")


@pytest.mark.parametrize("title", ["\udce9", float("nan")])
def test_what_only_pythons_json_can_hold_is_refused(title: object) -> None:
    tree = {**to_tree(MAP), "title": title}
    with refuses(DamagedArtifact, match=r"map\.json:") as refused:
        from_tree(tree, OldMap, "map.json")
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", ["ab", "__class__", ""])
def test_a_model_is_judged_by_a_metric_that_there_is(name: str) -> None:
    with refuses(DamagedArtifact):
        from_json(json.dumps({"name": name, "value": 0.5}).encode(), Headline, "evaluation.json")


def test_a_file_that_an_artifact_lacks_is_named(tmp_path: Path) -> None:
    writer = ArtifactWriter(tmp_path / "a")
    write_record(writer, "map.json", MAP)
    writer.finish("map", {})
    artifact = Artifact.open(tmp_path / "a", "map")
    assert read_record(artifact, "map.json", OldMap) == MAP
    with pytest.raises(DamagedArtifact, match=r"a/other\.json: missing"):
        read_record(artifact, "other.json", OldMap)


@pytest.mark.parametrize(
    "change",
    [
        {"classes": ["no", "yes", "maybe"]},
        {"classes": ["no", "yes", "maybe"], "roc": None},
        {"confusion": [[1, 2], [3]]},
        {"scatter": {"actual": [1.0], "predicted": []}},
    ],
)
def test_data_of_plots_that_is_not_of_these_classes_is_refused(change: dict[str, Any]) -> None:
    tree = to_tree(evaluation(signature_of(["no", "yes"])))
    with refuses(DamagedArtifact):
        from_tree(tree | change, Evaluation, "evaluation.json")
