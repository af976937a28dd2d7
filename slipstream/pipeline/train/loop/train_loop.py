"""Training loop: steps, evaluations, checkpoints and early stopping, on all ranks.

The host enqueues steps on the device ahead of time and collects their results later, so the device never waits for the
host. A step whose loss or gradient is non-finite changes nothing (:mod:`slipstream.pipeline.train.loop.step`). After
too many such steps in a row, training rolls back to the last checkpoint before them and omits the batches since that
checkpoint: replaying them would lead to the same weights. Training fails if there is no checkpoint since the previous
rollback.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.pipeline.train.checkpoint.manager import RestoredCheckpoint
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch, stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.device_clock import StepProfiler
from slipstream.pipeline.train.documents import document_layout, kernel_takes_documents
from slipstream.pipeline.train.fault_tolerance.goodput import EVALUATED
from slipstream.pipeline.train.fault_tolerance.guard import Guard, StepTiming
from slipstream.pipeline.train.loop.evaluation import agree_on_rows, record_evaluation
from slipstream.pipeline.train.loop.optimizer import learning_rate
from slipstream.pipeline.train.loop.progress import ProgressDisplay
from slipstream.pipeline.train.loop.state import SKIPPED, USED, TrainingState
from slipstream.pipeline.train.loop.step import StepResult, micro_batches, name_rows, padded_rows, train_step
from slipstream.pipeline.train.telemetry.marks import StepMarks
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.ledger import EVALUATION
from slipstream.shared.artifacts.results.training import LiveProgress, LossPoint, RollbackRange, ValidationPoint
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.distributed.user_errors import AgreedUserError, ErrorMeaning, error_meaning
from slipstream.shared.errors import Agreed
from slipstream.shared.logs import logger

HISTORY_POINTS = 200
#: Maximum steps in flight on the device before the host waits for the oldest. It is constant on all devices, because
#: all ranks must collect the same results between the same steps.
IN_FLIGHT = 2

LOG = logger("train")
#: Function that restores the newest checkpoint of a step from ``least`` to ``most`` (its arguments); returns None if
#: there is none.
Restore = Callable[[int, int], RestoredCheckpoint | None]
#: Callback that receives all evaluations of the run and returns True to stop training.
Told = Callable[[Sequence[ValidationPoint]], bool]


class Stopped(Agreed):
    """Raised if the ``told`` callback stopped training early; no model is written."""


class RanOutOfMemory(Exception):
    """Raised on this rank if a step ran out of memory, with torch's message; the step is not repeated."""


class EnqueuedStep(NamedTuple):
    """Step in flight; reading its results waits for the device."""

    step: int
    #: Rows of this rank's batch.
    rows: int
    #: Losses of :class:`~slipstream.pipeline.train.loop.step.StepResult`, followed by its outcome.
    result: Iterable[Tensor]
    timing: StepTiming


