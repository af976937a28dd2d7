"""The rehearsed cluster's rules for inputs, cached results, retry budgets and conditions."""

import random
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from flyteidl.core.condition_pb2 import BooleanExpression, ComparisonExpression, ConjunctionExpression
from flyteidl.core.literals_pb2 import BindingData, Literal
from flyteidl.core.tasks_pb2 import TaskTemplate
from flyteidl.core.workflow_pb2 import ArrayNode, IfElseBlock, Node
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from slipstream.operations.proofs.rehearsal.catalog import cache_key
from slipstream.operations.proofs.rehearsal.kills import drawn
from slipstream.operations.proofs.rehearsal.nodes import START, MalformedBranch, decide, needed, resolve, upstream
from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome, RetryBudget
from slipstream.operations.proofs.rehearsal.rehearsal import CONFIG, difference, literal, shrunk
from slipstream.operations.proofs.rehearsal.rendering import rendered
from slipstream.shared.profiles.profile import BUILT_IN, load_profile

SETTINGS = {"data": {f"name{number}": number for number in range(12)}, "sizes": [1, 2], "rate": 0.5, "on": True}
SYSTEM, USER = AttemptOutcome("system", "lost"), AttemptOutcome("user", "lost peer")


def text(value: str, hash: str = "") -> Literal:
    made = Literal(hash=hash)
    made.scalar.primitive.string_value = value
    return made


def structure(value: Any, hash: str = "") -> Literal:
    made = Literal(hash=hash)
    made.scalar.binary.value, made.scalar.binary.tag = msgpack.packb(value), "msgpack"
    return made


def promise(node: str, variable: str, *path: str) -> BindingData:
    made = BindingData()
    made.promise.node_id, made.promise.var = node, variable
    for name in path:
        made.promise.attr_path.add().string_value = name
    return made


def collection(*literals: Literal) -> Literal:
    made = Literal()
    made.collection.literals.extend(literals)
    return made


def task(**metadata: Any) -> TaskTemplate:
    made = TaskTemplate()
    made.id.name, made.metadata.discovery_version = "tasks.some", "1"
    for name, value in metadata.items():
        getattr(made.metadata, name).extend(value)
    return made


@pytest.mark.parametrize("value", ["s3://bucket/data/", "", CONFIG], ids=["text", "empty text", "settings"])
def test_inputs_are_the_literals_that_flytekit_makes(value: Any) -> None:
    context, kind = FlyteContextManager.current_context(), type(value)
    theirs = TypeEngine.to_literal(context, value, kind, TypeEngine.to_literal_type(kind))
    assert literal(value) == theirs.to_flyte_idl()


def test_a_path_into_a_structure_is_packed_in_another_order_each_time() -> None:
    outputs, draw = {START: {"config": structure(SETTINGS, hash="of the whole")}}, random.Random(0)
    found = [resolve(promise("", "config", "data"), outputs, draw) for _ in range(3)]
    assert all(msgpack.unpackb(each.scalar.binary.value) == SETTINGS["data"] for each in found)
    assert len({each.scalar.binary.value for each in found}) == 3 and not any(each.hash for each in found)
    keys = {cache_key(task(), {"config": each}) for each in found}
    assert len(keys) == 3, "what flyte#6517 is about"


def test_a_whole_output_keeps_its_bytes_and_its_hash() -> None:
    whole = structure(SETTINGS, hash="abc")
    assert resolve(promise("n0", "config"), {"n0": {"config": whole}}, random.Random(0)) == whole


@pytest.mark.parametrize(("name", "kind"), [("rate", "float_value"), ("on", "boolean")])
def test_a_path_to_a_primitive_is_a_primitive(name: str, kind: str) -> None:
    found = resolve(promise("n0", "o0", name), {"n0": {"o0": structure(SETTINGS)}}, random.Random(0))
    assert getattr(found.scalar.primitive, kind) == SETTINGS[name]
    assert found.scalar.primitive.WhichOneof("value") == kind


