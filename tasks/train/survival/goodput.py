"""The ledger of a run: what every attempt did, what of it was kept, and where the time went.

Each attempt keeps one page, ``ledger/<attempt>.json`` in the checkpoints' home, written anew every few seconds by
rank 0 beside the step loop and once more when it ends; a page whose attempt never said how it ended was killed. Useful
steps are those that no later attempt did again. The ledger is about time and therefore no part of what a run computes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tasks.artifacts.format import canonical_json
from tasks.errors import UserError
from tasks.storage import Storage, StorageUnavailable

PAGES = "ledger/"
PERIOD_S = 5.0
#: Where the time of an attempt goes; what is in none of them is idle or unaccounted for.
START, RESTORE, STEPS, EVALUATION, DATA_WAIT, STALL = "start", "restore", "steps", "evaluation", "data_wait", "stall"
ACCOUNTS = (START, RESTORE, STEPS, EVALUATION, DATA_WAIT, STALL)
#: How an attempt ended of which nothing more was heard.
NO_WORD = "killed, or its machine was lost"


@dataclass
class Page:
    """One attempt. ``first_step`` is where it began (steps finished before it), ``last_step`` how far it came."""

    attempt: int
    world: int
    first_step: int = 0
    last_step: int = 0
    #: The step of the last checkpoint that it published.
    saved_step: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ACCOUNTS, 0.0))
    #: Wall-clock time of the attempt so far, in seconds.
    wall: float = 0.0
    ended: str = NO_WORD

    @property
    def executed(self) -> int:
        return self.last_step - self.first_step


@dataclass(frozen=True)
class Account:
    """A run as a whole, over its attempts."""

    attempts: int
    executed: int
    kept: int
    seconds: dict[str, float]
    #: Seconds of steps that were done again, at the mean time of the attempt's steps.
    lost: float
    wall: float
    ends: tuple[str, ...]

    @property
    def useful_steps(self) -> float:
        """Steps kept over steps executed; 1 before the first."""
        return self.kept / self.executed if self.executed else 1.0

    @property
    def goodput(self) -> float:
        """Time of steps that were kept over the wall-clock time of all attempts; 1 before the first."""
        return max(0.0, self.seconds[STEPS] - self.lost) / self.wall if self.wall else 1.0

    def to_json(self) -> dict[str, Any]:
        """For the report: the fields, and the two ratios."""
        return {**dataclasses.asdict(self), "useful_steps": self.useful_steps, "goodput": self.goodput}

    def __str__(self) -> str:
        lost = self.executed - self.kept
        return (
            f"{self.kept} steps kept of {self.executed} executed ({self.useful_steps:.1%}) in {self.attempts} "
            f"attempt{'s' if self.attempts > 1 else ''}, {lost} lost; goodput {self.goodput:.1%} of {self.wall:.1f} s"
        )


def account(pages: Sequence[Page]) -> Account:
    """Add up the pages of all attempts, in their order: an attempt keeps what the next one did not do again."""
    ordered = sorted((dataclasses.replace(page) for page in pages), key=lambda page: page.attempt)
    for page, following in pairwise(ordered):
        # A killed attempt's page is seconds old; it came at least to where the next one goes on.
        page.last_step = max(page.last_step, following.first_step)
    kept, lost = 0, 0.0
    for index, page in enumerate(ordered):
        # Steps that any later attempt began before are done again; the earliest of their starts counts.
        again = min([later.first_step for later in ordered[index + 1 :]], default=page.last_step)
        useful = max(0, min(page.last_step, again) - page.first_step)
        kept += useful
        if page.executed:
            lost += page.seconds[STEPS] * (page.executed - useful) / page.executed
    return Account(
        attempts=len(ordered),
        executed=sum(page.executed for page in ordered),
        kept=kept,
        seconds={name: sum(page.seconds[name] for page in ordered) for name in ACCOUNTS},
        lost=lost,
        wall=sum(page.wall for page in ordered),
        ends=tuple(page.ended for page in ordered),
    )


class Ledger:
    """This attempt's page, and those of the attempts before.

    Every rank keeps one; only that of rank 0 (``writes``) is stored. A store that is away costs a line, not a run.
    """

    def __init__(
        self,
        storage: Storage,
        attempt: int,
        world: int,
        *,
        writes: bool,
        started: float,
        previous: Storage | None = None,
    ) -> None:
        """``started`` is when this process began, on the clock of ``time.perf_counter``: start-up counts from there.

        The pages that lie in ``previous`` (another home, of the attempt before) are carried over.
        """
        self._storage = storage
        if writes and previous is not None:
            carry_over(previous, storage)
        self._writes = writes
        self._started = started
        self.page = Page(attempt, world)
        self._over = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._keep_writing, name="ledger", daemon=True)

    def begin(self, step: int) -> None:
        """The attempt goes on from ``step``; what was before it is start-up, less what was accounted for by name."""
        self.page.first_step = self.page.last_step = self.page.saved_step = step
        self.page.seconds[START] = time.perf_counter() - self._started - sum(self.page.seconds.values())
        if self._writes:
            self._thread.start()

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        """Add the block's wall-clock time to an account, less what the block itself gives to others."""
        before, given = time.perf_counter(), sum(self.page.seconds.values())
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - before - (sum(self.page.seconds.values()) - given))

    def add(self, name: str, seconds: float) -> None:
        self.page.seconds[name] += seconds

    def step(self, done: int) -> None:
        """``done`` optimiser steps are finished."""
        self.page.last_step = done

    def saved(self, step: int) -> None:
        """The checkpoint of ``step`` is published."""
        self.page.saved_step = step

    def end(self, how: str) -> None:
        """The attempt ends, in its own words: "finished", or why it leaves."""
        self.page.ended = how
        if self._thread.is_alive():
            self._over.set()
            self._thread.join()

    def account(self) -> Account:
        """All attempts up to now, this one included."""
        self._clock()
        before = [page for page in read_pages(self._storage) if page.attempt < self.page.attempt]
        return account([*before, self.page])

    def _clock(self) -> None:
        self.page.wall = time.perf_counter() - self._started

    def _keep_writing(self) -> None:
        self._write()
        while not self._over.wait(PERIOD_S):
            self._write()
        self._write()

    def _write(self) -> None:
        self._clock()
        try:
            write_page(self._storage, self.page)
            self._failed = False
        except (UserError, StorageUnavailable) as error:
            if not self._failed:
                print(f"ledger       not written: {error}", file=sys.stderr)
            self._failed = True


def write_page(storage: Storage, page: Page) -> None:
    storage.put(f"{PAGES}{page.attempt:04d}.json", canonical_json(dataclasses.asdict(page)))


def carry_over(previous: Storage, home: Storage) -> None:
    """Copy the pages of another home: attempts are numbered through from one home to the next."""
    for page in read_pages(previous):
        write_page(home, page)


def read_pages(storage: Storage) -> list[Page]:
    """The pages of all attempts in a home, oldest first. One that cannot be read is left out."""
    pages = []
    with tempfile.TemporaryDirectory(prefix="ledger-") as temporary:
        for key in storage.list(PAGES):
            try:
                pages.append(Page(**json.loads(storage.get(key, Path(temporary)).read_bytes())))
            except (ValueError, TypeError):
                print(f"ledger       {storage.base}/{key}: not a page of the ledger; left out", file=sys.stderr)
    return sorted(pages, key=lambda page: page.attempt)
