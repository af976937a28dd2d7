"""Readers of records return the record, None or one line of error, whatever the file holds.

Every function that reads a record from bytes is in :data:`READERS`, or the last tests of this file fail.
"""

import ast
import contextlib
import hashlib
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from slipstream.flyte.failures import FailureReport, WorkerExit, read_reports
from slipstream.flyte.memory_notes import MemoryNote, read_note
from slipstream.operations.manifests.triton import PlannedService, read_plan
from slipstream.operations.plan.capacity import from_file
from slipstream.operations.plan.measured import figures_of_run
from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.export.package import files as package_files
from slipstream.pipeline.export.package.opened import OpenedPackage
from slipstream.pipeline.promote.store import PromotionPointer, Registry
from slipstream.pipeline.report.runs import main as list_runs
from slipstream.pipeline.score.publish import list_publications
from slipstream.pipeline.sweep.config import RangeConfig
from slipstream.pipeline.sweep.records import (
    KINDS,
    CurvePoint,
    ExecutionStarted,
    RungReported,
    SweepIdentity,
    TrialEnded,
    TrialProposed,
)
from slipstream.pipeline.sweep.records import decode_sweep_record as decode_sealed
from slipstream.pipeline.sweep.space import SearchedParameter
from slipstream.pipeline.sweep.store import SweepStore, parse_record_key
from slipstream.pipeline.train import so_far
from slipstream.pipeline.train.applied_tuning import AppliedTuning, checked_record
from slipstream.pipeline.train.checkpoint.home import (
    AttemptClaim,
    CheckpointDirectory,
    CheckpointName,
    FinishedTraining,
    InheritedCheckpoints,
    newest_attempt,
)
from slipstream.pipeline.train.checkpoint.lease import Heartbeat, LeaseObserver, last_heartbeat
from slipstream.pipeline.train.checkpoint.manager import read_states
from slipstream.pipeline.train.checkpoint.publish import RankState
from slipstream.pipeline.train.checkpoint.restore import newest_identity
from slipstream.pipeline.train.checkpoint.shards import check_index, read_index
from slipstream.pipeline.train.memory.decision import DecisionConditions, MicroBatchDecision, read_decision
from slipstream.pipeline.train.telemetry.pods import read_device_series
from slipstream.shared.artifacts.format import (
    MANIFEST,
    Artifact,
    ArtifactWriter,
    DamagedArtifact,
    FileRecord,
    canonical_json,
    hash_file,
)
from slipstream.shared.artifacts.prepared.data import segment_number
from slipstream.shared.artifacts.records import LARGEST_RECORD, decode_record, to_json, to_tree
from slipstream.shared.artifacts.results.devices import AttemptLosses, DeviceSeries, PodSeries
from slipstream.shared.artifacts.results.ledger import (
    AttemptEnd,
    AttemptRecord,
    observed_in,
    read_attempts,
    summarise_goodput,
)
from slipstream.shared.artifacts.results.scoring import Publication
from slipstream.shared.artifacts.results.training import LiveProgress, LossPoint, ValidationPoint
from slipstream.shared.artifacts.strict_json import DEEPEST, parse_json
from slipstream.shared.artifacts.typed_values import decode_value
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.storage import storage_for
from slipstream.shared.storage.names import MOST_DIGITS, number_as_name, number_in_name
from slipstream.shared.telemetry import ring
from slipstream.shared.telemetry.metrics import metrics_exposition
from slipstream.shared.telemetry.node import NodeFacts, read_facts
from slipstream.shared.telemetry.records import Sample
from slipstream.shared.telemetry.series import condense_samples
from slipstream.shared.telemetry.totals import NodeTotals, read_node, read_totals
from tests.support.damaged_records import JSON, damages
from tests.support.measured_trainings import FIGURES
from tests.support.proving import first_few
from tests.support.sampler_process import LABELS, device, sample, totals
from tests.support.wording import refuses

HOLDER = Holder("f1a2", 1, "prefix")
PARAMETERS = (SearchedParameter("training.epochs", RangeConfig(low=1, high=9), whole=True),)
CHECKPOINT = CheckpointName(1, 20)


@dataclass(frozen=True)
class Reader:
    """A reader of a record: the bytes of a good one, the reader, and what it returns for damage (None, another value,
    or an error that is one line)."""

    good: bytes
    read: Callable[[Path, bytes], object]
    damaged: Any = None
    #: Whether it takes any JSON.
    untyped: bool = False


