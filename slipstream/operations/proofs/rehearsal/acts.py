"""Rehearsal in three acts with checked results: undisturbed, the same again, and with kills."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flyteidl.core.literals_pb2 import Literal

from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.operations.proofs.rehearsal.kills import Kills, drawn
from slipstream.operations.proofs.rehearsal.propeller import Execution
from slipstream.operations.proofs.rehearsal.record import attempt_steps
from slipstream.operations.proofs.rehearsal.rehearsal import WORKFLOW, Rehearsal, model_of
from slipstream.shared.artifacts.results.ledger import END_FILE, PREFIX, AttemptRecord, decode_attempt

Say = Callable[[str], None]
Inputs = Mapping[str, Literal]
#: Tasks whose pods handle signals: they decide themselves how an attempt ends after one.
DISTRIBUTED = {"train", "benchmark_collectives", "measure_collectives", "compare_collectives", "tune_collectives"}


def stored_records(bucket: S3Bucket) -> list[AttemptRecord]:
    """Return the records of all trainings' attempts in the bucket."""
    keys = (key for key in bucket.keys("") if f"/{PREFIX}" in key and not key.endswith(END_FILE))
    return [record for key in keys if (record := decode_attempt(bucket.read(key)))]


@dataclass
class Acts:
    """Executions so far, by name, and the checks that passed."""

    rehearsal: Rehearsal
    inputs: Inputs
    say: Say
    workflow: str = WORKFLOW
    executions: dict[str, Execution] = field(default_factory=dict)
    found: list[str] = field(default_factory=list)

    def execute(self, name: str, seed: int, kills: Kills | None = None) -> Execution:
        self.say(f"\n{name}")
        execution = self.executions[name] = self.rehearsal.execution(name, say=self.say, seed=seed, kills=kills)
        try:
            execution.run(self.workflow, self.inputs)
        finally:
            trained = [attempt for attempt in execution.record.attempts if attempt.task == "train"]
            execution.record.steps = attempt_steps(trained, stored_records(self.rehearsal.bucket))
        self.say(f"{name}: {execution.record.summary()}")
        return execution

    def check(self, true: bool, what: str) -> None:
        """Record a check that passed. Raises ``AssertionError`` unless it is true."""
        assert true, f"not so: {what}"
        self.found.append(what)
        self.say(f"  ✓ {what}")

    def undisturbed(self) -> Execution:
        return self.execute("undisturbed", seed=1)

    def again(self) -> Execution:
        """Execute the same inputs with all maps in another order: all cached nodes must be hits."""
        again = self.execute("again", seed=2)
        missed = sorted(f"{task} {node}" for node, task in again.record.cached.items() if node not in again.record.hits)
        number = len(again.record.cached)
        self.check(not missed, f"all {number} cached nodes are hits the second time{but_for(missed)}")
        return again

    def disturbed(self, seed: int, number: int) -> Execution:
        """Execute with an empty cache and lost pods: the model must be that of the undisturbed execution."""
        before = self.executions["undisturbed"]
        pods = {attempt.node: len(attempt.pods) for attempt in before.record.attempts}
        writes = {node: count for (node, attempt), count in before.kills.writes.items() if attempt == 0}
        kills = Kills(drawn(seed, number, writes, pods))
        for kill in kills.planned:
            self.say(f"  planned: {kill}")
        self.rehearsal.forget()
        execution = self.execute("disturbed", seed=3, kills=kills)
        self.check(not kills.missed, f"all {len(kills.planned)} kills fired{but_for(map(str, kills.missed))}")
        failed = [attempt for attempt in execution.record.attempts if attempt.outcome and attempt.outcome.payer]
        unprovoked = [str(a.outcome) for a in failed if not any(pod.struck for pod in a.pods)]
        self.check(not unprovoked, f"each of the {len(failed)} failed attempts was struck{but_for(unprovoked)}")
        others = {a.outcome.payer for a in failed if a.outcome and a.task not in DISTRIBUTED}
        spent = execution.record.spent
        self.check(
            others <= {"system"},
            f"the system's budget paid for {spent['system']} attempts, all those at plain pods among them, and the "
            f"user's retries for {spent['user']}",
        )
        files = same_files(*(model_of(each, each.workdir / "model") for each in (before, execution)))
        self.check(len(files) >= 3, f"the model is the undisturbed one's, bit for bit: {', '.join(files)}")
        return execution


def but_for(exceptions: Iterable[str]) -> str:
    listed = "; ".join(exceptions)
    return f", but for {listed}" if listed else ""


def same_files(left: Path, right: Path) -> list[str]:
    """Return the names of two trained models' weights and history. Raises ``AssertionError`` if one differs."""
    names = sorted(path.name for path in left.iterdir() if path.suffix == ".safetensors" or path.name == "history.json")
    for name in names:
        assert (left / name).read_bytes() == (right / name).read_bytes(), f"{name} differs"
    return names