def test_a_path_to_a_list_is_a_collection() -> None:
    found = resolve(promise("n0", "o0", "sizes"), {"n0": {"o0": structure(SETTINGS)}}, random.Random(0))
    assert [msgpack.unpackb(each.scalar.binary.value) for each in found.collection.literals] == [1, 2]


def test_lists_and_maps_of_promises_are_resolved() -> None:
    listed, mapped = BindingData(), BindingData()
    listed.collection.bindings.extend([promise("n0", "a"), promise("n1", "a")])
    mapped.map.bindings["x"].CopyFrom(promise("n1", "a"))
    outputs, draw = {"n0": {"a": text("first")}, "n1": {"a": text("second")}}, random.Random(0)
    assert resolve(listed, outputs, draw) == collection(text("first"), text("second"))
    assert resolve(mapped, outputs, draw).map.literals["x"] == text("second")


def test_what_has_a_hash_counts_by_it_and_all_else_by_its_bytes() -> None:
    def key(literal: Literal) -> str:
        return cache_key(task(), {"x": literal})

    assert key(text("here", "h")) == key(text("there", "h"))
    assert key(text("here", "h")) != key(text("here", "g"))
    assert key(text("here")) != key(text("there"))
    assert key(collection(text("here", "h"))) == key(collection(text("there", "h")))
    assert key(collection(text("here", "h"))) != key(text("here", "h"))


def test_the_key_has_the_version_and_the_name_and_leaves_out_what_is_ignored() -> None:
    inputs = {"listing": text("here"), "source": text("s")}
    ignoring, versioned, named = task(cache_ignore_input_vars=["listing"]), task(), task()
    assert cache_key(ignoring, inputs) == cache_key(ignoring, {**inputs, "listing": text("there")})
    assert cache_key(ignoring, inputs) != cache_key(ignoring, {**inputs, "source": text("t")})
    versioned.metadata.discovery_version, named.id.name = "2", "tasks.other"
    assert len({cache_key(each, inputs) for each in (task(), versioned, named)}) == 3


@pytest.mark.parametrize("retries", [0, 2])
def test_the_user_pays_for_retries_and_the_system_for_three_more(retries: int) -> None:
    budget = RetryBudget(retries, interruptible=True)
    attempts = [budget.spend(USER) for _ in range(retries + 1)]
    assert attempts == [True] * retries + [False]
    budget = RetryBudget(retries, interruptible=True)
    spot = [budget.on_spot]
    while budget.spend(SYSTEM):
        spot.append(budget.on_spot)
    assert spot == [True, True, True, False], "the last attempt that the system pays for is on demand"


def test_neither_budget_pays_for_the_other() -> None:
    budget = RetryBudget(retries=1, interruptible=True)
    assert [budget.spend(each) for each in (SYSTEM, USER, SYSTEM, SYSTEM, USER)] == [True, True, True, True, False]
    assert (budget.user, budget.system) == (2, 3)


def test_what_is_not_recoverable_is_not_tried_again() -> None:
    assert not RetryBudget(retries=5, interruptible=False).spend(AttemptOutcome("user", "a bug", recoverable=False))
    assert not RetryBudget(retries=0, interruptible=False).on_spot


def comparison(variable: str, operator: int, value: int) -> BooleanExpression:
    made = BooleanExpression()
    made.comparison.left_value.var, made.comparison.operator = variable, operator
    made.comparison.right_value.primitive.integer = value
    return made


def integer(value: int) -> Literal:
    made = Literal()
    made.scalar.primitive.integer = value
    return made


def block(condition: BooleanExpression, *, otherwise: bool = True) -> IfElseBlock:
    made = IfElseBlock()
    made.case.condition.CopyFrom(condition)
    made.case.then_node.id = "then"
    if otherwise:
        made.else_node.id = "else"
    else:
        made.error.message = "neither"
    return made