def stored(directory: Path, key: str, content: bytes) -> CheckpointDirectory:
    home = CheckpointDirectory(storage_for(str(directory)))
    home.storage.put(key, content)
    return home


def holder(directory: Path, content: bytes) -> object:
    return stored(directory, "claims/0001", content).holder_of(1)


def inherited(directory: Path, content: bytes) -> object:
    home = stored(directory, "inherited/0002.json", content)
    for file in (MANIFEST, "state.json"):
        home.storage.put(f"{CHECKPOINT}/{file}", b"{}")
    return home.checkpoints()


def finished(directory: Path, content: bytes) -> object:
    return stored(directory, "finished.json", content).finished()


def lease(directory: Path, content: bytes) -> object:
    home = stored(directory, "leases/0001.json", content)
    home.storage.put("claims/0001", to_json(AttemptClaim(1, "random", HOLDER)))
    LeaseObserver(home).look()
    return last_heartbeat(home, 1)


def manifest_of(identity: object) -> bytes:
    record = {"size": 1, "sha256": "0" * 64, "block_bytes": 4, "blocks": ["0" * 32]}
    made_by = {"step": 20, "world": 1, "identity": identity, "run": HOLDER.execution}
    return canonical_json({"format": 1, "kind": "checkpoint", "made_by": made_by, "files": {"state.json": record}})


def identity(directory: Path, content: bytes) -> object:
    home = stored(directory, f"{CHECKPOINT}/{MANIFEST}", content)
    home.storage.put(f"{CHECKPOINT}/state.json", b"{}")
    found = newest_identity(str(directory), HOLDER, "auto", "")
    network = None if found is None else found.get("network")
    with suppress(UserError):
        checked_record(network)
    return found


def applied(directory: Path, content: bytes) -> object:
    with suppress(ValueError):
        return checked_record(parse_json(content)) or UserError  # null says that nothing was applied
    return UserError


def index(directory: Path, content: bytes) -> object:
    (directory / "index.json").write_bytes(content)
    found = read_index(directory)
    check_index(found, {"tensors-00000.bin": FileRecord(8, "", 4, ["", ""])}, "checkpoint")
    return found


INDEX = {
    "model/weight": {
        "dtype": "float32",
        "size": [2],
        "chunks": [{"offsets": [0], "sizes": [2], "piece": ["tensors-00000.bin", 0, 8]}],
    }
}


def attempt(directory: Path, content: bytes) -> object:
    storage = stored(directory, "ledger/0001.json", content).storage
    if "ledger/0002.json" not in storage.list("ledger/"):
        storage.put("ledger/0002.json", to_json(AttemptRecord(2, 1, 5, 9, wall=10.0)))
        storage.put("devices/0001-0000.json", to_json(SERIES))
    records = read_attempts(storage)
    to_json(summarise_goodput(records))
    observed_in(records)
    read_device_series(storage, records)
    return next((record for record in records if record.attempt != 2), None)


def attempt_end(directory: Path, content: bytes) -> object:
    storage = stored(directory, "ledger/0001.end.json", content).storage
    storage.put("ledger/0001.json", to_json(AttemptRecord(1, 1)))
    return read_attempts(storage)[0].ended


def devices(directory: Path, content: bytes) -> object:
    return read_device_series(stored(directory, "devices/0001-0000.json", content).storage, [AttemptRecord(1, 1)])


def node_totals(directory: Path, content: bytes) -> object:
    (directory / "node.json").write_bytes(content)
    found = read_node(directory)
    metrics_exposition(None, found, [], LABELS)
    return found


def rank_totals(directory: Path, content: bytes) -> object:
    (directory / "ranks").mkdir(exist_ok=True)
    (directory / "ranks/0.json").write_bytes(content)
    found = read_totals(directory)
    metrics_exposition(None, NodeTotals(), found, LABELS)
    return next(iter(found), None)


def ring_names(directory: Path, content: bytes) -> object:
    if len(content) < 1 << 16:  # of a longer one the head cannot say how long it is
        (directory / "seconds-0.ring").write_bytes(
            ring.frame_record(ring.NAMES, content) + ring.sample_frame(sample(1.0, device()))
        )
    (found,) = ring.read_samples(directory)
    ring.latest_samples(directory, 3)
    condense_samples([found, found], 1, "node", {})
    return found.devices[0].uuid if found.devices else None


