"""What held a training back: of each attempt what was observed, and the verdict over all of them.

Nothing is computed from it, and no other artifact depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass

DATA, COMMUNICATION, STRAGGLER, LAUNCH = "data", "communication", "straggler", "launch"
THROTTLED, CHECKPOINT, EVALUATION, LATE_PODS = "throttled", "checkpoint", "evaluation", "late pods"
CAUSES = (DATA, COMMUNICATION, STRAGGLER, LAUNCH, THROTTLED, CHECKPOINT, EVALUATION, LATE_PODS)
#: Longer than any training, in seconds.
LONGEST_S = 1e10
#: No cause, but other work on the same processors.
CONTENDED = "contended"


@dataclass(frozen=True)
class Observed:
    """What one attempt observed while it trained."""

    #: Wall-clock seconds of its steps, with all waits between them, its evaluations and what checkpoints stopped.
    seconds: float
    steps: int
    #: Mean over the ranks of the seconds of all steps, by phase.
    phases: dict[str, float]
    #: Seconds that would have gone with each of :data:`CAUSES`.
    lost: dict[str, float]
    #: What each cause is seen by, as part of a sentence.
    evidence: dict[str, str]
    #: The largest share of the steps' time for which a rank waited for a processor.
    waited_for_processor: float
    #: Of the exchange of gradients: bytes of a rank, and the least seconds that every rank waited for it in a step.
    exchanged_bytes: int = 0
    least_exchange_s: float = 0.0
    #: Whether the model was divided: then communication and straggler cannot be told apart.
    divided: bool = False


@dataclass(frozen=True)
class Bottleneck:
    """The verdict over all attempts at a training."""

    #: The largest of :data:`CAUSES`, :data:`CONTENDED`, or empty.
    verdict: str
    #: In a sentence: the figures, what a step would take without it, and what to try.
    sentence: str
    #: The share of the training's time, 0 to 1, that would go with each cause that has one.
    shares: dict[str, float]
    #: The share of the training's time in which the devices computed and that no cause took.
    useful: float
    #: How many times as fast it would be without the verdict's cause; 1 without one.
    gain: float
    #: Causes below the verdict's threshold that are worth a look, the largest first.
    also: list[str]
    seconds: float
    steps: int
    phases: dict[str, float]
    #: As in :class:`Observed`, of the longest attempt.
    exchanged_bytes: int = 0
    least_exchange_s: float = 0.0

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for figures that no training has."""
        if not (0 < self.seconds < LONGEST_S and 0 <= self.useful <= 1 and 1 <= self.gain < LONGEST_S):
            raise ValueError("seconds above 0, a useful share of 0 to 1 and a gain of at least 1 expected")
        if not all(0 <= value < LONGEST_S for value in (*self.phases.values(), *self.shares.values())):
            raise ValueError("phases and shares of at least 0 expected")
        if not (0 <= self.least_exchange_s < LONGEST_S and 0 <= self.exchanged_bytes < LONGEST_S * 1e6):
            raise ValueError("bytes and seconds of an exchange of at least 0 expected")

    @property
    def saved_s(self) -> float:
        """Seconds that would go with the verdict's cause; late pods' come before the training's own."""
        return self.seconds * ((self.gain - 1) if self.verdict == LATE_PODS else (1 - 1 / self.gain))
