"""Samples on disk: one per second for the last hour, one per minute before.

A directory holds files ``seconds-<T>.ring`` with five minutes of samples, from T seconds after 1970, and
``minutes.ring``. A seconds file older than an hour is removed after its minutes were appended to ``minutes.ring``: the
means of gauges, and the last values of counters and limits. With 8 devices this takes 4 MB after a day, and 1.3 MB for
each further day.

A file is a sequence of frames. Each is written by one call, so a kill leaves only the last incomplete. All numbers are
little-endian:

=========  ============================================================================================
4 bytes    ``SLT1``
1 byte     kind: ``N`` names, ``S`` sample
2 bytes    length of the content
4 bytes    CRC-32 of kind, length and content
content
=========  ============================================================================================

Names are a JSON list of ``[uuid, index, name]``. They are written at the start of a file, every minute, and for every
new device. A sample is a host (``HOST``) and any number of devices (``DEVICE``). Each device starts with the CRC-32 of
its UUID; NaN stands for None. A reader skips damaged bytes up to the next intact frame.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from zlib import crc32

from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.storage.names import number_in_name
from slipstream.shared.telemetry.records import THROTTLED, DeviceReading, HostReading, Sample

MAGIC = b"SLT1"
NAMES, SAMPLE = b"N", b"S"
HEAD = struct.Struct("<4ssHI")
CHECKED = struct.Struct("<sH")
#: Fields of a host: time, CPU seconds, CPUs, seconds waited, seconds throttled, throttled periods, periods, memory
#: used, memory limit.
HOST = struct.Struct("<ddfddQQdd")
#: Fields of a device: CRC-32 of the UUID, up, bits of THROTTLED; busy, SM active, watts, degrees, hertz; memory used,
#: memory limit, joules, bytes of ``IO``.
DEVICE = struct.Struct("<IBH5f7d")
IO = (("pcie", "in"), ("pcie", "out"), ("nvlink", "in"), ("nvlink", "out"))
#: Seconds per file; seconds until a file is condensed to minutes; seconds between two names frames.
FILE_S, KEPT_S, NAMES_S = 300, 3600, 60
#: Seconds without a sample after which the sampler counts as ended.
SILENT_S = 10.0
#: Bytes read of a file for its last samples: at the start, with the device names, and at the end.
BEGIN_BYTES, END_BYTES = 1 << 13, 1 << 15
MINUTES = "minutes.ring"
Names = dict[int, tuple[str, int, str]]
#: Limits of valid values: times that ``datetime`` can represent, other numbers within 64 bits.
LATEST, LARGEST = 253_402_300_800.0, float(1 << 63)


# Writing


class SampleRing:
    """Writer of samples to ``directory``, which is created.

    Every method may raise ``OSError``; later calls may succeed again.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        #: File and time of the last names frame, and the devices in it.
        self._path = directory
        self._names_at = 0.0
        self._named: set[str] = set()

    def add(self, sample: Sample) -> None:
        path = self._directory / f"seconds-{int(sample.at // FILE_S * FILE_S)}.ring"
        uuids = {device.uuid for device in sample.devices}
        is_new = path != self._path
        if is_new or not uuids <= self._named or abs(sample.at - self._names_at) >= NAMES_S:
            append(path, names_frame(sample.devices) + sample_frame(sample))
            self._path, self._names_at, self._named = path, sample.at, uuids
        else:
            append(path, sample_frame(sample))
        if is_new:
            self._condense(sample.at - KEPT_S - FILE_S)

    def _condense(self, before: float) -> None:
        """Convert files that start at or before the time ``before`` to minutes."""
        for begin, path in ring_files(self._directory):
            if begin <= before:
                samples = minutes_of(read_file(path, {}))
                devices = {device.uuid: device for sample in samples for device in sample.devices}
                frames = [names_frame(devices.values()), *map(sample_frame, samples)]
                append(self._directory / MINUTES, b"".join(frames))
                path.unlink()


def append(path: Path, content: bytes) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if os.write(file, content) < len(content):
            raise OSError(f"{path}: no space is left")
    finally:
        os.close(file)


def key_of(uuid: str) -> int:
    return crc32(uuid.encode())


def frame_record(kind: bytes, content: bytes) -> bytes:
    return HEAD.pack(MAGIC, kind, len(content), crc32(CHECKED.pack(kind, len(content)) + content)) + content


def names_frame(devices: Iterable[DeviceReading]) -> bytes:
    return frame_record(NAMES, json.dumps([(device.uuid, device.index, device.name) for device in devices]).encode())


