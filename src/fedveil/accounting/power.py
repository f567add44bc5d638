"""What a guarantee means for an attacker: the largest true-positive rate at a given false-positive rate."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedveil.accounting import gaussian, pld, secret_samples
from fedveil.accounting._check import non_negative, numpy_defaults, probability
from fedveil.accounting.types import Adjacency, Event, Gaussian, Unbounded

_FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8)
_TAIL = 1e-6


def exact_mu(events: Sequence[Event]) -> float | None:
    """mu of the composition when every event is a plain Gaussian release (then exact), else None.

    Source: Dong, Roth & Su 2022, Corollary 3.3.
    """
    squares = []
    for event in events:
        if isinstance(event, Gaussian):
            squares.append(event.count * event.mu**2)
        elif isinstance(event, Unbounded) or secret_samples.rate_of(event) < 1:
            return None
        else:
            squares.append(event.count * secret_samples.unsampled_mu(event) ** 2)
    return math.sqrt(math.fsum(squares))


@numpy_defaults
def tpr_of(epsilon: float, delta: float, fpr: float) -> float:
    """Largest true-positive rate that (epsilon, delta)-DP leaves: min(e^eps a + delta, 1 - e^-eps (1 - delta - a), 1).

    Args:
        epsilon: >= 0, inf allowed. delta: in [0, 1]. fpr: a, in [0, 1].

    Source: Wasserman & Zhou 2010; Kairouz, Oh & Viswanath 2015, Theorem 2.1.
    """
    delta, fpr = probability("delta", delta), probability("fpr", fpr)
    if math.isinf(epsilon):
        return 1.0
    epsilon = non_negative("epsilon", epsilon)
    rising = math.exp(epsilon) * fpr + delta if epsilon < 700 else math.inf
    return max(fpr, min(1.0, rising, 1 - math.exp(-epsilon) * max(0.0, 1 - delta - fpr)))


@numpy_defaults
def largest_tpr(
    events: Sequence[Event], epsilon: float, delta: float, fpr: float, *, adjacency: Adjacency | None = None
) -> float:
    """Largest true-positive rate of any test of whether one unit took part, at false-positive rate `fpr`.

    The exact trade-off where all releases are plain Gaussians; otherwise the best of what (epsilon, delta), further points of the
    privacy curve, and the same releases without sampling leave. Each of them is an upper bound.

    Args:
        events: the releases that the adversary sees. epsilon, delta: proven of them. adjacency: of their scope.
    """
    if math.isinf(epsilon):
        return 1.0
    mu = exact_mu(events)
    if mu is not None:
        return gaussian.tpr(mu, fpr)
    mu, sampled = secret_samples.split(events)
    releases = secret_samples.releases(mu, sampled)
    unsampled = math.sqrt(mu**2 + math.fsum(count * secret_samples.unsampled_mu(s) ** 2 for s, count in sampled.items()))
    best = min(tpr_of(epsilon, delta, fpr), gaussian.tpr(unsampled, fpr))
    if not releases or not pld.is_cheap(releases, _TAIL):
        return best
    pairs = pld.composed(releases, _TAIL, adjacency)
    points = [epsilon * fraction for fraction in _FRACTIONS]
    return min([best, *(tpr_of(e, max(pld.delta(pair, e) for pair in pairs), fpr) for e in points)])
