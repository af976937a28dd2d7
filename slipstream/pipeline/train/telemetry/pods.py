"""Device telemetry of all pods, stored in the training's checkpoint directory, where it outlives the pods.

The first rank of every pod uploads condensed samples twice a minute and at the end. If a pod is killed, samples since
its last upload are lost.
"""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory
from slipstream.pipeline.train.periodically import call_periodically
from slipstream.pipeline.train.telemetry.step_times import StepTimes
from slipstream.shared.artifacts.records import decode_record, to_json
from slipstream.shared.artifacts.results.devices import AttemptSpan, PodSeries, TrainingDevices
from slipstream.shared.artifacts.results.ledger import AttemptRecord, lost_seconds, read_attempts
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.machine.gpus import largest_clocks
from slipstream.shared.storage import Storage, StorageUnavailable, storage_for
from slipstream.shared.telemetry import ring
from slipstream.shared.telemetry.node import read_facts
from slipstream.shared.telemetry.series import clocked_down, condense_samples
from slipstream.shared.telemetry.totals import read_totals

PREFIX = "devices/"
PERIOD_S = 30.0
#: Timeout of the last upload at the end of the training, in seconds.
LAST_S = 5.0
LOG = logger("telemetry")


@contextmanager
def samples_uploaded(
    home: CheckpointDirectory, record: AttemptRecord, sampled: Path | None, times: StepTimes
) -> Iterator[None]:
    """Upload this pod's samples during the block and at its end, on the pod's first rank.

    Samples since the start of the attempt in ``record`` are read from ``sampled`` (None disables uploads). Time lost to
    lowered clock rates is stored in ``times``.
    """
    if sampled is None or os.environ.get("LOCAL_RANK") != "0":
        yield
        return
    pod, facts = int(os.environ.get("GROUP_RANK", "0")), read_facts(sampled)
    node = facts.node if facts else socket.gethostname()
    reader, clocks = ring.RingReader(sampled), largest_clocks()

    def upload() -> None:
        samples = [sample for sample in reader.read() if sample.at >= record.began_at]
        ranks = {totals.gpu_uuid: totals.rank for totals in read_totals(sampled)}
        if samples and samples[-1].devices:
            times.clocked_down = clocked_down(samples, clocks)
        series = condense_samples(samples, record.attempt, node, ranks)
        if series and not home.is_inherited(record.attempt):
            home.storage.put(f"{PREFIX}{record.attempt:04d}-{pod:04d}.json", to_json(series))

    with call_periodically(upload, PERIOD_S, LAST_S, "telemetry", "device telemetry could not be uploaded"):
        yield


def devices_so_far(home: str) -> TrainingDevices | None:
    """Return the uploaded telemetry of a running training in ``home``; raises the store's errors."""
    storage = storage_for(home)
    return read_device_series(storage, read_attempts(storage))


def read_device_series(storage: Storage, attempts: Sequence[AttemptRecord]) -> TrainingDevices | None:
    """Return the uploaded telemetry of all pods; None if there is none or the store is unavailable."""
    pods = []
    try:
        with tempfile.TemporaryDirectory(prefix="devices-") as fresh:
            for key in storage.list(PREFIX):
                series = decode_record(storage.get(key, Path(fresh)).read_bytes(), PodSeries)
                if series is None:
                    LOG.warning("%s/%s: not the device telemetry of a pod; skipped", storage.base, key)
                else:
                    pods.append(series)
    except (UserError, StorageUnavailable) as error:
        LOG.warning("device telemetry could not be read: %s", error)
        return None
    if not pods:
        return None
    lost = lost_seconds(attempts)
    spans = [
        AttemptSpan(
            each.attempt, each.began_at, each.wall, each.ended, each.spot, lost[index], each.events, each.before
        )
        for index, each in enumerate(attempts)
    ]
    return TrainingDevices(spans, sorted(pods, key=lambda pod: (pod.attempt, pod.node)))
