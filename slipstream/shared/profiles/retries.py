"""Number of retries that a stage on spot capacity needs.

Flyte keeps two budgets per task. A *system* failure uses the platform's budget (3 by default; the attempt after the
last system retry runs on demand), a *user* failure uses the task's ``retries``. The preemption of a single pod is a
system failure: it costs no retries and cannot fail the stage. The preemption of a PyTorchJob is a user failure,
whichever pod reports it first: it costs a retry, and the next attempt stays on spot.
"""

from __future__ import annotations

import math

#: Probability that an execution is preempted no more often than it has retries.
ENOUGH = 0.99


def retries_for(preemptions_per_day: float, hours: float, pods: int) -> int:
    """Return the user retries that outlast the preemptions of a stage.

    ``preemptions_per_day`` is the preemption rate of one pod, ``hours`` the time of the stage over all its attempts,
    ``pods`` the number of pods of its job. A preempted pod ends the attempt of all pods. Preemptions are modelled as a
    Poisson process; the result is the 99 % quantile of their number. It is 0 for a single pod.
    """
    if pods == 1:
        return 0
    return poisson_quantile(preemptions_per_day * hours / 24 * pods, ENOUGH)


def poisson_quantile(mean: float, probability: float) -> int:
    """Return the smallest n with P(X <= n) >= ``probability`` for a Poisson variable X of this mean.

    Written out because importing scipy.stats would take longer than all other imports of a registration.
    """
    if mean <= 0:
        return 0
    number, at_most = 0, 0.0
    while True:
        at_most += math.exp(number * math.log(mean) - mean - math.lgamma(number + 1))
        if at_most >= probability:
            return number
        number += 1
