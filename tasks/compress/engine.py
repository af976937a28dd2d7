"""Make a trained network smaller: what is trained next, what it lost, and whether it is taken.

The training itself is the trainer's, between :func:`propose` and :func:`judge`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.artifacts.compression import Compression, Tried
from tasks.artifacts.format import Artifact
from tasks.artifacts.prepared import PreparedData
from tasks.compress.config import CompressionConfig
from tasks.compress.groups import find_groups, united
from tasks.compress.importance import importance, strongest
from tasks.compress.search import best, following, shares_of
from tasks.compress.students import described, students_of
from tasks.errors import UserError
from tasks.gate.quality import UNITS, Loss, in_words, loss_of
from tasks.models.factory import build
from tasks.models.kept import compose, cut
from tasks.models.metrics import HEADLINE
from tasks.models.predict import held_out_rows, predict, targets_of, torch_predictor
from tasks.models.trained import TrainedModel, write_trained


@dataclass(frozen=True)
class Work:
    """What is to be made smaller, from what data, how."""

    method: str
    trained: TrainedModel
    data: PreparedData
    config: CompressionConfig
    #: Of the weights that a student begins with.
    seed: int

    def check(self) -> None:
        """Raise ``UserError`` if the model does not fit the data, or cannot be judged."""
        signature = self.trained.signature
        if signature != self.data.signature:
            raise UserError(
                f"{self.trained.artifact.directory}: this model has other inputs or outputs than the prepared data; "
                "expected the data that it was trained on, or data prepared alike (data.earlier)"
            )
        if signature.task not in UNITS:
            raise UserError(
                f"compression.method: networks for {signature.task} are not made smaller here; expected one for a "
                "classification or a regression"
            )

    def names(self) -> list[str]:
        """Of the candidates, the least compressed first."""
        if self.method == "prune":
            return [f"{100 * share:g} % of the units removed" for share in shares_of(self.config)]
        return [described(differing(student.arguments, self.trained.config.arguments)) for student in self.students()]

    def students(self) -> list[Any]:
        return students_of(self.trained.config, self.trained.signature, self.config)


def differing(arguments: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if others.get(name) != value}


def propose(directory: Path, work: Work, tried: Sequence[Tried], made_by: Mapping[str, Any]) -> Artifact:
    """Write the network that is trained next, with the weights that its training begins with, as a trained model.

    If the search or its time is over, that of one that was trained already. Raises ``UserError``.
    """
    work.check()
    candidate = following(len(work.names()), tried, work.config)
    if work.method == "prune":
        return write_pruned(directory, work, shares_of(work.config)[candidate], made_by)
    student, signature = work.students()[candidate], work.trained.signature
    weights = build(student, signature, work.seed).state_dict()
    return write_trained(directory, config=student, signature=signature, best=weights, last=weights, made_by=made_by)


def write_pruned(directory: Path, work: Work, share: float, made_by: Mapping[str, Any]) -> Artifact:
    """Remove ``share`` of the units of each group: the least important ones."""
    trained = work.trained
    model = trained.load()
    groups = find_groups(model)
    found = importance(model, groups, work.data)
    kept = united([g.kept(strongest(g, of, share)) for g, of in zip(groups, found, strict=True)])
    cut(model.network, kept)
    weights, altogether = model.state_dict(), compose(trained.kept, kept)
    build(trained.config, trained.signature, seed=0, empty=True, kept=altogether)  # refuses what does not run so
    return write_trained(
        directory,
        config=trained.config,
        signature=trained.signature,
        best=weights,
        last=weights,
        made_by=made_by,
        kept=altogether,
    )


def judge(work: Work, tuned: TrainedModel, seconds: float, tried: Sequence[Tried]) -> list[Tried]:
    """``tried`` and what became of the candidate that :func:`propose` wrote for them and that was then trained."""
    candidate = following(len(work.names()), tried, work.config)
    if any(one.candidate == candidate for one in tried):
        return list(tried)
    rows = work.data.split("validation")
    loss = loss_on(work, tuned, rows)
    return [
        *tried,
        Tried(
            candidate,
            work.names()[candidate],
            size_of(tuned),
            loss.value,
            loss.low,
            loss.high,
            loss.rows,
            loss.answer(work.config.max_loss),
            seconds,
        ),
    ]


def loss_on(work: Work, tuned: TrainedModel, rows: np.ndarray) -> Loss:
    """What a smaller network loses against the trained one."""
    signature, most = work.trained.signature, work.config.max_loss
    before, after = (predict(torch_predictor(model.load()), signature, rows) for model in (work.trained, tuned))
    return loss_of(signature.task, targets_of(rows), before, after, most)


def size_of(model: TrainedModel) -> int:
    """Its parameters."""
    return sum(p.numel() for p in model.load().parameters())


def choose(work: Work, tuned: Sequence[TrainedModel], tried: Sequence[Tried]) -> tuple[TrainedModel, Compression]:
    """The model to go on with, and why. ``tuned`` are the trained candidates, of which several may be the same.

    The test rows are looked at once, for the best candidate. One that was asked for is taken whatever it loses.
    """
    config, signature = work.config, work.trained.signature
    metric, _ = HEADLINE[signature.task]
    given = not config.searches(work.method)
    found = Compression(work.method, metric, size_of(work.trained), list(tried))
    winner = tried[0] if given else best(tried, config)
    if winner is None:
        why = f"none of {len(tried)} is shown to lose less than the {config.max_loss:g} {UNITS[signature.task]} allowed"
        return work.trained, replace(found, why=why)
    model = next(model for model in tuned if size_of(model) == winner.parameters)
    loss = loss_on(work, model, held_out_rows(work.data))
    answer, said = loss.answer(config.max_loss), in_words(loss, signature.task, config.max_loss, "test")
    if given or answer == "passed" or (answer == "can't tell" and config.when_in_doubt == "take"):
        doubt = "" if answer == "passed" else " (taken all the same: " + ("it was asked for)" if given else "in doubt)")
        return model, replace(found, taken=winner.name, why=said + doubt)
    return work.trained, replace(found, why=f"{winner.name}: {said}")
