"""Collective operations return the right result for every type; a single wrong element is found."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.pipeline.collectives.config import OPERATIONS
from slipstream.pipeline.collectives.launch.timing import check_cases
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.pipeline.collectives.operations.cases import (
    ALWAYS_IN_PLACE,
    BUILDERS,
    IN_AND_OUT_OF_PLACE,
    REDUCING,
    OperationKind,
    prepare_case,
)
from slipstream.pipeline.collectives.operations.feasibility import unsupported_reason
from slipstream.pipeline.collectives.operations.reference_data import DTYPES
from slipstream.shared.distributed.user_errors import AgreedUserError
from tests.support.proving import diagonal
from tests.support.worker_groups import in_group

#: It compares times.
pytestmark = pytest.mark.alone

CPU = torch.device("cpu")
MOVING = [operation for operation in OPERATIONS if operation != "barrier"]


def kinds(dtypes: list[str]) -> list[OperationKind]:
    found = []
    for operation, dtype in product(MOVING, dtypes):
        for reduction in ("sum", "avg", "max") if operation in REDUCING else ("",):
            places = (False, True) if operation in IN_AND_OUT_OF_PLACE else (operation in ALWAYS_IN_PLACE,)
            found += [OperationKind(operation, dtype, reduction, place) for place in places]
    return found


def check_all(worker: WorkerContext) -> list[str]:
    """What is wrong, in this group, of all that the backend has."""
    said = []
    for kind in kinds(list(DTYPES)):
        if unsupported_reason("gloo", kind):
            continue
        for size in (64, 3000, 40_000):
            try:
                check_cases([prepare_case(kind, size, CPU)])
            except AgreedUserError as wrong:
                said.append(wrong.message)
    return said


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.prove)])
def test_all_of_them_are_right_on_gloo(world: int) -> None:
    assert in_group(world, check_all) == []


def sizes_of(worker: WorkerContext) -> dict[str, int]:
    return {kind.operation: prepare_case(kind, 48_000, CPU).bytes for kind in kinds(["float32"])}


def test_sizes_follow_nccl_tests() -> None:
    found = in_group(3, sizes_of)
    # 48000 bytes are 12000 floats, 4000 for each of three; all_to_allv sends 1, 2 and 3 units of 2000 each.
    assert found == dict.fromkeys(MOVING, 48_000)


def attempt(worker: WorkerContext, kind: OperationKind) -> str:
    """What a fresh group says of one run of ``kind``, and then of an all_reduce after it."""
    try:
        check_cases([prepare_case(kind, 4000, CPU)])
    except AgreedUserError:
        return "wrong"
    except Exception as error:
        return type(error).__name__
    check_cases([prepare_case(OperationKind("all_reduce", reduction="sum", in_place=True), 4000, CPU)])
    return "right"


@pytest.mark.parametrize(("dtype", "operation"), diagonal(["int32", "int64"], REDUCING))
def test_what_the_table_says_gloo_lacks_fails_in_a_fresh_group(operation: str, dtype: str) -> None:
    kind = OperationKind(operation, dtype, "avg", operation in ALWAYS_IN_PLACE)
    assert unsupported_reason("gloo", kind)
    try:
        found = in_group(2, attempt, kind)
    except Exception as error:
        found = type(error).__name__
    assert found != "right", "this torch can do it: take it out of the table"


def faults(worker: WorkerContext) -> dict[str, str]:
    """Return the error of every operation and type if one element of one rank's output is changed in transit."""
    said = {}
    for kind in [k for k in kinds(list(DTYPES)) if k.reduction in ("", "sum") and not unsupported_reason("gloo", k)]:
        case = prepare_case(kind, 4000, CPU)
        victim = 0 if kind.operation in ("reduce", "gather") else 1
        finish = case.start

        def start(case: Any = case, finish: Any = finish, victim: int = victim) -> list[Any]:
            for each in finish():
                each.wait()
            if dist.get_rank() == victim:
                case.target[case.target.numel() - 3] += 1
            return []

        broken = type(case)(**{**vars(case), "start": start})
        try:
            check_cases([broken])
            said[str(kind), kind.in_place] = "nothing"
        except AgreedUserError as wrong:
            said[str(kind), kind.in_place] = wrong.message
    return {f"{name}{' in place' * place}": message for (name, place), message in said.items()}


def test_a_fault_in_each_operation_and_type_is_found_and_named() -> None:
    said = in_group(2, faults)
    assert len(said) == len(DTYPES) * (len(MOVING) + 2)
    for kind, message in said.items():
        assert " is wrong on rank " in message and " element " in message, (kind, message)
        assert message.startswith(kind.removesuffix(" in place")), (kind, message)
    one = said["all_reduce by sum in float32 in place"]
    assert one.startswith("all_reduce by sum in float32 of 4000 bytes is wrong on rank 1: element 997 is ")


def swapped(worker: WorkerContext) -> str:
    """The shares of two ranks change places on the way."""
    case = prepare_case(OperationKind("all_gather"), 4000, CPU)

    def start() -> list[Any]:
        for each in case.start():
            assert each is not None
            each.wait()
        case.target.copy_(case.target.roll(500))
        return []

    try:
        check_cases([type(case)(**{**vars(case), "start": start})])
    except AgreedUserError as wrong:
        return wrong.message
    return "nothing"


def test_data_that_went_to_the_wrong_place_is_found() -> None:
    assert "all_gather in float32 of 4000 bytes is wrong on rank 0: element 0 is" in in_group(2, swapped)


def test_every_operation_of_the_configuration_exists() -> None:
    assert tuple(BUILDERS) == OPERATIONS


def memory_of_a_check(worker: WorkerContext, size: int) -> int:
    """Bytes by which filling and checking the buffer of an all_reduce raises the memory of a group's only process."""
    case = prepare_case(OperationKind("all_reduce", reduction="sum", in_place=True), size, CPU)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = peak_memory()
    case.fill()
    assert case.first_wrong() is None
    return peak_memory() - before


def peak_memory() -> int:
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1]) << 10


def test_check_data_is_built_in_pieces() -> None:
    # It took 5 to 9 times the size of the buffer once.
    assert in_group(1, memory_of_a_check, 128 << 20) < 64 << 20
