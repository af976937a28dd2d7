"""Functions shared by all tasks: directories, reuse of results, and outputs of a stage."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from flytekit import FlyteContextManager, HashMethod, current_context
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from slipstream.flyte.artifact_types import Made, artifact_fingerprint, artifact_uri
from slipstream.flyte.memory_notes import noted_memory
from slipstream.flyte.metadata import installed_stage_version, named_out_of_memory, refuse_other_versions
from slipstream.flyte.watching.telemetry import stage_sampled
from slipstream.shared.artifacts.format import Artifact, DamagedArtifact
from slipstream.shared.artifacts.workspaces import STORE, ArtifactStore, content_key
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.machine.description import measuring_machine
from slipstream.shared.machine.nvml import DriverHangs
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.settings import Settings, counted_settings
from slipstream.shared.stages import STAGES, StageRun, StageUsage
from slipstream.shared.storage import (
    STORES,
    StorageUnavailable,
    cannot_write,
    download_all,
    fullest,
    list_objects,
    out_of_space,
)
from slipstream.shared.telemetry.node import process_age

Work = TypeVar("Work", bound=Callable[..., Any])
#: Address by :func:`output_address`: a random name below Flyte's raw output, then the name of the task.
TASK_OUTPUT = re.compile(r"^\w+://.+/[0-9a-f]{32}/(\w[\w.-]*)$")


def section_digest(section: Settings) -> str:
    """Return a digest of the settings for Flyte's cache key, independent of their order.

    The digest of a base is another output of the same task, so its address does not count.
    """
    counted = section.without_addresses() if isinstance(section, ModelConfig) else section
    return hashlib.sha256(json.dumps(counted_settings(counted), sort_keys=True).encode()).hexdigest()


#: Annotation for a configuration section that a task returns: ``Annotated[DataConfig, BY_VALUE]``. Without it the cache
#: would never hit, as Flyte writes sections in random order in every execution (flyte#6517).
BY_VALUE = HashMethod(section_digest)


@contextmanager
def mapped_errors() -> Iterator[None]:
    """Convert errors of the environment to ``FlyteRecoverableException`` or ``UserError``.

    An unavailable store and a hanging driver are recoverable in a pod; local runs have no retries, so they become a
    ``UserError``. A full disk and a child process killed for lack of memory are always a ``UserError``.
    """
    try:
        with named_out_of_memory():
            yield
    except StorageUnavailable as error:
        if runs_locally():
            raise UserError(f"{error}; nothing is lost, start again once it is available") from None
        raise FlyteRecoverableException(str(error)) from error
    except DriverHangs as error:
        if runs_locally():
            raise UserError(str(error)) from None
        raise FlyteRecoverableException(str(error)) from error
    except UserError:
        raise
    except Exception as error:
        if not out_of_space(error):
            raise
        # The error has no path. Assume the directory with the least space among those to which tasks write.
        places = Path(current_context().working_directory), STORE.absolute(), Path(tempfile.gettempdir())
        raise cannot_write(fullest(places), error) from None


def map_errors(work: Work) -> Work:
    """Wrap a task function in :func:`mapped_errors`; refuse other versions than registered, warn of an untested torch.

    All task functions are wrapped; the Elastic task wraps its agent instead.
    """

    @functools.wraps(work)
    def mapped(*arguments: Any, **named: Any) -> Any:
        with importable(work.__module__), mapped_errors():
            refuse_other_versions()
            if "torch" in sys.modules:  # Other tasks' pods load it later, or not at all.
                from slipstream.shared.machine.torch_versions import warn_if_untested

                warn_if_untested()
            try:
                return work(*arguments, **named)
            except UserError as error:
                if gone := deleted_output(error, named):
                    raise gone from None
                raise

    return cast(Work, mapped)


def deleted_output(error: UserError, inputs: object) -> UserError | None:
    """Return the error that explains ``error`` if an input, which another task made, was deleted from the store."""
    for uri in addresses_in(inputs):
        if not (made := TASK_OUTPUT.search(uri)):
            continue
        named = re.search(re.escape(uri) + r"[^\s:;,]*", str(error))
        with suppress(StorageUnavailable, UserError):
            if not list_objects(named[0] if named else uri):
                return UserError(
                    f"{uri}: this cached output of the task {made[1]} was deleted from the store, but Flyte's cache "
                    "still names it; expected raw outputs to live longer than cache entries; start again with "
                    "--overwrite-cache, which makes it again"
                )
    return None


def addresses_in(value: object) -> Iterator[str]:
    """Yield the addresses of all artifacts in a task's inputs."""
    if isinstance(value, FlyteDirectory):
        yield artifact_uri(value).rstrip("/")
    elif isinstance(value, str):
        yield value.rstrip("/")
    elif dataclasses.is_dataclass(value):
        yield from addresses_in(vars(value))
    elif isinstance(value, Mapping):
        yield from addresses_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from addresses_in(each)


@contextmanager
def importable(module: str) -> Iterator[None]:
    """Keep the directory of a module's top package on ``sys.path`` in the block.

    pyflyte removes the project's root after importing a workflow. Workers start later, inherit the path and import the
    tasks again.
    """
    root = str(Path(sys.modules[module.partition(".")[0]].__file__ or "").parents[1])
    added = root not in sys.path
    if added:
        sys.path.append(root)
    try:
        yield
    finally:
        if added:
            sys.path.remove(root)


