"""Conditionals within branches of conditionals, run on one machine.

flytekit lets an inner conditional share the outer one's state of execution: cases of it that are not taken run all the
same, and what follows it in its branch does not. On a cluster Flyte itself decides, and does so rightly.
"""

from __future__ import annotations

from flytekit.core.context_manager import BranchEvalMode, FlyteContext

enter_section = FlyteContext.Builder.enter_conditional_section


def enter_with_own_state(builder: FlyteContext.Builder) -> FlyteContext.Builder:
    """flytekit's, except that every conditional begins with a state of its own, in which no case is taken yet."""
    state = builder.execution_state
    if state and state.is_local_execution():
        builder.execution_state = state.with_params(branch_eval_mode=BranchEvalMode.BRANCH_SKIPPED)
    return enter_section(builder)


def allow_nested_conditions() -> None:
    setattr(FlyteContext.Builder, "enter_conditional_section", enter_with_own_state)  # noqa: B010 - a method, to mypy
