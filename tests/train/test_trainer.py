"""The order of the steps of a training."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any, get_args, get_origin, get_type_hints

from slipstream.pipeline.train.run import Trainer
from slipstream.pipeline.train.setup import (
    BuiltModel,
    PlacedModel,
    ResolvedTraining,
    ResumedTraining,
    Setup,
    TrainedState,
)

#: The steps in order, and what each returns.
STEPS = {
    "resolve": ResolvedTraining,
    "build": BuiltModel,
    "place": PlacedModel,
    "divide": Setup,
    "restore": ResumedTraining,
    "train": TrainedState,
    "write": type(None),
}


def test_every_step_takes_only_what_the_step_before_returned() -> None:
    taken: list[Any] = []
    for name, returned in STEPS.items():
        hints = get_type_hints(getattr(Trainer, name))
        result = hints.pop("return")
        assert list(hints.values()) == taken, name
        assert (get_args(result)[0] if get_origin(result) is Iterator else result) is returned, name
        taken = [returned]


def test_the_steps_are_taken_in_their_order() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(Trainer.run)))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    calls.sort(key=lambda call: (call.end_lineno, call.end_col_offset))  # in the order of their results
    assert [call.func.attr for call in calls if isinstance(call.func, ast.Attribute)] == list(STEPS)