def facts(directory: Path, content: bytes) -> object:
    (directory / "facts.json").write_bytes(content)
    return read_facts(directory)


STORED_KINDS: dict[type, str] = {record: kind for kind, record in KINDS.items()}


def sealed(kind: type, number: str = "0000/0001") -> Callable[[Path, bytes], object]:
    """A record with the digest of its damaged content, as an attacker writes it."""

    def read(directory: Path, content: bytes) -> object:
        try:
            body = {"kind": STORED_KINDS[kind], "record": json.loads(content), "nonce": "0"}
        except (ValueError, RecursionError):
            seal = content
        else:
            text = json.dumps(body, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
            digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
            seal = json.dumps({**body, "sha256": digest}).encode()
        storage = storage_for(str(directory))
        storage.put("records/0000/0001.json", sealed_good(TrialProposed({})))
        storage.put(f"records/{number}.json", seal)
        store = SweepStore(str(directory), PARAMETERS)
        trials = store.trials()
        if kind is SweepIdentity:
            return store.identity()
        if kind is ExecutionStarted:
            started = store.started("f1a2", 5.0)
            return None if started == 5.0 else started
        if kind is TrialProposed:
            return next((trial.values for trial in trials if trial.number == 1), None)
        return trials[0].reports or trials[0].ended

    return read


def sealed_good(record: object) -> bytes:
    body = {"kind": STORED_KINDS[type(record)], "record": to_tree(record)}
    return canonical_json({**body, "sha256": hashlib.sha256(canonical_json(body)).hexdigest()})


def note(directory: Path, content: bytes) -> object:
    storage_for(str(directory)).put("0.json", content)
    found = read_note(f"{directory}/0.json")
    if found:
        str(found)
    return found


def report(directory: Path, content: bytes) -> object:
    (directory / "group.worker-0.json").write_bytes(content)
    return next(iter(read_reports(str(directory / "group"))), None)


def progress(directory: Path, content: bytes) -> object:
    (directory / "so-far.json").write_bytes(content)
    return so_far.read_progress(directory / "so-far.json", str(directory / "home"), 8, running=True)


def pointer(directory: Path, content: bytes) -> object:
    storage_for(str(directory)).put("promoted/00000001.json", content)
    return Registry(str(directory)).history()


def publication(directory: Path, content: bytes) -> object:
    storage_for(str(directory)).put(f"published/{'ab' * 8}.json", content)
    return list_publications(str(directory))


def package_manifest(directory: Path, content: bytes) -> object:
    (directory / MANIFEST).write_bytes(content)
    (directory / package_files.DIGEST).write_text(package_files.digest_line(content))
    return package_files.check_files(directory)


def package_signature(directory: Path, content: bytes) -> object:
    (directory / package_files.DEPLOYED).write_bytes(content)
    record = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = canonical_json({"kind": "export", "format": 1, "files": {package_files.DEPLOYED: record}})
    (directory / MANIFEST).write_bytes(manifest)
    (directory / package_files.DIGEST).write_text(package_files.digest_line(manifest))
    return check_package(directory)


def package_statistics(directory: Path, content: bytes) -> object:
    (directory / "statistics.json").write_bytes(content)
    return OpenedPackage(directory).statistics


def manifest(directory: Path, content: bytes) -> object:
    (directory / MANIFEST).write_bytes(content)
    (directory / "state.json").write_bytes(b"1")
    return Artifact.open(directory, "checkpoint")


def in_artifact(directory: Path, content: bytes) -> object:
    with tempfile.TemporaryDirectory(dir=directory) as fresh:
        writer = ArtifactWriter(Path(fresh))
        writer.write_bytes("file.json", content)
        return writer.finish("test", {}).read_json("file.json")


LISTED = canonical_json(
    {
        "evaluation": {"metric": {"name": "accuracy", "value": 0.5}},
        "stages": [{"name": "train", "seconds": 3.5, "reused": False}],
        "costs": [{"paid": 2.5}],
        "promotion": {"promoted": True},
        "run": {"changed": {"training": {"epochs": 3}}},
    }
)


def listed_runs(directory: Path, content: bytes) -> object:
    place = directory / "runs/one"
    place.mkdir(parents=True, exist_ok=True)
    (place / "summary.json").write_bytes(content)
    with contextlib.redirect_stdout(io.StringIO()) as told:
        list_runs.main([str(directory / "runs")], standalone_mode=False)
    table, _, notes = told.getvalue().partition("\n\n")
    if notes:  # the run has a line with dashes, and the reason stands below the table
        raise UserError(notes.strip())
    return table


def summary(directory: Path, content: bytes) -> object:
    (directory / "summary.json").write_bytes(content)
    return figures_of_run(directory / "summary.json")


def serving_plan(directory: Path, content: bytes) -> object:
    (directory / "plan.json").write_bytes(content)
    return read_plan(directory / "plan.json")


def recorded_capacity(directory: Path, content: bytes) -> object:
    (directory / "zone.json").write_bytes(content)
    return from_file(directory / "zone.json")


def state(name: str) -> Callable[[Path, bytes], object]:
    def read(directory: Path, content: bytes) -> object:
        files = {"state.json": b"{}", "rank-00000.json": to_json(RankState({}, None)), name: content}
        for file, data in files.items():
            (directory / file).write_bytes(data)
        records = {file: hash_file(directory / file) for file in files}
        return read_states(Artifact(directory, "checkpoint", {"world": 1}, records, ""), "checkpoint")

    return read


POINT = ValidationPoint(1, 1.0, 0.5)
SERIES = PodSeries(1, "node", [1.7e9], [DeviceSeries("A100", "gpu", [0.5], [0.5], [0.5])], 1.0, 5.0, 0.5)
OBSERVED = AttemptLosses(10.0, 9, {"data": 1.0}, {"data": 1.0}, {"data": "the store"}, 0.1)
ATTEMPT = AttemptRecord(
    1, 1, 0, 9, 6, 2, wall=10.0, began_at=1.7e9, events={"checkpoint": [3.0]}, observed=to_tree(OBSERVED), spot=True
)
MADE_FOR = DecisionConditions(1, "data 1", "none", "fp32", 8, 1 << 30, "data", "model")
END = TrialEnded("complete", 0.125, [CurvePoint(1000, 0.5, 0.5)], 1.5, "ab" * 32)
IDENTITY = SweepIdentity("data", {"name": "mlp"}, {"epochs": 3}, {"training.epochs": {"low": 1}}, 0)
ENDED = canonical_json({"kind": "export", "format": 1, "files": {}})
WEIGHTS_ALONE = canonical_json({"model": "", "no_onnx": "not asked for", "raw": None})
#: By the module that reads, and what it reads.
READERS: dict[str, Reader] = {
    "slipstream/pipeline/train/checkpoint/home.py claim": Reader(
        to_json(AttemptClaim(1, "random", HOLDER)), holder, Holder()
    ),
    "slipstream/pipeline/train/checkpoint/home.py inherited": Reader(
        to_json(InheritedCheckpoints(2, [str(CHECKPOINT)])), inherited, []
    ),
    "slipstream/pipeline/train/checkpoint/home.py finished": Reader(
        to_json(FinishedTraining(HOLDER, "s3://bucket/model")),
        finished,
    ),
    "slipstream/pipeline/train/checkpoint/home.py lease": Reader(to_json(Heartbeat(3, 20, str(CHECKPOINT))), lease),
    "slipstream/pipeline/train/checkpoint/home.py micro-batches": Reader(
        to_json(MicroBatchDecision(2, MADE_FOR)),
        lambda path, data: read_decision(stored(path, "accumulation.json", data)),
    ),
    "slipstream/pipeline/train/checkpoint/restore.py identity": Reader(
        manifest_of({"network": {"gradients": {}}}), identity
    ),
    "slipstream/pipeline/train/applied_tuning.py tuning": Reader(
        to_json(AppliedTuning({}, {}, "ab")), applied, UserError
    ),
    "slipstream/pipeline/train/checkpoint/shards.py index": Reader(canonical_json(INDEX), index, DamagedArtifact),
    "slipstream/pipeline/train/checkpoint/manager.py rank": Reader(
        to_json(RankState({"a": 1}, [])), state("rank-00000.json"), DamagedArtifact
    ),
    "slipstream/pipeline/train/checkpoint/manager.py state": Reader(
        b'{"progress": {"a": 1}}', state("state.json"), DamagedArtifact
    ),
    "slipstream/shared/artifacts/format.py manifest": Reader(manifest_of({}), manifest, DamagedArtifact),
    "slipstream/shared/artifacts/format.py file": Reader(
        b'{"columns": [1.5]}', in_artifact, DamagedArtifact, untyped=True
    ),
    "slipstream/shared/artifacts/results/ledger.py attempt": Reader(canonical_json(asdict(ATTEMPT)), attempt),
    "slipstream/shared/artifacts/results/ledger.py end": Reader(
        to_json(AttemptEnd("SIGKILL")), attempt_end, ATTEMPT.ended
    ),
    "slipstream/pipeline/train/telemetry/pods.py devices": Reader(to_json(SERIES), devices),
    "slipstream/shared/telemetry/totals.py node": Reader(
        to_json(NodeTotals(1.0, 2.0, {"a": 1.0}, {"a": {"b": 1.0}}, {"spot": 0.1})), node_totals, NodeTotals()
    ),
    "slipstream/shared/telemetry/totals.py rank": Reader(to_json(totals(0)), rank_totals),
    "slipstream/shared/telemetry/ring.py names": Reader(b'[["GPU-0", 0, "A100"]]', ring_names),
    "slipstream/shared/telemetry/node.py facts": Reader(
        to_json(NodeFacts(1.0, "node", "aws", "p5", spot=True, spot_is_certain=True)), facts
    ),
    "slipstream/pipeline/sweep/records.py proposed": Reader(
        to_json(TrialProposed({"training.epochs": 3})), sealed(TrialProposed, "0001/0001")
    ),
    "slipstream/pipeline/sweep/records.py reported": Reader(
        to_json(RungReported(2222, 0.25, stops=True)), sealed(RungReported, "0000/0002")
    ),
    "slipstream/pipeline/sweep/records.py ended": Reader(to_json(END), sealed(TrialEnded, "0000/0002")),
    "slipstream/pipeline/sweep/records.py identity": Reader(to_json(IDENTITY), sealed(SweepIdentity, "sweep/0001")),
    "slipstream/pipeline/sweep/records.py started": Reader(
        to_json(ExecutionStarted("f1a2", 3.0)), sealed(ExecutionStarted, "sweep/0001")
    ),
    "slipstream/flyte/memory_notes.py note": Reader(to_json(MemoryNote(1, 3 << 30, 4.0 * (1 << 30), "20", 2)), note),
    "slipstream/flyte/failures.py report": Reader(to_json(FailureReport(0, WorkerExit.FAILED, "a bug")), report),
    "slipstream/pipeline/train/so_far.py progress": Reader(
        to_json(LiveProgress(1, 2, 0, [LossPoint(1, 1.0, 0.5, 1e-3)], [POINT], POINT)), progress
    ),
    "slipstream/pipeline/promote/store.py pointer": Reader(
        to_json(PromotionPointer(1, "ab" * 8, "cd" * 32, "why", "at", "run")), pointer, UserError
    ),
    "slipstream/pipeline/score/publish.py publication": Reader(
        to_json(Publication(1, "ab" * 8, "cd", "model", "at", "run")), publication, []
    ),
    "slipstream/pipeline/export/package/files.py manifest": Reader(ENDED, package_manifest, package_files.BadPackage),
    "slipstream/pipeline/export/check.py signature": Reader(WEIGHTS_ALONE, package_signature, package_files.BadPackage),
    "slipstream/pipeline/export/package/opened.py statistics": Reader(b'{"types": {}}', package_statistics, UserError),
    "slipstream/operations/plan/measured.py summary": Reader(
        canonical_json({"training": to_tree(FIGURES)}), summary, UserError
    ),
    "slipstream/operations/plan/capacity.py recorded": Reader(
        canonical_json({"up_hours": [4.5, 1.5], "wait_hours": [0.5]}), recorded_capacity, UserError
    ),
    "slipstream/operations/manifests/triton.py plan": Reader(
        canonical_json({"service": to_tree(PlannedService("fp32", "c3", 1, 2, 0.5, 1, 4, 8.0))}),
        serving_plan,
        UserError,
    ),
    "slipstream/pipeline/report/runs.py summaries": Reader(LISTED, listed_runs, UserError),
}


def outcome(reader: Reader, directory: Path, content: bytes) -> object:
    """Return what the reader returns, or the class of the error in one line that it raises."""
    try:
        return reader.read(directory, content)
    except (UserError, package_files.BadPackage) as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        return type(error)


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("perhaps", first_few([False, True], names=["never right", "right in places"]))
def test_a_damaged_record_is_skipped_or_one_line(name: str, perhaps: bool, tmp_path: Path) -> None:
    reader = READERS[name]
    whole = outcome(reader, tmp_path, reader.good)
    assert whole != reader.damaged and not isinstance(whole, type), "the reader takes what a writer writes"
    for what, content, never in damages(reader.good):
        if never == perhaps:
            continue
        try:
            found = outcome(reader, tmp_path, content)
        except Exception as error:
            raise AssertionError(f"{name}: {what}: {type(error).__name__}: {error!s:.200}") from error
        never = never and not (reader.untyped and what in JSON)
        is_skipped = found == reader.damaged or (isinstance(found, type) and issubclass(found, reader.damaged))
        assert is_skipped or not never, f"{name}: {what}: {found!r:.200}"
    assert outcome(reader, tmp_path, reader.good) == whole or isinstance(whole, Artifact)


# Values of the codec between pods, samples, and forms that earlier versions wrote


@dataclass(frozen=True)
class Shard:
    number: int
    share: float
    names: list[str]


def test_a_damaged_value_between_pods_is_one_line() -> None:
    good = json.dumps({"number": 3, "share": 0.5, "names": ["a"]}).encode()
    refused = 0
    for what, content, _ in damages(good):
        try:
            decode_value(save({"json": np.frombuffer(content, np.uint8)}), Shard, "value.safetensors")
        except DamagedArtifact as error:
            assert "\n" not in str(error), what
            refused += 1
    assert refused > 30


def with_number(number: float) -> Iterator[Sample]:
    """Samples with this number in one place."""
    whole = sample(100.0, device())
    (gpu,) = whole.devices
    yield replace(whole, at=number)
    yield replace(whole, host=replace(whole.host, cpu_seconds=number))
    yield replace(whole, devices=(replace(gpu, memory_used_bytes=number),))  # type: ignore[arg-type]
    yield replace(whole, devices=(replace(gpu, energy_joules=number),))
    yield replace(whole, devices=(replace(gpu, io_bytes={("pcie", "in"): number}),))


@pytest.mark.parametrize("number", [math.inf, -math.inf, 1e308, -1e308, 1e19])
@pytest.mark.parametrize("place", range(5))
def test_a_sample_with_a_number_out_of_range_is_skipped(tmp_path: Path, place: int, number: float) -> None:
    wrong, right = [*with_number(number)][place], sample(200.0, device())
    content = ring.names_frame(right.devices) + b"".join(map(ring.sample_frame, (wrong, right, wrong)))
    (tmp_path / "seconds-0.ring").write_bytes(content)
    assert ring.read_samples(tmp_path) == ring.latest_samples(tmp_path, 3) == [right]


def test_a_time_that_is_no_number_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "minutes.ring").write_bytes(ring.sample_frame(sample(math.nan)))
    assert ring.read_samples(tmp_path) == []