def local_path(directory: FlyteDirectory) -> Path:
    """Return the path of the artifact on this machine, downloaded if it is in a store.

    This project's client downloads, with its retries. Raises ``StorageUnavailable``.
    """
    uri = artifact_uri(directory)
    if not uri.startswith(STORES):
        return Path(directory.download())
    return download_all(uri, fresh_directory("input"))


def rows_path(prepared: FlyteDirectory) -> Path:
    """Return a path for ``open_prepared``: local data, or a stub that downloads only rows that are read."""
    uri = artifact_uri(prepared)
    if not uri.startswith(STORES):
        return local_path(prepared)
    from slipstream.shared.artifacts.prepared.streamed import make_stub

    return make_stub(uri, fresh_directory("prepared"))


def fresh_directory(name: str) -> Path:
    """Return an unused path in the task's working directory; it is not created."""
    root = Path(current_context().working_directory)
    root.mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root)) / name


def runs_locally() -> bool:
    """Return True in ``pyflyte run`` on one machine, False in a pod. Workers must not call this."""
    state = FlyteContextManager.current_context().execution_state
    return state is not None and state.is_local_execution()


def describe_input(value: object) -> object:
    """Return an input in JSON form for a key: an artifact as its content digest, settings as a dictionary."""
    if isinstance(value, FlyteDirectory):
        return artifact_fingerprint(value)
    if isinstance(value, Settings):
        return counted_settings(value)
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def describe_inputs(inputs: Mapping[str, object]) -> dict[str, object]:
    """Return the inputs of a stage in JSON form for a key.

    The address of a base does not count if ``code`` has its digest.
    """
    known = bool(inputs.get("code"))
    counted = {
        name: value.without_addresses() if known and isinstance(value, ModelConfig) else value
        for name, value in inputs.items()
    }
    return {name: describe_input(value) for name, value in counted.items()}


def result_key(stage: str, inputs: Mapping[str, object]) -> str:
    """Return the key of a stage's result in the local store, including the machine if results are timings."""
    described = describe_inputs(inputs)
    if STAGES[stage].measured:
        described["machine"] = measuring_machine()
    return content_key(stage, installed_stage_version(stage), described)


def run_stage(stage: str, inputs: Mapping[str, object], make: Callable[[Path, str], object]) -> Made:
    """Make the stage's artifact, or reuse it.

    ``make(directory, key)`` writes the artifact into the new ``directory``. If a stage searches for earlier results,
    ``make`` returns True if it found one. Locally the result is stored under a key of inputs and code; in a pod Flyte
    caches it.
    """
    key = result_key(stage, inputs)
    started = time.perf_counter()
    if not runs_locally():
        started -= process_age()  # the pod is paid for from its start on
        directory = Path(current_context().working_directory) / stage
        # The agent of a process group writes its own note, as it knows the checkpoints.
        with (
            nullcontext() if STAGES[stage].distributed else noted_memory(stage),
            stage_sampled(stage, local=False) as seen,
        ):
            make(directory, key)
        return result_of(directory, stage, started, reused=False, usage=seen.usage)
    if STAGES[stage].finds_earlier:
        directory = fresh_directory(stage)
        was_there = make(directory, key) is True
        print(f"{stage:<12} {'reused  ' if was_there else elapsed_text(started)}", flush=True)
        return result_of(directory, stage, started, reused=was_there)
    store = ArtifactStore(STORE)
    if reused := look_up(store, stage, key):
        return result_of(reused.directory, stage, started, reused=True)
    with store.turn(stage, key) as waited:
        if waited and (reused := look_up(store, stage, key)):
            return result_of(reused.directory, stage, started, reused=True)
        with store.workspace(stage) as directory:
            with stage_sampled(stage, local=True) as seen:
                make(directory, key)
            artifact = store.publish(directory, stage, key)
    print(f"{stage:<12} {elapsed_text(started)} {artifact.directory}", flush=True)
    return result_of(artifact.directory, stage, started, reused=False, usage=seen.usage)


def elapsed_text(started: float) -> str:
    return f"{time.perf_counter() - started:6.1f} s "


def look_up(store: ArtifactStore, stage: str, key: str) -> Artifact | None:
    """Return the stored artifact, or None if it is missing or damaged."""
    found = store.find(stage, key)
    if isinstance(found, Artifact):
        print(f"{stage:<12} reused   {found.directory}", flush=True)
        return found
    if isinstance(found, DamagedArtifact):
        logger(stage).warning("the stored artifact is damaged (%s); the stage runs again", found.message)
    return None


def result_of(directory: Path, stage: str, started: float, *, reused: bool, usage: StageUsage | None = None) -> Made:
    run = StageRun(stage, round(time.perf_counter() - started, 3), reused, usage)
    return Made(output_directory(directory), run)


def output_directory(directory: Path) -> FlyteDirectory:
    """Return a directory as an output of the task; in a pod, flytekit uploads it to :func:`output_address`."""
    return FlyteDirectory(str(directory.absolute()), remote_directory=output_address() or None)


def output_address() -> str:
    """Return a new address for an output of this pod's task, whose name it ends in; "" in local runs."""
    task = os.environ.get("FLYTE_INTERNAL_TASK_NAME", "")
    return FlyteContextManager.current_context().file_access.get_random_remote_path(task) if task else ""
