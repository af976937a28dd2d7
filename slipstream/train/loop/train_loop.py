"""The training loop: steps, evaluations, checkpoints and early stopping. All ranks run it in parallel.

The host gives the device its steps ahead of time and reads their results later, so the device never waits for it. A
step whose loss or gradient is non-finite changes nothing (:mod:`slipstream.train.loop.step`). After too many of them in
a row training rolls back to the last checkpoint from before them and continues without the batches since: replayed, the
same batches would lead to the same weights. If there is no checkpoint since the last time, it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.results.training import LeftOut, LossPoint
from slipstream.distributed.agreement import AgreedUserError
from slipstream.distributed.process_group import Group
from slipstream.logs import logger
from slipstream.train.checkpoint import Restored
from slipstream.train.config import TrainingConfig
from slipstream.train.data.loader import Batch, layout, training_batches
from slipstream.train.data.order import GlobalOrder
from slipstream.train.fault_tolerance.goodput import EVALUATION
from slipstream.train.fault_tolerance.guard import Guard
from slipstream.train.loop.evaluation import record_evaluation
from slipstream.train.loop.nonfinite import name_rows
from slipstream.train.loop.progress import ProgressReport
from slipstream.train.loop.state import TrainingState
from slipstream.train.loop.step import padded_rows, train_step
from slipstream.train.metrics.profiler import StepProfiler
from slipstream.train.optim.precision import SKIPPED, USED
from slipstream.train.optim.schedule import learning_rate

HISTORY_POINTS = 200
#: Steps that the device has at most been given before the host waits for the oldest. The same on all devices and at
#: all times, because all ranks have to read the same results between the same steps.
AHEAD = 2

LOG = logger("train")
#: Restores the newest checkpoint of a step from ``least`` to ``most``, if there is one.
Restore = Callable[[int, int], Restored | None]


class GivenStep(NamedTuple):
    """A step that the device was given, and what it leaves on the host once it is finished."""

    step: int
    #: The rows of this rank's share.
    rows: int
    #: Of :class:`~slipstream.train.loop.step.StepResult` the losses, then the outcome.
    result: Iterable[Tensor]


class TooManySkipped(Exception):
    """More steps in a row were skipped than may be; the last of them is ``step``."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class TrainLoop:
    """The steps from ``state.progress.step`` to the end of the last epoch or to early stopping."""

    def __init__(
        self,
        state: TrainingState,
        data: PreparedData,
        config: TrainingConfig,
        group: Group,
        precision: str,
        guard: Guard,
        profiler: StepProfiler | None = None,
    ) -> None:
        self._state = state
        self._data = data
        self._config = config
        self._group = group
        #: The place among the ranks that divide the rows among themselves.
        self._rows_of = state.parallel.sharing_rows(group)
        self._precision = precision
        self._guard = guard
        self._profiler = profiler
        self._order = GlobalOrder(layout(data, "train"), config.batch_size, config.seed)
        self._total = self._order.steps_per_epoch * config.epochs
        self._log_every = max(1, self._total // HISTORY_POINTS)
        self._given: deque[GivenStep] = deque()
        #: Steps in a row that were skipped, up to the last that is finished.
        self._streak = 0
        self.report = ProgressReport(self._total, state.progress.step, shown=group.rank == 0)

    def run(self, restore: Restore) -> None:
        """Train to the end. Raises ``AgreedUserError`` on all ranks if losses or gradients stay non-finite, and
        ``Preempted`` when a machine is preempted."""
        with self._profiler or nullcontext():
            while not self.over():
                try:
                    self.go_on()
                except TooManySkipped as found:
                    self.roll_back(found.step, restore)
        self.report.close()

    def over(self) -> bool:
        progress = self._state.progress
        return progress.stopped_early or (progress.step >= self._total and not self._evaluation_due())

    def go_on(self) -> None:
        """Train to the end. Raises :class:`TooManySkipped` on all ranks."""
        progress = self._state.progress
        with closing(self._batches()) as batches:
            while not self.over():
                if not self._evaluation_due():
                    self._give_step(next(batches))
                    self._finish(leave=AHEAD)
                if self._evaluation_due():
                    self._settle()
                    self._evaluate()
                if not self.over():
                    self._guard.after_step(progress.step, self._capture)
                self.report.step(progress.step)
            self._settle()

    def roll_back(self, step: int, restore: Restore) -> None:
        """Roll back to the last checkpoint from before the steps that were skipped, up to ``step``, and continue with
        the next one. Raises ``AgreedUserError`` if there is none since this last happened."""
        while self._given:
            self._guard.finished(self._given.popleft().step)
        progress = self._state.progress
        least = progress.left_out[-1].through + 1 if progress.left_out else 0
        restored = restore(least, step - self._streak)
        if restored is None:
            raise AgreedUserError(self._cause(step))
        skipped = progress.skipped
        self._state.apply(restored, self._group)
        progress = self._state.progress
        after = progress.step
        progress.skipped += [one for one in skipped if one.step > after]
        progress.left_out.append(LeftOut(after, through=step))
        progress.step, self._streak = step, 0
        if self._group.rank == 0:
            LOG.warning("rolls back to step %d, and continues without steps %d to %d", after, after + 1, step)

    def _cause(self, step: int) -> str:
        steps = "step" if self._streak == 1 else f"{self._streak} steps in a row, the last"
        return (
            f"training.learning_rate: the loss or its gradient became non-finite in {steps} {step}{self._rows()}, and "
            f"there is no checkpoint to roll back to; try less than {self._config.learning_rate:g}, a longer "
            "training.warmup, or training.clip_norm above 0"
        )

    def _rows(self) -> str:
        """The rows that the last skipped step was skipped for, as part of a sentence."""
        skipped = self._state.progress.skipped[-1]
        by_themselves = f"rows {', '.join(map(str, skipped.rows))} of the training split by themselves"
        return f" ({by_themselves if skipped.rows else 'no row of its batch by itself: history.json has them'})"

    def _batches(self) -> Generator[Batch, None, None]:
        order, group = self._order, self._rows_of
        dependent = self._state.traits.has_batch_statistics
        return training_batches(
            self._data,
            order,
            group,
            order.consumed(self._state.progress.step),
            padded=0 if dependent else padded_rows(-(-order.largest // group.world), self._config.accumulation),
            waiting=self._guard.waiting,
        )

    def _epoch(self, step: int) -> float:
        return step / self._order.steps_per_epoch

    def _evaluation_due(self) -> bool:
        """Whether the last step still needs its evaluation, which the previous attempt may have interrupted."""
        progress = self._state.progress
        every = self._config.evaluate_every or self._order.steps_per_epoch
        due = progress.step > 0 and (progress.step % every == 0 or progress.step == self._total)
        return due and (not progress.evaluations or progress.evaluations[-1].step < progress.step)

    def _evaluate(self) -> None:
        state = self._state
        epoch = self._epoch(state.progress.step)
        with self._guard.recorder.time(EVALUATION):
            record_evaluation(state, self._data, self._config, self._rows_of, self._precision, epoch, self._guard)
        self.report.evaluated(state.progress.step, state.progress.evaluations[-1])

    def _give_step(self, batch: Batch) -> None:
        """Give the device the next step."""
        state, progress = self._state, self._state.progress
        began = self._guard.before_step()
        result = train_step(state, self._config, self._rows_of, self._precision, batch, self._total)
        progress.step += 1
        self._given.append(GivenStep(progress.step, batch.rows, on_host([*result.losses, result.outcome])))
        self._guard.given(began, batch.wait)
        if self._profiler:
            self._profiler.step()

    def _settle(self) -> None:
        """Finish all steps, and complete the history."""
        self._finish()
        self._add_points()

    def _finish(self, leave: int = 0) -> None:
        """Wait until the device has finished all steps but ``leave``, and take in their results."""
        while len(self._given) > leave:
            given = self._given.popleft()
            self._guard.finished(given.step)
            *losses, outcome = map(float, given.result)
            if outcome == USED and self._state.parallel.counts_losses:
                self._state.losses[0] += sum(losses)
                self._state.losses[1] += given.rows
            if given.step % self._log_every == 0 or given.step == self._total:
                self._state.points.append((given.step, self._state.losses))
                self._state.losses = [0.0, 0.0]
            self._streak = self._streak + 1 if outcome == SKIPPED else 0
            if self._streak:
                self._skipped(given.step)

    def _skipped(self, step: int) -> None:
        state, order = self._state, self._order
        state.progress.skipped.append(
            name_rows(step, state.parallel, self._data, order, self._config, self._precision, self._rows_of)
        )
        if self._group.rank == 0:
            LOG.warning("skips step %d: its loss or gradient is non-finite%s", step, self._rows())
        if self._streak > self._config.skip_nonfinite:
            raise TooManySkipped(step)

    def _add_points(self) -> None:
        """Add the pending points to the history: mean losses since the point before, unless all steps were skipped.

        The ranks exchange many points at once, as one takes as long as a small step, and add them up in rank order, so
        that the sums do not depend on which points came together.
        """
        state = self._state
        if not state.points:
            return
        mine = torch.tensor([losses for _, losses in state.points], dtype=torch.float64, device=self._group.device)
        everyones = [torch.empty_like(mine) for _ in range(self._group.world)]
        dist.all_gather(everyones, mine)
        sums = sum(everyones[1:], everyones[0]).tolist()
        for (step, _), (loss, rows) in zip(state.points, sums, strict=True):
            rate = learning_rate(step - 1, self._total, self._config.learning_rate, self._config.warmup)
            if rows:
                state.progress.steps.append(LossPoint(step, self._epoch(step), loss / rows, rate))
        state.points.clear()

    def _capture(self) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """What a checkpoint holds; None amid skipped steps, as the weights may be their cause."""
        self._finish()
        return None if self._streak else (self._state.to_save(), self._state.own())


def on_host(scalars: Sequence[Tensor]) -> Iterable[Tensor]:
    """Copies that are on the host once the device has come here."""
    if not scalars[-1].is_cuda:
        return scalars
    together = torch.stack([each.double() for each in scalars])
    return torch.empty_like(together, device="cpu", pin_memory=True).copy_(together, non_blocking=True)