HELD = b'{"attempt": 1, "execution": "f1a2", "prefix": "prefix"}'
#: Records in the forms of earlier versions.
EARLIER: dict[str, tuple[bytes, object]] = {
    "a lease before delivering": (
        b'{"announced": "", "beat": 7, "ended": false, "leaving": false, "step": 20}',
        Heartbeat(7, 20),
    ),
    "a claim": (b'{"attempt": 1, "claim": "c0ffee", "holder": %b}' % HELD, AttemptClaim(1, "c0ffee", HOLDER)),
    "an end": (
        b'{"artifact": "s3://bucket/model", "holder": %b}' % HELD,
        FinishedTraining(HOLDER, "s3://bucket/model"),
    ),
    "what was inherited": (
        b'{"attempt": 2, "checkpoints": ["step-000000000020.a0001"]}',
        InheritedCheckpoints(2, [str(CHECKPOINT)]),
    ),
    "how an attempt ended": (b'{"ended": "SIGTERM"}', AttemptEnd("SIGTERM")),
    "a note before killed": (
        b'{"attempt": 1, "used": 3, "limit": 4294967296, "progress": "20", "times": 2}',
        MemoryNote(1, 3, float(4 << 30), "20", 2),
    ),
    "a report": (
        b'{"rank": 3, "outcome": 1, "message": "rank 3 failed"}',
        FailureReport(3, WorkerExit.FAILED, "rank 3 failed"),
    ),
}


