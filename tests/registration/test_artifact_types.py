"""Tasks accept only artifacts of their kind, checked by the backend at registration and by tasks in every call."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flytekit import FlyteContextManager, task, workflow
from flytekit.core.type_engine import TypeEngine, TypeTransformerFailedError
from flytekit.types.directory import FlyteDirectory

from slipstream.flyte.artifact_types import Evaluated, Prepared, Trained
from slipstream.operations.doctor.archive import RegistrationArchive, workflow_nodes
from slipstream.shared.artifacts.format import ArtifactWriter


@task
def an_evaluation() -> Evaluated:
    return FlyteDirectory(str(Path(__file__).parent))


@task
def name_of(trained: Trained) -> str:
    return Path(trained.path).name


@task
def names_of(trained: list[Trained]) -> list[str]:
    return [Path(each.path).name for each in trained]


@workflow
def swapped() -> str:
    return name_of(trained=an_evaluation())


@workflow
def one_of_a_list() -> list[str]:
    return names_of(trained=[an_evaluation()])


@pytest.mark.parametrize("wrong", [swapped, one_of_a_list])
def test_an_evaluation_is_no_trained_model(wrong: Any) -> None:
    with pytest.raises(TypeTransformerFailedError, match=r"'evaluate'.*'train'"):
        wrong()


def test_a_directory_without_a_kind_is_taken(tmp_path: Path) -> None:
    assert name_of(trained=FlyteDirectory(str(tmp_path))) == tmp_path.name


def test_the_content_is_what_the_cache_keys_on(tmp_path: Path) -> None:
    """Not the code that made it, nor what only describes it."""
    context, type_ = FlyteContextManager.current_context(), TypeEngine.to_literal_type(Prepared)

    def hash_of(name: str, rows: bytes, card: bytes, code: str) -> str:
        writer = ArtifactWriter(tmp_path / name)
        writer.write_bytes("train-00000.rows", rows)
        writer.write_bytes("card.json", card)
        writer.finish("prepare", {"code": code})
        literal = TypeEngine.to_literal(context, FlyteDirectory(str(tmp_path / name)), Prepared, type_)
        assert literal.scalar.blob.metadata.type.format == type_.blob.format == "prepare"
        return literal.hash

    first = hash_of("first", b"rows", b"{}", "v1")
    assert first and hash_of("other code", b"rows", b"{ }", "v2") == first
    assert hash_of("other rows", b"others", b"{}", "v1") != first


def formats(of: Any) -> set[str]:
    """The formats of the directories in a type of Flyte's."""
    if of.HasField("collection_type"):
        return formats(of.collection_type)
    return {of.blob.format} if of.HasField("blob") else set()


def interface_of(package: RegistrationArchive, node: Any) -> Any:
    if node.HasField("array_node"):
        return interface_of(package, node.array_node.node)
    if node.HasField("branch_node"):
        return interface_of(package, node.branch_node.if_else.case.then_node)
    if node.HasField("workflow_node"):
        called = node.workflow_node
        return package.workflows[called.sub_workflow_ref.name or called.launchplan_ref.name].interface
    return package.tasks[node.task_node.reference_id.name].interface


def promises(data: Any) -> Iterator[Any]:
    if data.HasField("promise") and not data.promise.attr_path:
        yield data.promise
    for inner in (*data.collection.bindings, *data.map.bindings.values()):
        yield from promises(inner)


def mismatches(package: RegistrationArchive) -> Iterator[str]:
    """The bindings of directories that propeller's compiler refuses: it compares the types of both ends."""
    for name, template in package.workflows.items():
        nodes = {node.id: node for node in template.nodes if node.id != "start-node"}
        within = [(path, node) for path, node in workflow_nodes(template) if node.id not in ("", "start-node")]
        bound = [(node.inputs, interface_of(package, node).inputs, path) for path, node in within]
        for bindings, expected, place in (*bound, (template.outputs, template.interface.outputs, "outputs")):
            for binding in bindings:
                for promise in promises(binding.binding):
                    source = nodes.get(promise.node_id)
                    given = interface_of(package, source).outputs if source else template.interface.inputs
                    found = formats(given.variables[promise.var].type)
                    if binding.var in expected.variables and found != formats(expected.variables[binding.var].type):
                        yield f"{name}/{place}: {binding.var} is bound to {promise.node_id}.{promise.var}, {found}"


def test_the_workflows_bind_artifacts_of_one_kind(package_for: Callable[[str], RegistrationArchive]) -> None:
    packaged = package_for("a100-spot")
    assert not list(mismatches(packaged))
    train = packaged.tasks["tasks.train.train"].interface.inputs.variables["prepared"].type.blob
    train.format = "evaluate"
    assert any("prepared is bound to" in line for line in mismatches(packaged))
