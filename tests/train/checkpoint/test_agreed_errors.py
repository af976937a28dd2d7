"""User errors that ranks exchange during a save or restore end all ranks together."""

import errno
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from slipstream.pipeline.train.checkpoint.publish import run_and_gather
from slipstream.shared.artifacts.format import DamagedArtifact
from slipstream.shared.distributed.process_group import Peers
from slipstream.shared.distributed.user_errors import AgreedUserError
from slipstream.shared.errors import Agreed, UserError
from tests.support.small_run import Run
from tests.support.wording import refuses

ALONE = Peers(0, 1, None)


def fail(error: Exception) -> None:
    raise error


def test_all_ranks_know_of_a_mistake_that_they_gathered() -> None:
    with refuses(AgreedUserError):
        run_and_gather(ALONE, lambda: fail(UserError("home: may not be written")))
    # Errors that are caught by their class, and bugs, keep their class.
    for error in (DamagedArtifact("weights: a digest is wrong"), ZeroDivisionError("a bug")):
        with pytest.raises((DamagedArtifact, RuntimeError)) as failed:
            run_and_gather(ALONE, partial(fail, error))
        assert not isinstance(failed.value, Agreed)


@pytest.mark.parametrize("file", ["tensors-00000.bin", "index.json", "rank-00000.json", "state.json"])
def test_all_ranks_know_of_a_disk_that_was_full_when_one_wrote_a_file(file: str, tmp_path: Path) -> None:
    opened = Path.open

    def full(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if (path.name, mode) == (file, "xb"):
            raise OSError(errno.ENOSPC, "No space left on device")
        return opened(path, mode, *arguments, **named)

    run = Run(tmp_path)
    run.steps(1)
    run.checkpoints.save(1, {})
    run.checkpoints.finish()
    with mock.patch.object(Path, "open", full):
        run.checkpoints.save(2, {})
        with pytest.raises(AgreedUserError, match="step-000000000002"):
            run.checkpoints.finish()