@pytest.mark.parametrize("form", EARLIER)
def test_what_earlier_versions_wrote_is_read(form: str) -> None:
    content, record = EARLIER[form]
    assert decode_record(content, type(record)) == record


def test_a_record_of_a_sweep_from_before_the_nonce_is_read() -> None:
    assert decode_sealed(sealed_good(END)) == END


def test_what_a_later_version_adds_to_a_claim_is_skipped(tmp_path: Path) -> None:
    claim = {**json.loads(to_json(AttemptClaim(1, "random", HOLDER))), "colour": "green"}
    assert holder(tmp_path, json.dumps(claim).encode()) == HOLDER


# The two functions, and that there are no others


def test_json_is_finite_of_64_bits_and_not_deep() -> None:
    right = b'{"a": [1.5, -9223372036854775808, 18446744073709551615, "\\u00e9", true, null]}'
    assert parse_json(right) == json.loads(right)
    assert parse_json(b"[" * DEEPEST + b"]" * DEEPEST) is not None
    wrong = [b"[" * levels + b"]" * levels for levels in (DEEPEST + 1, 100_000)]
    wrong += [b"NaN", b"[-Infinity]", b"1e999", b"18446744073709551616", b"-9223372036854775809", b"1" * 5000]
    for content in (*wrong, b'"\\ud800"', b'{"\\udfff": 1}', b"\xff", b"", b'{"a": 1} 2'):
        with pytest.raises(ValueError) as error:
            parse_json(content)
        assert not isinstance(error.value, UserError) and len(str(error.value)) < 300


