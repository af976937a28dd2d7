"""``slipstream telemetry``: a stage's samples, updated in place on a terminal, once when piped."""

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slipstream.shared.formatting import column_groups
from slipstream.shared.telemetry import bottleneck
from slipstream.shared.telemetry.node import NodeFacts, write_facts
from slipstream.shared.telemetry.records import HostReading, RankTotals, Sample
from slipstream.shared.telemetry.ring import SILENT_S, SampleRing
from slipstream.shared.telemetry.totals import write_totals
from slipstream.shared.telemetry.view import command
from slipstream.shared.telemetry.view.command import CLEAR_LINE, HOME, TelemetrySnapshot, main, page_lines, stages_in
from tests.support.sampler_process import device, sample, totals
from tests.support.wording import refuses, same_wording

NOW = 1_700_000_000.0
FACTS = NodeFacts(NOW, "node-7", "aws", "p5.48xlarge", True, True)
DEVICES = (
    device(),
    replace(device("GPU-1", 1), busy=None, sm_active=None, throttled=()),
    replace(device("GPU-2", 2), up=False),
)
CAUSES = {"launch": 0.02, "data": 0.25, "communication": 0.12}


def stage(base: Path, name: str, at: float, ranks: Sequence[RankTotals] = ()) -> Path:
    """A stage whose last sample was taken ``at``, the sixth; a second lies between two."""
    ring = SampleRing(base / name)
    for number in range(6):
        ring.add(sample(at - 5 + number, *DEVICES))
    for rank in ranks:
        write_totals(base / name, rank)
    write_facts(base / name, FACTS)
    return base / name


def rank(number: int, **changes: object) -> RankTotals:
    """All its phases together have taken 7 times 0.03 s a step."""
    own = {"last_step_at": NOW - 4, "goodput": None, "bottlenecks": {}, **changes}
    return replace(totals(number, 1200), **own)  # type: ignore[arg-type]


def row(lines: Sequence[str], column: str, number: int = 0) -> dict[str, str]:
    """The cells of a table's row by the columns' names; words are two spaces apart at least."""
    head = next(place for place, line in enumerate(lines) if line.startswith(column))
    names, cells = ([word.strip() for word in line.split("  ") if word.strip()] for line in pick(lines, head, number))
    return dict(zip(names, cells, strict=False))


def pick(lines: Sequence[str], head: int, number: int) -> tuple[str, str]:
    return lines[head], lines[head + 1 + number]


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_all_that_is_known_is_shown(tmp_path: Path) -> None:
    ranks = [rank(0, goodput=0.9, bottlenecks=CAUSES, attempt=2), rank(1)]
    lines = page_lines(TelemetrySnapshot.of(stage(tmp_path, "train-ab", NOW, ranks), NOW + 2))
    assert lines[0] == "train-ab on node-7 (p5.48xlarge on spot): sampled 2 s ago"
    assert row(lines, "device") == {
        "device": '0 A "100"',
        "utilisation": "50 %",
        "SM activity": "25 %",
        "memory": "18.6 GiB of 74.5 GiB, 25 %",
        "power": "350 W",
        "temperature": "61 °C",
        "state": "throttled: sw power cap, hw thermal slowdown",
    }
    second, third = row(lines, "device", 1), row(lines, "device", 2)
    assert (second["utilisation"], second["SM activity"], second["state"]) == ("—", "—", "ok")
    assert third["state"] == "not answering"
    # Of the host, in a second: half a second of CPU time and an eighth of waiting.
    assert row(lines, "host") == {
        "host": "CPU and memory",
        "CPUs used": "0.50 of 4",
        "threads waiting for a CPU": "0.12",
        "throttled by the quota": "—",
        "memory": "4.66 GiB of 14.9 GiB, 31 %",
    }
    assert row(lines, "rank", 1) == {
        "rank": "1",
        "steps": "1,200",
        "samples/s": "427",
        "ms/step": "150",
        **dict.fromkeys(("data", "compute", "exchange", "optimizer", "rest"), "30 ms 14 %"),
        **dict.fromkeys(("evaluation", "checkpoint"), "36 s 14 %"),
        "last step": "6 s ago",
    }
    assert "goodput 90 %; bottleneck: data" in lines
    assert lines[-3:] == [
        "data            25 %  main bottleneck",
        "communication   12 %  worth a look",
        "launch           2 %",
    ]


def test_goodput_is_shown_after_a_restart_only(tmp_path: Path) -> None:
    ranks = [rank(0, goodput=0.057, bottlenecks=CAUSES, attempt=1)]
    lines = page_lines(TelemetrySnapshot.of(stage(tmp_path, "train-ab", NOW, ranks), NOW))
    assert "bottleneck: data" in lines and not any("goodput" in line for line in lines)


