"""Records of earlier releases, byte for byte as they wrote them, are still read."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.pipeline.sweep.records import ExecutionStarted, decode_sweep_record
from slipstream.pipeline.train.checkpoint.home import AttemptClaim, FinishedTraining
from slipstream.pipeline.train.checkpoint.lease import Heartbeat
from slipstream.shared.artifacts.records import decode_record
from slipstream.shared.artifacts.results.ledger import ACTIVITIES, AttemptRecord, decode_attempt
from slipstream.shared.artifacts.typed_values import decode_value
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.telemetry.node import NodeFacts, read_facts
from slipstream.shared.telemetry.records import STEP_BOUNDS, RankTotals
from slipstream.shared.telemetry.totals import NodeTotals, read_node, read_totals

Reader = Callable[[bytes, Path], object]


def in_file(name: str, read: Callable[[Path], object]) -> Reader:
    def reader(content: bytes, directory: Path) -> object:
        (directory / "ranks").mkdir()
        (directory / name).write_bytes(content)
        return read(directory)

    return reader


def record(kind: type) -> Reader:
    return lambda content, _: decode_record(content, kind, extra="ignore")


HOLDER = Holder("f1a2", 1, "prefix")
READ: list[tuple[bytes, Reader, object]] = [
    (
        b'{\n "announced": "step-000000000020.a0001",\n "beat": 3,\n'
        b' "ended": false,\n "leaving": false,\n "step": 20\n}\n',
        record(Heartbeat),
        Heartbeat(3, 20, "step-000000000020.a0001"),
    ),
    (
        b'{\n "attempt": 1,\n "claim": "c",\n "holder": {\n  "execution": "f1a2",\n  "attempt": 1,\n'
        b'  "prefix": "prefix"\n }\n}\n',
        record(AttemptClaim),
        AttemptClaim(1, "c", HOLDER),
    ),
    (
        b'{\n "artifact": "s3://b/model",\n "holder": {\n  "execution": "f1a2",\n  "attempt": 1,\n'
        b'  "prefix": "prefix"\n }\n}\n',
        record(FinishedTraining),
        FinishedTraining(HOLDER, "s3://b/model"),
    ),
    (
        b'{"attempt": 2, "world": 4, "last_step": 9, "seconds": {"steps": 1, "of another release": 2.5}, "wall": 10}',
        lambda content, _: decode_attempt(content),
        AttemptRecord(2, 4, last_step=9, seconds=dict.fromkeys(ACTIVITIES, 0.0) | {"steps": 1.0}, wall=10.0),
    ),
    (
        b'{\n "kind": "started",\n "record": {\n  "at": 3.0,\n  "execution": "f1a2"\n },\n "sha256": '
        b'"a74bdca56162a6aa92b8a295006a5cacf7219613298679815d06d24f5a37b2ce"\n}\n',
        lambda content, _: decode_sweep_record(content),
        ExecutionStarted("f1a2", 3.0),
    ),
    (
        b'{"seconds": 1.5, "gpu_seconds": 3, "energy_joules": {"a": 2.0}, "throttled_seconds": {"a": {"hw_slowdown": 1'
        b'.0}}, "cost_dollars": {"spot": 0.1}}',
        in_file("node.json", read_node),
        NodeTotals(1.5, 3, {"a": 2.0}, {"a": {"hw_slowdown": 1.0}}, {"spot": 0.1}),
    ),
    (
        b'{"rank": 3, "gpu_uuid": "", "steps": 20, "samples": 40, "phase_seconds": {"data": 0.5}, "steps_within": '
        b'[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], "goodput": null}',
        in_file("ranks/3.json", read_totals),
        [RankTotals(3, "", 20, 40, {"data": 0.5}, [0] * len(STEP_BOUNDS))],
    ),
    (
        b'{"started_at": 1.5, "node": "n", "cloud": "aws", "instance_type": "p5", "spot": true, "spot_is_certain": '
        b"false}",
        in_file("facts.json", read_facts),
        NodeFacts(1.5, "n", "aws", "p5", spot=True, spot_is_certain=False),
    ),
]


@pytest.mark.parametrize(("content", "read", "expected"), READ, ids=[type(one[2]).__name__ for one in READ])
def test_a_record_of_an_earlier_release_is_read(content: bytes, read: Reader, expected: object, tmp_path: Path) -> None:
    assert read(content, tmp_path) == expected


def test_a_typed_value_of_an_earlier_release_is_read() -> None:
    content = (
        b'@\0\0\0\0\0\0\0{"json":{"dtype":"U8","shape":[28],"data_offsets":[0,28]}}      {"a":["7ff8000000000000",1]}'
    )
    not_a_number, one = decode_value(content, dict[str, list[float]], "value")["a"]
    assert math.isnan(not_a_number) and one == 1