def sample_frame(sample: Sample) -> bytes:
    host = sample.host
    content = HOST.pack(
        sample.at,
        host.cpu_seconds,
        host.cpus,
        host.cpu_wait_seconds,
        host.throttled_seconds,
        host.throttled_periods,
        host.periods,
        written(host.memory_used_bytes),
        written(host.memory_limit_bytes),
    )
    return frame_record(SAMPLE, content + b"".join(map(device_bytes, sample.devices)))


def device_bytes(device: DeviceReading) -> bytes:
    gauges = (
        device.busy,
        device.sm_active,
        device.power_watts,
        device.temperature_celsius,
        device.sm_clock_hertz,
        device.memory_used_bytes,
        device.memory_limit_bytes,
        device.energy_joules,
        *(device.io_bytes.get(each) for each in IO),
    )
    reasons = sum(1 << bit for bit, reason in enumerate(THROTTLED) if reason in device.throttled)
    return DEVICE.pack(key_of(device.uuid), device.up, reasons, *map(written, gauges))


def written(value: float | None) -> float:
    return math.nan if value is None else value


# Reading


def read_samples(directory: Path) -> list[Sample]:
    """Return all intact samples, the oldest first.

    A minute's sample is dated as its last second. If times are equal, the seconds file's sample is returned.
    """
    return RingReader(directory).read()


class RingReader:
    """Reader of a directory that, if called again, reads only files that have grown."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._named: Names = {}
        #: Size at the last read, and samples, by file.
        self._known: dict[Path, tuple[int, list[Sample]]] = {}

    def read(self) -> list[Sample]:
        """Return the samples like :func:`read_samples`."""
        # Seconds first, so that samples condensed meanwhile are found among the minutes.
        paths = [*(path for _, path in ring_files(self._directory)), self._directory / MINUTES]
        self._known = {path: self._file(path) for path in paths}
        *seconds, minutes = ({sample.at: sample for sample in self._known[path][1]} for path in paths)
        together = dict(minutes)
        for each in seconds:
            together |= each
        return [sample for _, sample in sorted(together.items())]

    def _file(self, path: Path) -> tuple[int, list[Sample]]:
        try:
            size = path.stat().st_size
        except OSError:
            return 0, []
        known = self._known.get(path)
        return known if known and known[0] == size else (size, read_file(path, self._named))


def ring_files(directory: Path) -> list[tuple[int, Path]]:
    """Return the seconds files with their start times, the oldest first."""
    paths = {path.stem.removeprefix("seconds-"): path for path in directory.glob("seconds-*.ring")}
    begins = ((number_in_name(begin), path) for begin, path in paths.items())
    return sorted((begin, path) for begin, path in begins if begin is not None)


def read_file(path: Path, named: Names) -> list[Sample]:
    """Return the samples of a file as written.

    ``named`` are devices known from other files, updated in place.
    """
    try:
        content = path.read_bytes()
    except OSError:
        return []
    frames = list(frames_of(content))
    named.update(names_in(frames))
    return samples_in(frames, named)


def newest_sample(directory: Path) -> Sample | None:
    """Return the last sample; None if there is none."""
    return next(iter(latest_samples(directory, 1)), None)


def latest_samples(directory: Path, count: int) -> list[Sample]:
    """Return at most ``count`` last samples, the oldest first (with 8 devices at most 40).

    Only start and end of the last file are read, and earlier files only if it has too few.
    """
    found: list[Sample] = []
    for path in [*(path for _, path in reversed(ring_files(directory))), directory / MINUTES]:
        found = end_of(path, count - len(found)) + found
        if len(found) == count:
            break
    return found


def end_of(path: Path, count: int) -> list[Sample]:
    """Return at most ``count`` samples from the end of the file, as written."""
    try:
        with path.open("rb") as file:
            begin = file.read(BEGIN_BYTES)
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - END_BYTES))
            end = file.read(END_BYTES)
    except OSError:
        return []
    frames = list(frames_of(end))
    named = names_in(frames_of(begin)) | names_in(frames)
    return samples_in([each for each in frames if each[0] == SAMPLE][-count:], named)


def names_in(frames: Iterable[tuple[bytes, bytes]]) -> Names:
    named: Names = {}
    for kind, names in frames:
        if kind == NAMES:
            with contextlib.suppress(ValueError, TypeError):  # of another version, or damaged
                devices = [(uuid, index, name) for uuid, index, name in parse_json(names)]
                if all(tuple(map(type, device)) == (str, int, str) for device in devices):
                    named.update({key_of(uuid): (uuid, index, name) for uuid, index, name in devices})
    return named


def samples_in(frames: Iterable[tuple[bytes, bytes]], named: Names) -> list[Sample]:
    samples = (sample_of(sample, named) for kind, sample in frames if kind == SAMPLE)
    return [sample for sample in samples if sample is not None]


def frames_of(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield kind and content of every intact frame."""
    at = content.find(MAGIC)
    while 0 <= at <= len(content) - HEAD.size:
        _, kind, length, checksum = HEAD.unpack_from(content, at)
        begin, end = at + HEAD.size, at + HEAD.size + length
        is_intact = end <= len(content) and crc32(CHECKED.pack(kind, length) + content[begin:end]) == checksum
        if is_intact:
            yield kind, content[begin:end]
        at = content.find(MAGIC, end if is_intact else at + 1)


