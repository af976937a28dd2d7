"""Errors of CUDA, HIP, NCCL and gloo become one line of error or another attempt."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from slipstream.flyte.failures import as_seen_by_flyte
from slipstream.pipeline.collectives.launch.worker import call_and_report
from slipstream.pipeline.train import request, setup
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.probe import probe_model
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.distributed.user_errors import ErrorMeaning, error_meaning
from slipstream.shared.errors import Interrupted, UserError
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.tables_and_images import MLP
from tests.support import training
from tests.support.proving import first_few
from tests.support.training import refusal, table_of_numbers, trained
from tests.support.wording import same_wording

NCCL = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
    "NCCL_DEBUG=INFO for details), NCCL version 2.29.3\nncclUnhandledCudaError: Call to CUDA function failed.\n"
    "Last error:\nCuda failure "
)
HINT = "\nCUDA kernel errors might be asynchronously reported at some other API call\n"
ERRORS: list[tuple[Exception, ErrorMeaning | None]] = [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has"), ErrorMeaning.MEMORY),
    (torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB. GPU 3 has"), ErrorMeaning.MEMORY),
    (torch.AcceleratorError(f"CUDA error: out of memory{HINT}"), ErrorMeaning.MEMORY),
    (torch.AcceleratorError("HIP error: out of memory"), ErrorMeaning.MEMORY),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ErrorMeaning.MEMORY),
    (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate`"), ErrorMeaning.MEMORY),
    (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), ErrorMeaning.MEMORY),
    (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), ErrorMeaning.MEMORY),
    (MemoryError(), ErrorMeaning.MEMORY),
    (dist.DistBackendError(f"{NCCL}2 'out of memory'"), ErrorMeaning.MEMORY),
    (dist.DistBackendError(f"{NCCL}214 'uncorrectable ECC error encountered'"), ErrorMeaning.BROKEN),
    (torch.AcceleratorError(f"CUDA error: uncorrectable ECC error encountered{HINT}"), ErrorMeaning.BROKEN),
    (
        torch.AcceleratorError("CUDA error: uncorrectable NVLink error detected during the execution"),
        ErrorMeaning.BROKEN,
    ),
    (torch.AcceleratorError("CUDA error: CUDA-capable device(s) is/are busy or unavailable"), ErrorMeaning.BROKEN),
    (dist.DistBackendError("NCCL communicator was aborted on rank 0."), ErrorMeaning.PEER),
    (dist.DistNetworkError("The client socket has timed out"), ErrorMeaning.PEER),
    (RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer"), ErrorMeaning.PEER),
    (torch.AcceleratorError(f"CUDA error: device-side assert triggered{HINT}"), None),
    (torch.AcceleratorError(f"CUDA error: an illegal memory access was encountered{HINT}"), None),
    (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
    (ValueError("out of memory of the last epoch"), None),
]
NAMES = [str(error).partition("\n")[0][-40:] or "MemoryError" for error, _ in ERRORS]


@pytest.mark.parametrize(("error", "meaning"), ERRORS, ids=NAMES)
def test_a_message_has_one_meaning_for_training_and_benchmark(error: Exception, meaning: ErrorMeaning | None) -> None:
    assert error_meaning(error) is meaning
    seen = as_seen_by_flyte(error)
    assert isinstance(seen, UserError) == (meaning is ErrorMeaning.MEMORY)
    assert isinstance(seen, Interrupted) == (meaning in (ErrorMeaning.BROKEN, ErrorMeaning.PEER))

    def fail() -> None:
        raise error

    kinds = {ErrorMeaning.MEMORY: "refused", ErrorMeaning.BROKEN: "died", ErrorMeaning.PEER: "lost", None: "failed"}
    assert call_and_report(fail)[0] == kinds[meaning]


def test_a_device_that_breaks_under_the_model_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered")

    def forward(*_: object) -> None:
        raise broken

    signature = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b"))
    model = Predictor(signature, MLP(signature))
    monkeypatch.setattr(model, "forward", forward)
    with pytest.raises(torch.AcceleratorError):
        probe_model(model, torch.device("cpu"))


def fail_for_memory(*_: object) -> None:
    raise torch.AcceleratorError("CUDA error: out of memory")


def rank_without_room_for_the_model(rank: int, *arguments: Any) -> None:
    if rank == 1:
        vars(request)["build_model"] = lambda *_, **__: Mock(parameters=list, to=fail_for_memory)
    training.rank_body(rank, *arguments)


def rank_without_room_for_its_state(rank: int, *arguments: Any) -> None:
    if rank == 0:  # which alone copies the best weights
        vars(setup)["copy_weights"] = fail_for_memory
    training.rank_body(rank, *arguments)


@pytest.mark.parametrize("body", first_few([rank_without_room_for_the_model, rank_without_room_for_its_state]))
def test_ranks_agree_that_one_has_too_little_memory(body: Callable[..., None], tmp_path: Path) -> None:
    prepared = table_of_numbers(tmp_path / "prepared", 64)
    trained(prepared, tmp_path / "x", 2, TrainingConfig(epochs=1, batch_size=64), body=body)
    said = {refusal(tmp_path / "x", rank) for rank in range(2)}
    assert len(said) == 1
    same_wording(said.pop())