@pytest.mark.parametrize(
    ("largest", "verdict", "note"),
    [
        (bottleneck.DECISIVE, "bottleneck: data", "main bottleneck"),
        (bottleneck.DECISIVE - 0.001, "no cause took 20 % of the training's time", "worth a look"),
        (bottleneck.WORTH_A_LOOK, "no cause took 20 % of the training's time", "worth a look"),
        (bottleneck.WORTH_A_LOOK - 0.001, "no cause took 20 % of the training's time", ""),
    ],
)
def test_the_verdict_is_by_the_thresholds_of_the_report(
    tmp_path: Path, largest: float, verdict: str, note: str
) -> None:
    ranks = [rank(0, goodput=0.5, bottlenecks={"data": largest})]
    lines = page_lines(TelemetrySnapshot.of(stage(tmp_path, "train-ab", NOW, ranks), NOW))
    assert any(line.endswith(verdict) for line in lines)
    assert row(lines, "cause").get("share") is not None
    assert (note in lines[-1]) and lines[-1].endswith(note or "%")


def test_before_the_first_step_and_without_devices(tmp_path: Path) -> None:
    ring = SampleRing(tmp_path)
    ring.add(Sample(NOW, HostReading(5.0, 2)))
    write_totals(tmp_path, replace(totals(0, 0), last_step_at=0.0, goodput=None, bottlenecks={}, phase_seconds={}))
    lines = page_lines(TelemetrySnapshot.of(tmp_path, NOW))
    assert not any(line.startswith(("device", "cause", "goodput")) for line in lines)
    host, first = row(lines, "host"), row(lines, "rank")
    assert (host["CPUs used"], host["memory"]) == ("— of 2", "—")
    assert (first["steps"], first["samples/s"], first["last step"]) == ("0", "—", "—")


def test_what_a_quota_stopped_is_a_share_of_its_periods(tmp_path: Path) -> None:
    ring = SampleRing(tmp_path)
    ring.add(Sample(NOW, HostReading(5.0, 2, throttled_periods=10, periods=100)))
    ring.add(Sample(NOW + 1, HostReading(6.0, 2, throttled_periods=13, periods=110)))
    host = row(page_lines(TelemetrySnapshot.of(tmp_path, NOW)), "host")
    assert (host["CPUs used"], host["throttled by the quota"]) == ("1.00 of 2", "30 % of its periods")


@pytest.mark.parametrize("width", [60, 80, 100])
def test_on_a_narrow_terminal_tables_go_on_below_and_nothing_is_lost(tmp_path: Path, width: int) -> None:
    directory = stage(tmp_path, "train-ab", NOW, [rank(0, goodput=0.9, bottlenecks=CAUSES), rank(1)])
    wide, narrow = (
        page_lines(TelemetrySnapshot.of(directory, NOW)),
        page_lines(TelemetrySnapshot.of(directory, NOW), width),
    )
    assert max(map(len, wide)) > width
    assert all(len(line) <= width for line in narrow if not line.startswith("(utilisation"))
    assert set(" ".join(wide).split()) == set(" ".join(narrow).split())
    # The first column says of what the others are.
    heads = [place for place, line in enumerate(narrow) if line.startswith("rank ")]
    assert len(heads) > 1 and all(narrow[place + 2].split()[0] == "1" for place in heads)


@pytest.mark.parametrize(("width", "parts"), [(13, [[0, 1, 2]]), (12, [[0, 1], [0, 2]]), (8, [[0, 1], [0, 2]])])
def test_columns_are_divided_where_they_do_not_fit(width: int, parts: list[list[int]]) -> None:
    """Two spaces lie between columns of 4, 2 and 3; 4 and 3 alone are wider than 8, and not divided further."""
    assert list(column_groups([4, 2, 3], width)) == parts
    assert list(column_groups([4, 2, 3], None)) == [[0, 1, 2]]


def test_the_newest_stage_is_shown_and_the_others_are_listed(tmp_path: Path) -> None:
    now = time.time()
    stage(tmp_path, "prepare-a", now - 7200)
    stage(tmp_path, "train-b", now - 1)
    stage(tmp_path, "evaluate-c", now - 300)
    (tmp_path / "export-d").mkdir()
    (tmp_path / "a file").write_text("")
    assert [each.directory.name for each in stages_in(tmp_path)] == ["train-b", "evaluate-c", "prepare-a"]
    ended = called(tmp_path)
    assert ended.exit_code == 0 and ended.output.startswith("train-b on node-7")
    assert ended.output.endswith("older:\n  evaluate-c  5 min ago\n  prepare-a  2 h ago\n")
    one = called(tmp_path / "prepare-a")
    assert one.output.startswith("prepare-a on node-7") and "older" not in one.output


def test_by_default_the_samples_of_this_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage(tmp_path / ".slipstream/telemetry", "train-ab", time.time())
    monkeypatch.chdir(tmp_path)
    assert called().output.startswith("train-ab on node-7")


