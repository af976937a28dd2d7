"""Fix for nested conditionals in local runs.

In flytekit an inner conditional shares the outer one's execution state: its skipped cases run all the same, and nodes
after it in the same branch do not run. On a cluster, Flyte evaluates conditionals itself, correctly.
"""

from __future__ import annotations

from flytekit.core.context_manager import BranchEvalMode, FlyteContext

enter_section = FlyteContext.Builder.enter_conditional_section


def enter_with_own_state(builder: FlyteContext.Builder) -> FlyteContext.Builder:
    """Enter a conditional with a separate execution state, in which no case is chosen yet."""
    state = builder.execution_state
    if state and state.is_local_execution():
        builder.execution_state = state.with_params(branch_eval_mode=BranchEvalMode.BRANCH_SKIPPED)
    return enter_section(builder)


def allow_nested_conditions() -> None:
    setattr(FlyteContext.Builder, "enter_conditional_section", enter_with_own_state)  # noqa: B010 - a method, to mypy
