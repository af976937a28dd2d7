"""Bottleneck of a training: measurements of every attempt, and the diagnosis over all of them.

Nothing is computed from it, and no other artifact depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

DATA, COMMUNICATION, STRAGGLER, LAUNCH = "data", "communication", "straggler", "launch"
THROTTLED, CHECKPOINT, EVALUATION, LATE_PODS = "throttled", "checkpoint", "evaluation", "late pods"
CAUSES = (DATA, COMMUNICATION, STRAGGLER, LAUNCH, THROTTLED, CHECKPOINT, EVALUATION, LATE_PODS)
#: Longer than any training, in seconds.
LONGEST_S = 1e10
#: Not a cause: other work on the same processors.
CONTENDED = "contended"


@dataclass(frozen=True)
class Observed:
    """Measurements of one attempt while it trained."""

    #: Wall-clock seconds of its steps with the waits between them, its evaluations and the pauses for checkpoints.
    seconds: float
    steps: int
    #: Seconds of all steps by phase, averaged over the ranks.
    phases: dict[str, float]
    #: Seconds that would be saved, by cause (:data:`CAUSES`).
    lost: dict[str, float]
    #: Evidence of every cause, as part of a sentence.
    evidence: dict[str, str]
    #: Largest share of the steps' time for which a rank waited for a processor.
    waited_for_processor: float
    #: Exchange of gradients: bytes of a rank, and the least seconds per step for which every rank waited for it.
    exchanged_bytes: int = 0
    least_exchange_s: float = 0.0
    #: Whether the model was divided; communication and straggler are then indistinguishable.
    divided: bool = False


@dataclass(frozen=True)
class Bottleneck:
    """Diagnosis over all attempts at a training."""

    #: The largest of :data:`CAUSES`, :data:`CONTENDED`, or empty.
    verdict: str
    #: Sentence with the figures, a step's time without the cause, and a remedy to try.
    sentence: str
    #: Share of the training's time, 0 to 1, that every present cause costs.
    shares: dict[str, float]
    #: Share of the training's time in which the devices computed and no cause took time.
    useful: float
    #: Speedup of the training without the diagnosed cause; 1 if there is none.
    gain: float
    #: Causes below the threshold that are worth a look, the largest first.
    also: list[str]
    seconds: float
    steps: int
    phases: dict[str, float]
    #: As in :class:`Observed`, of the longest attempt.
    exchanged_bytes: int = 0
    least_exchange_s: float = 0.0

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for impossible figures."""
        if not (0 < self.seconds < LONGEST_S and 0 <= self.useful <= 1 and 1 <= self.gain < LONGEST_S):
            raise ValueError("expected seconds above 0, a useful share of 0 to 1 and a gain of at least 1")
        if not all(0 <= value < LONGEST_S for value in (*self.phases.values(), *self.shares.values())):
            raise ValueError("expected phases and shares of at least 0")
        if not (0 <= self.least_exchange_s < LONGEST_S and 0 <= self.exchanged_bytes < LONGEST_S * 1e6):
            raise ValueError("expected bytes and seconds of an exchange of at least 0")

    @property
    def saved_s(self) -> float:
        """Seconds saved without the diagnosed cause; those of late pods precede the training's own."""
        return self.seconds * ((self.gain - 1) if self.verdict == LATE_PODS else (1 - 1 / self.gain))
