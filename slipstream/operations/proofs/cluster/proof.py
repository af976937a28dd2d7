"""Proof on a cluster: its acts, one after the other, and their results."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from flyteidl.core.catalog_pb2 import CACHE_POPULATED
from flyteidl.core.execution_pb2 import TaskExecution, WorkflowExecution

from slipstream.config import RunConfig
from slipstream.flyte.remote.backend import FlyteBackend, ObservedNode
from slipstream.operations.doctor.kubectl import KubectlError, KubeObject
from slipstream.operations.proofs.cluster.kubernetes import How, Kubernetes, runs
from slipstream.operations.proofs.processes import run_pyflyte
from slipstream.operations.proofs.rehearsal.rehearsal import CONFIG as SECONDS
from slipstream.operations.proofs.rehearsal.rehearsal import TARGET, WORKFLOW, literal
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.card import CARD
from slipstream.shared.errors import UserError
from slipstream.shared.one_line import one_line
from slipstream.shared.profiles.profile import CHOICE

T = TypeVar("T")
TRAIN = "tasks.train.train"
#: Settings of the rehearsal with a training of about a minute, in which a pod can be lost.
CONFIG = replace(SECONDS, training=replace(SECONDS.training, epochs=75, checkpoint_every=200))
#: Number of the table's files, and of rows per file.
FILES, ROWS = 8, 2000
#: Line of pyflyte with the version of what it registers.
VERSION = re.compile(r"Computed version is (\S+)")
#: Output of rank 0 while it trains, and when it has resumed.
STEP, RESUMED = re.compile(r"^train +step (\d+)/", re.MULTILINE), re.compile(r"resumes from step (\d+)")
#: Files of a model that must be the same: its weights, and the losses of all steps.
SAME = re.compile(r".*\.safetensors|history\.json")
LOOK_S = 2.0


class NotHeld(Exception):
    """Error of an act that did not hold; the message says what was seen."""


@dataclass(frozen=True)
class ActResult:
    """Result of an act: what was seen, and the command with which to look closer if it ran anything."""

    act: str
    held: bool
    seen: str
    look: str


@dataclass
class ClusterProof:
    """Proof whose executions are named ``name`` and a number. It touches no others.

    ``minutes`` is the limit of one execution.
    """

    name: str
    flyte: FlyteBackend
    kubernetes: Kubernetes
    image: str
    profile: str
    nodes: int
    say: Callable[[str], None]
    minutes: float = 30.0
    config: RunConfig = CONFIG
    rows: list[ActResult] = field(default_factory=list)
    executions: list[str] = field(default_factory=list)

    def run(self, workdir: Path) -> list[ActResult]:
        """Run all acts and return their results. The others build on the first two: if one fails, the rest is skipped.

        Ends all that it started. Raises ``UserError`` if Flyte or the cluster cannot be reached or refuse.
        """
        try:
            for act, does in self.acts(workdir):
                if not self.act(act, does) and len(self.rows) <= 2:
                    break
        finally:
            self.clean_up()
        return self.rows

    def acts(self, workdir: Path) -> list[tuple[str, Callable[[], str]]]:
        self.table = write_table(workdir / "table", self.name)
        return [
            ("registers, and again without a change", self.registers),
            ("a main job runs to its end", self.runs),
            ("the second takes all that can be cached from the cache", self.is_cached),
            ("the table was prepared as on this machine", lambda: self.prepared_alike(workdir / "prepared")),
            ("a pod of the training is deleted: the same model", lambda: self.survives(["deleted"])),
            ("a pod is evicted: the same model", lambda: self.survives(["evicted"])),
            ("all processes of a pod are killed: the same model", lambda: self.survives(["killed"])),
            ("pods are deleted twice in a row: the same model", lambda: self.survives(["deleted", "deleted"])),
            ("ended in mid-training and recovered: the same model", self.recovers),
        ]

    def act(self, act: str, does: Callable[[], str]) -> bool:
        self.say(f"{act} …")
        before = len(self.executions)
        try:
            seen, held = does(), True
        except (NotHeld, KubectlError) as error:
            seen, held = one_line(str(error)), False
        mine = ",".join(self.executions[before:])
        look = (
            f"kubectl -n {self.kubernetes.namespace} get flyteworkflows,pytorchjobs,pods -l 'execution-id in ({mine})'"
        )
        self.rows.append(ActResult(act, held, seen, look if mine else ""))
        self.say(f"  {'held' if held else 'DID NOT HOLD'}: {seen}")
        return held

    def clean_up(self) -> None:
        """End the executions that still run, with Flyte or else with kubectl."""
        for name in self.executions:
            try:
                if self.flyte.runs(name):
                    self.flyte.end(name, "stopped")
                    self.say(f"  ended {name}")
            except UserError as error:
                with suppress(KubectlError):
                    self.kubernetes.drop(name)
                    self.say(f"  deleted {name} by kubectl, as {error}; Flyte's console may show it as running")

    # The acts

    def registers(self) -> str:
        self.version, again = self.register(), self.register()
        if again != self.version:
            raise NotHeld(f"the same code was version {self.version}, then {again}")
        addresses = [self.flyte.upload(file, self.name) for file in sorted(self.table.iterdir())]
        self.data = addresses[0].rpartition("/")[0] + "/"
        return f"version {self.version}"

    def register(self) -> str:
        """Register the workflows with pyflyte and return their version. Raises ``UserError`` if that fails."""
        words = ["--config", str(self.flyte.config), "register", "workflows", "--image", self.image]
        words += ["--project", self.flyte.project, "--domain", self.flyte.domain]
        said = run_pyflyte(words, "register", {CHOICE: self.profile})
        found = VERSION.search(said)
        if not found:
            raise UserError("pyflyte register: printed no version; expected a line with 'Computed version is'")
        return found[1]

    def runs(self) -> str:
        name = self.launch(0)
        self.first = self.finished(name)
        self.model = same_files(self.flyte.artifact(self.first, "train"))
        if not self.model:
            raise NotHeld(f"{name} handed on no trained model")
        return f"{len(self.first)} tasks; {len(self.model)} files of the model are what the next acts compare"

    def is_cached(self) -> str:
        again = self.finished(self.launch(0))
        kept = {node.task for node in self.first if node.cache == CACHE_POPULATED}
        hits = {node.task for node in again if node.hit}
        if not kept or (missed := kept - hits):
            raise NotHeld(f"ran again: {', '.join(sorted(missed))}" if kept else "nothing was kept the first time")
        return f"{len(hits)} tasks are hits"

    def prepared_alike(self, directory: Path) -> str:
        there = self.flyte.artifact(self.first, "prepare")
        files = prepare(directory, str(self.table), TARGET, self.config.data, {}).files
        here = {name: record.sha256 for name, record in files.items()}
        compared = (here.keys() | there.keys()) - {CARD, "schema.json"}
        if differ := sorted(name for name in compared if here.get(name) != there.get(name)):
            raise NotHeld(f"{len(differ)} of {len(compared)} files differ: {', '.join(differ[:3])}")
        return f"{len(compared)} of {len(compared)} files have the same SHA-256, besides two that name the source"

    def survives(self, losses: Sequence[How]) -> str:
        """Lose a pod in every one of the first attempts at a training that is not cached."""
        name = self.launch(len(self.executions))
        seen: set[str] = set()
        for how in losses:
            pod = self.training_pod(name, seen)
            self.kubernetes.lose(pod, how)
            self.say(f"  {how} {pod['metadata']['name']}")
        return self.same_model(name, seen, lost=len(losses))

    def recovers(self) -> str:
        name, seen = self.launch(len(self.executions)), set[str]()
        self.training_pod(name, seen)
        self.flyte.end(name, "to be recovered")
        self.wait(name, "its end", lambda: not self.flyte.runs(name))
        into = self.next_name()
        self.flyte.recover(name, into)
        return self.same_model(into, seen, lost=0)

    # Executions

    def next_name(self) -> str:
        self.executions.append(f"{self.name}-{len(self.executions)}")
        return self.executions[-1]

    def launch(self, repetition: int) -> str:
        """Start a main job and return its name. Every repetition trains the same model again."""
        config = replace(self.config, training=replace(self.config.training, repetition=repetition))
        name = self.next_name()
        self.say(f"  {name}")
        inputs = {"data": literal(self.data), "target": literal(TARGET), "config": literal(config)}
        self.flyte.start(name, WORKFLOW, self.version, inputs)
        return name

    def wait(self, name: str, what: str, found: Callable[[], T]) -> T:
        """Call ``found`` until its result is true, and return that. Raises ``NotHeld`` if it takes too long."""
        until = time.monotonic() + self.minutes * 60
        while not (it := found()):
            if time.monotonic() > until:
                raise NotHeld(f"{name}: waited {self.minutes:g} minutes for {what}")
            time.sleep(LOOK_S)
        return it

    def finished(self, name: str) -> list[ObservedNode]:
        """Wait until an execution has succeeded, and return its nodes."""
        self.wait(name, "its end", lambda: not self.flyte.runs(name))
        self.check(name)
        return self.flyte.nodes(name)

    def check(self, name: str) -> None:
        """Raise ``NotHeld`` if an execution failed."""
        closure = self.flyte.execution(name)
        if closure.phase in (WorkflowExecution.FAILED, WorkflowExecution.ABORTED, WorkflowExecution.TIMED_OUT):
            raise NotHeld(f"{name} failed: {closure.error.message or closure.abort_metadata.cause}")

    def training_pod(self, name: str, seen: set[str]) -> KubeObject:
        """Wait until all pods of a training run and make steps, and return the last pod, which is not rank 0's.

        ``seen`` are the pods of earlier attempts; this attempt's pods are added.
        """

        def training() -> list[KubeObject]:
            self.check(name)
            pods = [
                pod for pod in self.kubernetes.pods(name, TRAIN) if runs(pod) and pod["metadata"]["uid"] not in seen
            ]
            makes_steps = any(STEP.search(self.kubernetes.log(pod)) for pod in pods)
            return pods if makes_steps and len(pods) == self.nodes else []

        pods = self.wait(name, "steps of the training", training)
        seen.update(pod["metadata"]["uid"] for pod in pods)
        return pods[-1]

    def same_model(self, name: str, seen: set[str], lost: int) -> str:
        """Wait for the model of an execution that resumed after ``lost`` pods or a recovery, and end the execution.

        Raises ``NotHeld`` unless the model is the same and ``lost`` attempts failed.
        """
        resumed: list[int] = []

        def trained() -> ObservedNode | None:
            self.check(name)
            for pod in self.kubernetes.pods(name, TRAIN):
                if pod["metadata"]["uid"] not in seen:
                    resumed.extend(int(step) for step in RESUMED.findall(self.kubernetes.log(pod)))
            return next((node for node in self.flyte.nodes(name) if node.task == TRAIN and node.succeeded), None)

        training = self.wait(name, "the trained model", trained)
        assert training, "what is waited for is there"
        if self.flyte.runs(name):
            self.flyte.end(name, "the training was all it was for")
        failed = [attempt for attempt in training.attempts if attempt.phase == TaskExecution.FAILED]
        model = same_files(self.flyte.artifact([training], "train"))
        if differ := sorted(file for file in self.model if model.get(file) != self.model[file]):
            raise NotHeld(f"another model: {', '.join(differ)}")
        if len(failed) != lost:
            raise NotHeld(f"{len(failed)} attempts failed, expected {lost}")
        if not any(resumed):
            raise NotHeld("the same model, but none was seen to resume: it had ended before, or began afresh")
        why = f"; {reason(failed[-1].error)}" if failed else ""
        return f"resumed from step {max(resumed)}{why}"


#: Beginning of propeller's line about a failed PyTorchJob.
OF_JOB = re.compile(r"^(\w+) - PyTorchJob \S+ is failed because ")


def same_files(files: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in files.items() if SAME.fullmatch(name)}


def reason(message: str) -> str:
    """Return the cause in Flyte's message about a failed attempt; for a failed job without the job's long name."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if lines[1:] and lines[0] == "Job failed:":
        lines = [OF_JOB.sub(r"\1: … ", lines[1])]
    return next(iter(lines), "no reason given")[:120]


def write_table(directory: Path, seed: str) -> Path:
    """Write a table in several CSV files. Every seed gives another table, which no cache has."""
    draw = random.Random(seed)
    directory.mkdir()
    for file in range(FILES):
        lines = [f"number,city,{TARGET}"]
        for _ in range(ROWS):
            number = draw.gauss(5, 2)
            lines.append(f"{number:.6f},{draw.choice(['Oslo', 'Rome', 'Lima'])},{'yes' if number > 5 else 'no'}")
        (directory / f"{file}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return directory