def test_a_record_has_a_largest_size() -> None:
    whole = to_json(AttemptEnd("x" * (LARGEST_RECORD - 100)))
    assert decode_record(whole, AttemptEnd)
    assert decode_record(whole + b" " * 100, AttemptEnd) is None


#: What Python's int takes, or str.isdigit, and none of our writers puts into a name.
NO_NUMBERS = ["", "²", "٣٣٣٣", "\uff11" * 4, "+111", "-111", " 111", "1_01", "11.0", "0x11", "00001", "1"]
NO_NUMBERS += ["1" * (MOST_DIGITS + 1), "1" * 5000]


@pytest.mark.parametrize("digits", NO_NUMBERS, ids=lambda digits: digits[:30])
def test_what_is_no_number_in_a_name_is_skipped(digits: str, tmp_path: Path) -> None:
    assert number_in_name(digits, 4) is None
    assert newest_attempt([f"claims/{digits}", "claims/0001"]) == 1
    assert CheckpointName.parse(f"step-{digits}.a0001") is CheckpointName.parse(f"step-000000000001.a{digits}") is None
    assert parse_record_key(f"records/{digits}/0001.json") is parse_record_key(f"records/0001/{digits}.json") is None
    if digits != "00001":
        with pytest.raises(DamagedArtifact, match="train-"):
            segment_number(f"train-{digits}.rows")
    if 0 < len(digits) < 200 and digits != "1":
        (tmp_path / "promoted").mkdir()
        (tmp_path / f"promoted/{digits}.json").touch()
        (tmp_path / f"seconds-{digits}.ring").touch()
        assert Registry(str(tmp_path)).history() == [] and ring.ring_files(tmp_path) == []