def sample_of(content: bytes, named: Names) -> Sample | None:
    """Return the sample in a frame; None if it has another version's size or a number out of range.

    Devices without known names are skipped.
    """
    if len(content) < HOST.size or (len(content) - HOST.size) % DEVICE.size:
        return None
    readings = [*DEVICE.iter_unpack(content[HOST.size :])]
    at, cpu, cpus, wait, throttled, throttled_periods, periods, used, limit = HOST.unpack_from(content)
    gauges = (used, limit, *chain.from_iterable(readings))
    if not (
        0 <= at < LATEST
        and all(abs(number) < LARGEST for number in (cpu, cpus, wait, throttled, throttled_periods, periods))
        and all(abs(gauge) < LARGEST or math.isnan(gauge) for gauge in gauges)
    ):
        return None
    host = HostReading(cpu, cpus, wait, throttled, throttled_periods, periods, whole(used), whole(limit))
    devices = (device_of(fields, named) for fields in readings)
    return Sample(at, host, tuple(device for device in devices if device is not None))


def device_of(fields: tuple[float, ...], named: Names) -> DeviceReading | None:
    key, up, reasons, busy, active, watts, degrees, hertz, used, limit, joules, *io = fields
    if key not in named:
        return None
    return DeviceReading(
        *named[int(key)],
        up=bool(up),
        busy=known(busy),
        sm_active=known(active),
        memory_used_bytes=whole(used),
        memory_limit_bytes=whole(limit),
        power_watts=known(watts),
        energy_joules=known(joules),
        temperature_celsius=known(degrees),
        sm_clock_hertz=known(hertz),
        throttled=tuple(reason for bit, reason in enumerate(THROTTLED) if int(reasons) >> bit & 1),
        io_bytes={each: value for each, value in zip(IO, io, strict=True) if not math.isnan(value)},
    )


def known(value: float) -> float | None:
    return None if math.isnan(value) else value


def whole(value: float) -> int | None:
    return None if math.isnan(value) else int(value)


# Minutes


def minutes_of(samples: Sequence[Sample]) -> list[Sample]:
    return [mean_of(list(minute)) for _, minute in groupby(samples, lambda sample: sample.at // 60)]


def mean_of(samples: Sequence[Sample]) -> Sample:
    """Return a minute's samples as one, dated as the last.

    Gauges are means; counters and limits are last values.
    """
    last = samples[-1]
    used = mean([sample.host.memory_used_bytes for sample in samples])
    host = replace(last.host, memory_used_bytes=None if used is None else int(used))
    devices: dict[str, list[DeviceReading]] = {}
    for sample in samples:
        for device in sample.devices:
            devices.setdefault(device.uuid, []).append(device)
    return Sample(last.at, host, tuple(map(mean_device, devices.values())))


def mean_device(readings: Sequence[DeviceReading]) -> DeviceReading:
    """Return the mean of the readings in which the device was up.

    The mean is throttled for a reason if at least half of these readings are.
    """
    up = [reading for reading in readings if reading.up]
    if not up:
        return readings[-1]
    used = mean([reading.memory_used_bytes for reading in up])
    return replace(
        up[-1],
        busy=mean([reading.busy for reading in up]),
        sm_active=mean([reading.sm_active for reading in up]),
        memory_used_bytes=None if used is None else int(used),
        power_watts=mean([reading.power_watts for reading in up]),
        temperature_celsius=mean([reading.temperature_celsius for reading in up]),
        sm_clock_hertz=mean([reading.sm_clock_hertz for reading in up]),
        throttled=tuple(
            reason for reason in THROTTLED if 2 * sum(reason in reading.throttled for reading in up) >= len(up)
        ),
    )


def mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return sum(present) / len(present) if present else None