class TooManySkipped(Exception):
    """Raised if too many steps in a row were skipped; ``step`` is the last of them."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


class TrainLoop:
    """Training from ``state.progress.step`` to the last epoch or to early stopping."""

    def __init__(
        self,
        state: TrainingState,
        data: PreparedData,
        config: TrainingConfig,
        group: RankContext,
        precision: str,
        guard: Guard,
        profiler: StepProfiler | None = None,
    ) -> None:
        self._state = state
        self._data = data
        self._config = config
        self._group = group
        #: Group of the data-parallel ranks, with this rank's position in it.
        self._data_group = state.parallel.sharing_rows(group)
        self._precision = precision
        self._guard = guard
        self._profiler = profiler
        self._told: Told | None = None
        self._order = GlobalOrder(stored_blocks(data, "train"), config.rows_per_step, config.seed)
        self._total_steps = self._order.steps_per_epoch * config.epochs
        self._log_every = max(1, self._total_steps // HISTORY_POINTS)
        self._in_flight: deque[EnqueuedStep] = deque()
        #: Number of consecutive skipped steps up to the last collected result.
        self._skipped_in_a_row = 0
        self._display = ProgressDisplay(self._total_steps, state.progress.step, self._order.consumed, shown=False)

    def run(self, restore: Restore, sampled: Path | None = None, told: Told | None = None) -> None:
        """Train to the end.

        Rank 0 shows the progress, with its pod's device utilisation from ``sampled``. It calls ``told`` after every
        evaluation; either all ranks pass ``told`` or none.

        Raises ``AgreedUserError`` on all ranks if losses or gradients stay non-finite, ``Preempted`` if a machine is
        preempted, :class:`Stopped` on all ranks if ``told`` returns True before the end, and :class:`RanOutOfMemory` on
        this rank only.
        """
        self._told = told
        self._display = ProgressDisplay(
            self._total_steps,
            self._state.progress.step,
            self._order.consumed,
            shown=self._group.rank == 0,
            sampled=sampled,
        )
        with self._profiler or nullcontext():
            while not self._is_over():
                try:
                    self._train()
                except TooManySkipped as skipped:
                    self._roll_back(skipped.step, restore)
        self._display.close()

    def so_far(self) -> LiveProgress:
        """Return the live progress; other threads may call this.

        It waits for no device or rank, so the newest history points are this rank's losses only.
        """
        progress, pending = self._state.progress, list(self._state.pending_points)
        steps = list(progress.steps)
        known = steps[-1].step if steps else 0
        steps += [self._point(step, loss / rows) for step, (loss, rows) in pending if rows and step > known]
        return LiveProgress(
            progress.step, self._total_steps, len(progress.skipped), steps, list(progress.evaluations), progress.best
        )

    def _point(self, step: int, loss: float) -> LossPoint:
        config = self._config
        rate = learning_rate(step - 1, self._total_steps, config.learning_rate, config.warmup, config.schedule)
        return LossPoint(step, self._epoch(step), loss, rate)

    def _is_over(self) -> bool:
        progress = self._state.progress
        return progress.stopped_early or (progress.step >= self._total_steps and not self._evaluation_due())

    def _train(self) -> None:
        """Train until training ends; raise :class:`TooManySkipped` on all ranks."""
        progress = self._state.progress
        with closing(self._batches()) as batches:
            while not self._is_over():
                if not self._evaluation_due():
                    self._enqueue_step(next(batches))
                    self._collect_results(keep_in_flight=IN_FLIGHT)
                if self._evaluation_due():
                    self._complete_history()
                    self._evaluate()
                if not self._is_over():
                    self._guard.after_step(progress.step, self._capture)
                self._display.step(progress.step)
            self._complete_history()

    def _roll_back(self, step: int, restore: Restore) -> None:
        """Roll back to the last checkpoint before the skipped steps, and continue after ``step``.

        Raises ``AgreedUserError`` if there is no checkpoint since the previous rollback.
        """
        while self._in_flight:
            enqueued = self._in_flight.popleft()
            self._guard.finished(enqueued.step, enqueued.timing)
        progress = self._state.progress
        least = progress.left_out[-1].through + 1 if progress.left_out else 0
        restored = restore(least, step - self._skipped_in_a_row)
        if restored is None:
            steps = "step" if self._skipped_in_a_row == 1 else f"{self._skipped_in_a_row} steps in a row, the last"
            raise AgreedUserError(
                f"training.learning_rate: the loss or its gradient became non-finite in {steps} "
                f"{step}{self._bad_rows()}, and there is no checkpoint to roll back to; try less than "
                f"{self._config.learning_rate:g}, a longer training.warmup, or training.clip_norm above 0"
            )
        skipped = progress.skipped
        self._state.apply(restored, self._group)
        progress = self._state.progress
        after = progress.step
        progress.skipped += [one for one in skipped if one.step > after]
        progress.left_out.append(RollbackRange(after, through=step))
        progress.step, self._skipped_in_a_row = step, 0
        if self._group.rank == 0:
            LOG.warning("training rolls back to step %d, and continues without steps %d to %d", after, after + 1, step)

    def _bad_rows(self) -> str:
        """Return the rows that caused the last skipped step, as part of a sentence."""
        skipped = self._state.progress.skipped[-1]
        by_themselves = f"rows {', '.join(map(str, skipped.rows))} of the training split cause it"
        return f" ({by_themselves if skipped.rows else 'no single row causes it: history.json lists the batch'})"

    def _batches(self) -> Generator[Batch, None, None]:
        order, group = self._order, self._data_group
        padded = padded_rows(-(-order.largest // group.world), self._config.micro_batches)
        pieces = micro_batches(padded, self._config.micro_batches)
        whole = self._state.traits.has_batch_statistics
        kernel = kernel_takes_documents(group.device, self._precision) and not whole
        model = self._state.parallel.model_parts[0]
        return training_batches(
            self._data,
            order,
            group,
            order.consumed(self._state.progress.step),
            padded=0 if whole else padded,
            waiting=self._guard.waiting,
            times=self._guard.times.loader,
            documents=document_layout(model, pieces[0].stop, len(pieces), kernel=kernel),
            augment=self._config.augment,
        )

    def _epoch(self, step: int) -> float:
        return step / self._order.steps_per_epoch

    def _evaluation_due(self) -> bool:
        """Return True if the last step still needs an evaluation, perhaps one interrupted in the previous attempt."""
        progress = self._state.progress
        every = self._config.evaluate_every or self._order.steps_per_epoch
        due = progress.step > 0 and (progress.step % every == 0 or progress.step == self._total_steps)
        return due and (not progress.evaluations or progress.evaluations[-1].step < progress.step)

    def _evaluate(self) -> None:
        state = self._state
        epoch = self._epoch(state.progress.step)
        with self._guard.recorder.time(EVALUATION):
            record_evaluation(state, self._data, self._config, self._data_group, self._precision, epoch, self._guard)
        self._guard.recorder.event(EVALUATED)
        self._display.evaluated(state.progress.step, state.progress.evaluations[-1])
        if self._told and self._stops(self._told) and not self._is_over():
            raise Stopped(f"stopped at step {state.progress.step}")

    def _stops(self, told: Told) -> bool:
        """Call ``told`` on rank 0 and broadcast its answer.

        No checkpoint contains the evaluation until this call has returned. If the attempt is interrupted before, the
        next attempt repeats evaluation and call.
        """
        stops = self._group.rank == 0 and told(self._state.progress.evaluations)
        agreed = torch.tensor(stops, dtype=torch.int32, device=self._group.device)
        dist.broadcast(agreed, src=0)
        return bool(agreed)

    def _enqueue_step(self, batch: Batch) -> None:
        progress = self._state.progress
        start = self._guard.before_step()
        result = self._step(batch, start)
        progress.step += 1
        scalars = copied_to_host([*result.losses, result.outcome])
        timing = self._guard.enqueued(start, batch.wait)
        self._in_flight.append(EnqueuedStep(progress.step, batch.rows, scalars, timing))
        if self._profiler:
            self._profiler.step()

    def _step(self, batch: Batch, marks: StepMarks) -> StepResult:
        """Run a step; on lack of memory, free its tensors and raise :class:`RanOutOfMemory` on this rank only."""
        try:
            return train_step(
                self._state, self._config, self._data_group, self._precision, batch, self._total_steps, marks
            )
        except (RuntimeError, MemoryError) as error:
            if error_meaning(error) is not ErrorMeaning.MEMORY:
                raise
            reason = str(error) or type(error).__name__
        raise RanOutOfMemory(reason)

    def _collect_results(self, keep_in_flight: int = 0) -> None:
        """Wait until at most ``keep_in_flight`` steps are in flight, and record results of finished steps."""
        state = self._state
        while len(self._in_flight) > keep_in_flight:
            step, rows, result, timing = self._in_flight.popleft()
            self._guard.finished(step, timing)
            self._guard.times.samples += rows
            *losses, outcome = map(float, result)
            if outcome == USED and state.parallel.counts_losses:
                state.loss_sums[0] += sum(losses)
                state.loss_sums[1] += rows
            if step % self._log_every == 0 or step == self._total_steps:
                state.pending_points.append((step, state.loss_sums))
                state.loss_sums = [0.0, 0.0]
            self._skipped_in_a_row = self._skipped_in_a_row + 1 if outcome == SKIPPED else 0
            if self._skipped_in_a_row:
                self._record_skipped(step)

    def _record_skipped(self, step: int) -> None:
        state, order = self._state, self._order
        state.progress.skipped.append(
            name_rows(step, state.parallel, self._data, order, self._config, self._precision, self._data_group)
        )
        if self._group.rank == 0:
            LOG.warning("training skips step %d: its loss or gradient is non-finite%s", step, self._bad_rows())
        if self._skipped_in_a_row > self._config.skip_nonfinite:
            raise TooManySkipped(step)

    def _complete_history(self) -> None:
        """Collect all results, and add the pending points to the history.

        A point is the mean loss since the previous point; it is omitted if all steps were skipped. Many points are
        summed over the ranks in one exchange, which takes as long as a small step.
        """
        self._collect_results()
        state = self._state
        if not state.pending_points:
            return
        mine = torch.tensor(
            [losses for _, losses in state.pending_points], dtype=torch.float64, device=self._group.device
        )
        gathered = [torch.empty_like(mine) for _ in range(self._group.world)]
        dist.all_gather(gathered, mine)
        sums = sum(gathered[1:], gathered[0]).tolist()
        for (step, _), (loss, rows) in zip(state.pending_points, sums, strict=True):
            if rows:
                state.progress.steps.append(self._point(step, loss / rows))
        state.pending_points.clear()

    def _capture(self) -> tuple[dict[str, object], dict[str, object]] | None:
        """Return the state for a checkpoint (see :data:`.Capture`).

        Returns None while steps are being skipped, as the weights may be the cause.
        """
        self._collect_results()
        if not self._state.progress.evaluation_rows:
            agree_on_rows(self._state, self._group.device)
        return None if self._skipped_in_a_row else (self._state.to_save(), self._state.rank_state())


def copied_to_host(scalars: Sequence[Tensor]) -> Iterable[Tensor]:
    """Return copies on the host, which are complete once the device has finished the work enqueued so far."""
    if not scalars[-1].is_cuda:
        return scalars
    together = torch.stack([each.double() for each in scalars])
    return torch.empty_like(together, device="cpu", pin_memory=True).copy_(together, non_blocking=True)