def test_a_number_in_a_name_is_read_as_it_was_written() -> None:
    for number in (0, 1, 9999, 10_000, 10**MOST_DIGITS - 1):
        assert number_in_name(number_as_name(number, 4), 4) == number
    with refuses(UserError):
        number_as_name(10**MOST_DIGITS, 4)


#: Modules that parse JSON by themselves, and why that is none of a store's records.
OTHER_JSON = {
    "slipstream/shared/artifacts/strict_json.py": "the one place",
    "slipstream/shared/artifacts/typed_values.py": "the codec of values between pods, which is tested above",
    "slipstream/shared/artifacts/prepared/token_rows.py": "a tokenizer of Hugging Face, with numbers of any size",
    "slipstream/shared/artifacts/syntax.py": "this user's cache of digests, behind a checksum",
    "slipstream/shared/language/chat_template.py": "a row of raw data",
    "slipstream/shared/language/template_process.py": "what this process and its own child send each other",
    "slipstream/shared/language/template_worker.py": "what this process and its own child send each other",
    "slipstream/shared/language/tokenizer.py": "a tokenizer of Hugging Face",
    "slipstream/shared/models/base/directory.py": "a base model of Hugging Face, of limited size",
    "slipstream/shared/models/base/tensors.py": "a header of safetensors, of limited size",
    "slipstream/shared/models/transformer.py": "a config.json of Hugging Face, which may hold infinity",
    "slipstream/pipeline/prepare/language/corpus.py": "a row of raw data",
    "slipstream/pipeline/prepare/language/encode.py": "a tokenizer that this process has written",
    "slipstream/shared/source/text/json_lines.py": "a row of raw data",
    "slipstream/shared/settings.py": "settings of the user",
    "slipstream/config_values.py": "settings of the user",
    "slipstream/flyte/metadata.py": "what the registration put into a pod's environment",
    "slipstream/flyte/settings_type.py": "settings of the user, as a client of Flyte sends them",
    "slipstream/shared/profiles/profile.py": "the profile in this task's environment",
    "slipstream/pipeline/sweep/study.py": "a choice that Optuna draws from the user's space",
    "slipstream/pipeline/collectives/launch/worker_group.py": "what ranks of one process group send each other",
    "slipstream/pipeline/train/applied_tuning.py": "what ranks of one process group send each other",
    "slipstream/shared/machine/description.py": "an answer of the cloud's metadata server, of limited size",
    "slipstream/shared/storage/gcs.py": "an answer of the store's API",
    "slipstream/operations/doctor/kubectl.py": "an answer of the Kubernetes API",
    "slipstream/operations/proofs/gpu/run_check.py": "what this process and its own child send each other",
    "slipstream/operations/proofs/gpu/command.py": "what this process and its own child send each other",
    "slipstream/operations/proofs/gpu/attempts.py": "files of a training that this process has run",
    "slipstream/pipeline/export/session.py": "a profile that ONNX Runtime has just written here",
}
#: Other ways to make values of bytes.
PARSERS = {"load", "loads", "validate_json", "literal_eval", "raw_decode"}
LIBRARIES = {"json", "pydantic_core", "ast", "pickle", "marshal", "msgpack", "orjson", "ujson"}
#: Modules that ask whether texts are digits, and why that is no name in a store or a shared directory.
OTHER_DIGITS = {
    "slipstream/shared/storage/names.py": "the one place",
    "slipstream/shared/cron.py": "a setting",
    "slipstream/pipeline/collectives/launch/measurements.py": "Linux's /sys",
    "slipstream/operations/doctor/manifests.py": "a name of the user's",
    "slipstream/operations/doctor/package.py": "the user of an image",
    "slipstream/pipeline/export/convert.py": "a dimension of a model",
    "slipstream/shared/machine/limits.py": "Linux's control groups",
    "slipstream/shared/machine/nvml.py": "the environment",
    "slipstream/shared/telemetry/sampler/sampling.py": "Linux's /proc and /sys",
}
SOURCES = [path for floor in ("slipstream", "tasks", "workflows") for path in sorted((ROOT / floor).rglob("*.py"))]