def test_old_samples_say_when_they_ended(tmp_path: Path) -> None:
    stage(tmp_path, "train-ab", time.time() - 180)
    assert called(tmp_path).output.splitlines()[0].endswith("): ended 3 min ago")


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def cut_to_nothing(directory: Path) -> None:
    emptied(next(directory.glob("*.ring")))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("damage", [emptied, cut, flipped])
def test_of_damaged_files_the_rest_is_shown(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    directory = stage(tmp_path, "train-ab", NOW, [rank(0), rank(1)])
    whole = page_lines(TelemetrySnapshot.of(directory, NOW))
    damage(directory / "ranks/0.json")
    (directory / "facts.json").write_text('{"node": 1}')
    lines = page_lines(TelemetrySnapshot.of(directory, NOW))
    assert lines[0] == "train-ab: sampled 0 s ago"
    assert row(lines, "rank") == (row(whole, "rank", 1) if damage is not flipped else row(lines, "rank"))
    damage(next(directory.glob("*.ring")))
    if damage is emptied:
        refused = called(directory)
        assert refused.exit_code == 1
        same_wording(refused.output)
    else:
        assert page_lines(TelemetrySnapshot.of(directory, NOW))[0] == "train-ab: sampled 1 s ago"


def test_names_in_files_do_not_move_the_cursor(tmp_path: Path) -> None:
    ring = SampleRing(tmp_path / "train-ab")
    ring.add(sample(NOW, replace(device(), name="\x1b[2J")))
    write_totals(tmp_path / "train-ab", rank(0, goodput=0.9, bottlenecks={"\x1b[2J": 0.3}))
    write_facts(tmp_path / "train-ab", replace(FACTS, node="\x07", instance_type="a\nb\x1b[2J"))
    assert all(line.isprintable() for line in page_lines(TelemetrySnapshot.of(tmp_path / "train-ab", NOW)))


@pytest.mark.parametrize(
    "made",
    [
        lambda path: None,
        lambda path: path.write_text("x"),
        lambda path: path.mkdir(),
        lambda path: (path / "other").mkdir(parents=True),
        lambda path: cut_to_nothing(stage(path, "train-ab", NOW)),
    ],
)
def test_what_is_no_directory_of_samples_is_one_line(tmp_path: Path, made: Callable[[Path], object]) -> None:
    made(tmp_path / "it")
    refused = called(tmp_path / "it")
    assert refused.exit_code == 1 and refused.output.count("\n") == 1
    assert str(tmp_path / "it") in refused.output and ".slipstream" in refused.output
    same_wording(refused.output)


def test_it_is_drawn_in_place_until_the_stage_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a clock of its own. The sampler goes on for three seconds."""
    directory, now = stage(tmp_path, f"train-ab{80 * '-'}", NOW), [NOW]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] <= NOW + 3:
            SampleRing(directory).add(sample(now[0], *DEVICES))

    monkeypatch.setattr(command.time, "time", lambda: now[0])
    monkeypatch.setattr(command.time, "sleep", sleep)
    monkeypatch.setattr(command.shutil, "get_terminal_size", lambda: os.terminal_size((70, 6)))
    command.follow_stage(stages_in(tmp_path)[0], [])
    pages = [drawn.split(f"{CLEAR_LINE}\n") for drawn in capsys.readouterr().out.split(HOME)[1:]]
    assert now[0] == NOW + 3 + SILENT_S + 1 and len(pages) == now[0] - NOW + 1
    assert pages[0][0] == f"train-ab{62 * '-'}" and pages[-1][0].endswith("ended 11 s ago")
    # In place: no line is wrapped, nothing scrolls. The last one is whole.
    assert all(len(lines[:-1]) == 5 and max(map(len, lines[:-1])) <= 70 for lines in pages[:-1])
    assert len(pages[-1]) > 10


def test_a_stage_whose_samples_are_removed_is_one_line(tmp_path: Path) -> None:
    (found,) = stages_in(stage(tmp_path, "train-ab", NOW))
    emptied(next(tmp_path.rglob("*.ring")))
    with refuses(command.UserError):
        command.draw_page(found, [])


def test_on_a_terminal_it_goes_on_until_ctrl_c(tmp_path: Path) -> None:
    stage(tmp_path, "train-ab", time.time() + 3600)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = [sys.executable, "-m", "slipstream", "telemetry", str(tmp_path)]
    process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    said = b""
    try:
        while said.count(HOME.encode()) < 3:
            said += os.read(ours, 4096)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"train-ab on node-7" in said and b"Traceback" not in said


def test_it_loads_nothing_heavy() -> None:
    program = (
        "import sys, slipstream.shared.telemetry.view.command\nprint({'torch', 'pandas', 'boto3'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"


def test_a_rank_of_another_version_is_left_out(tmp_path: Path) -> None:
    directory = stage(tmp_path, "train-ab", NOW, [rank(0), rank(1)])
    path = directory / "ranks/0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "new": 1}))
    assert row(page_lines(TelemetrySnapshot.of(directory, NOW)), "rank")["rank"] == "1"