def test_a_conditional_compares_primitives() -> None:
    less = block(comparison("files", ComparisonExpression.LT, 3))
    assert decide(less, {"files": integer(2)}).id == "then"
    assert decide(less, {"files": integer(3)}).id == "else"
    both = BooleanExpression()
    both.conjunction.operator = ConjunctionExpression.AND
    both.conjunction.left_expression.CopyFrom(comparison("files", ComparisonExpression.GTE, 2))
    both.conjunction.right_expression.CopyFrom(comparison("files", ComparisonExpression.NEQ, 4))
    assert [decide(block(both), {"files": integer(n)}).id for n in (1, 2, 4)] == ["else", "then", "else"]


@pytest.mark.parametrize("files", [text("three"), structure({"n": 3})])
def test_a_conditional_on_anything_else_fails(files: Literal) -> None:
    with pytest.raises(MalformedBranch):
        decide(block(comparison("files", ComparisonExpression.EQ, 3)), {"files": files})
    with pytest.raises(MalformedBranch, match="neither"):
        decide(block(comparison("files", ComparisonExpression.EQ, 3), otherwise=False), {"files": integer(1)})


@pytest.mark.parametrize(("criterion", "number"), [({}, 5), ({"min_success_ratio": 0.5}, 3), ({"min_successes": 2}, 2)])
def test_a_map_task_needs_as_many_elements_as_its_criterion_says(criterion: dict[str, Any], number: int) -> None:
    assert needed(ArrayNode(**criterion), 5) == number
    assert needed(ArrayNode(min_success_ratio=0.0), 5) == 0


def test_a_node_waits_for_what_its_branches_are_bound_to() -> None:
    node = Node(id="n3", upstream_node_ids=["n0"])
    case = node.branch_node.if_else
    case.case.then_node.inputs.add(var="x").binding.CopyFrom(promise("n1", "o0"))
    case.else_node.inputs.add(var="x").binding.collection.bindings.append(promise("n2", "o0"))
    node.inputs.add(var="flag").binding.CopyFrom(promise("", "flag"))
    assert upstream(node) == {"n0", "n1", "n2"}


@pytest.mark.parametrize("name", sorted(path.stem for path in BUILT_IN.glob("*.toml")))
def test_a_profile_is_shrunk_to_cpus_and_keeps_its_budgets(name: str) -> None:
    whole = load_profile(name)
    small = shrunk(whole)
    for stage in (*whole.stages, "fingerprint"):
        before, after = whole.placement(stage), small.placement(stage)
        assert after.gpu == "0" and not after.accelerator and after.world_size <= 2
        assert (after.retries, after.interruptible) == (before.retries, before.interruptible)
        assert after.tolerations == before.tolerations and (after.nodes > 1) == (before.nodes > 1)
    said = difference(whole, small)
    assert name in said
    assert name != "a100-spot" or "train from 2 pods of 8 with 8 GPUs to 2 pods of 1" in said


def test_templates_are_filled_in_whatever_their_case() -> None:
    command = ["--inputs", "{{.input}}", "{{ $RawOutputDataPrefix }}/x"]
    assert rendered(command, {"input": "s3://i", "rawOutputDataPrefix": "s3://r"}) == ["--inputs", "s3://i", "s3://r/x"]
    with pytest.raises(KeyError):
        rendered(["{{.perRetryUniqueKey}}"], {})


def test_kills_are_the_same_for_the_same_seed_and_within_what_is_written() -> None:
    writes, pods = {"n0": 3, "n1": 40, "n2/0": 2, "n2/1": 2}, {"n0": 1, "n1": 2, "n2/0": 1, "n2/1": 1}
    first, second = (drawn(7, 5, writes, pods) for _ in range(2))
    assert first == second and first != drawn(8, 5, writes, pods)
    assert len(set(first)) == 5
    assert all(1 <= kill.write <= writes[kill.node] and kill.index < pods[kill.node] for kill in first)
    struck = [kill.attempt for kill in first if kill.node == "n1"]
    assert struck == [0, 1, 2] and all(b == a + 1 for a, b in pairwise(struck))