@cache
def syntax_trees() -> dict[str, ast.Module]:
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}


def calls_in(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name that each call is made on, if there is one, and that of the function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node.func.value.id if isinstance(node.func.value, ast.Name) else "", node.func.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield "", node.func.id


def modules_that(call: Callable[[str, str], bool]) -> set[str]:
    return {name for name, tree in syntax_trees().items() if any(call(*each) for each in calls_in(tree))}


def test_no_other_module_parses_json() -> None:
    found = modules_that(lambda on, name: on in LIBRARIES and name in {*PARSERS, "from_json"})
    assert found == OTHER_JSON.keys(), (
        "read records with slipstream.shared.artifacts.records, other JSON with strict_json"
    )
    imported = {
        alias.name
        for tree in syntax_trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in LIBRARIES
        for alias in node.names
    }
    assert not imported & {*PARSERS, "from_json"}
    validating = {"slipstream/shared/artifacts/records.py", "slipstream/shared/settings.py"}
    assert modules_that(lambda _, name: name == "validate_json") == validating


def test_every_module_that_reads_a_record_is_tested_with_damaged_ones() -> None:
    """A new reader stands in the table above, and so it meets every kind of damage."""
    found = modules_that(lambda _, name: name in ("decode_record", "parse_json"))
    tested = {name.split()[0] for name in READERS}
    own = {"slipstream/shared/artifacts/records.py", "slipstream/shared/artifacts/strict_json.py"}
    assert found - own <= tested


def test_no_other_module_reads_numbers_in_names() -> None:
    found = modules_that(lambda _, name: name in ("isdigit", "isdecimal", "isnumeric"))
    assert found == OTHER_DIGITS.keys(), "read numbers in names with slipstream.shared.storage.names.number_in_name"
