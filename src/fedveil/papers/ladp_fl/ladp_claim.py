"""LaDP-FL: the constant of its Theorem 3, the corrected one, its accountant, and what a data-dependent scale leaks.

A layer gets noise sigma = c Delta / (epsilon P) with an estimate P clipped to B, so in units of Delta at least c / (epsilon B).
Constants are returned as c / B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc, gammaincc, log_softmax

from fedveil.accounting._numbers import at_least, crossing, non_negative, open_probability, positive, probability
from fedveil.accounting.gaussian import delta_of
from fedveil.errors import ConfigError


def constant_as_printed(epsilon: float, delta: float) -> float:
    """c / B of Theorem 3 as printed: too small wherever delta is small.

    (sqrt(s) + sqrt(s + 8 eps)) / 4 with s = ln(2 / (pi delta^2)) for delta <= sqrt(2 / (pi e^4)), else (1 + sqrt(1 + 2 eps)) / 2.

    Args:
        epsilon: > 0. delta: in (0, 1).

    Source: LaDP-FL, Theorem 3, equation (11).
    """
    epsilon, delta = positive("epsilon", epsilon), open_probability("delta", delta)
    if delta > math.sqrt(2 / (math.pi * math.e**4)):
        return (1 + math.sqrt(1 + 2 * epsilon)) / 2
    square = math.log(2 / (math.pi * delta**2))
    return (math.sqrt(square) + math.sqrt(square + 8 * epsilon)) / 4


def constant_corrected(epsilon: float, delta: float) -> float:
    """c / B by the same tail bound without the lost factor: (t + sqrt(t^2 + 2 eps)) / 2, t = max(1, sqrt(ln(2 / (pi delta^2)))).

    With t = c - eps / (2c) the privacy loss exceeds epsilon with probability at most 1 - Phi(t) <= phi(t) / t <= delta / 2.

    Args:
        epsilon: > 0. delta: in (0, 1).
    """
    epsilon, delta = positive("epsilon", epsilon), open_probability("delta", delta)
    tail = max(1.0, math.sqrt(max(0.0, math.log(2 / math.pi) - 2 * math.log(delta))))
    return (tail + math.sqrt(tail * tail + 2 * epsilon)) / 2


def delta_as_printed(epsilon: float, delta: float) -> float:
    """The exact delta at epsilon of noise calibrated to (epsilon, delta) by Theorem 3 as printed, at P = B.

    Args:
        epsilon: > 0. delta: the target, in (0, 1).
    """
    return delta_of(epsilon / constant_as_printed(epsilon, delta), epsilon)


def sufficient_up_to(delta: float) -> float:
    """The epsilon at which the printed constant stops giving (epsilon, delta): below it its other slack makes up for the factor.

    Args:
        delta: in (0, 1). Returns 0 if the constant is never enough and inf if it always is, for epsilon in [1e-6, 1e4].
    """

    def excess(log_epsilon: float) -> float:
        return math.log(max(delta_as_printed(math.exp(log_epsilon), delta), 1e-320) / delta)

    low, high = math.log(1e-6), math.log(1e4)
    if excess(low) > 0:
        return 0.0
    grid = np.linspace(low, high, 400)
    first = next((i for i in range(1, grid.size) if excess(float(grid[i])) > 0), None)
    if first is None:
        return math.inf
    return math.exp(crossing(excess, float(grid[first - 1]), float(grid[first])))


def claimed_total(epsilon: float, delta: float, rounds: int, rate: float) -> tuple[float, float]:
    """The paper's sequential accountant: (q T epsilon, q T delta); a claim, since its first-order amplification is not a theorem.

    Args:
        epsilon, delta: per round. rounds: T. rate: q = batch size / local data size, in [0, 1].

    Source: LaDP-FL, Section XIII, equations (17) to (19).
    """
    weight = probability("rate", rate) * at_least("rounds", rounds, 0)
    return weight * non_negative("epsilon", epsilon), weight * probability("delta", delta)


def sensitivity_theorem2(learning_rate: float, epochs: int, clip: float) -> float:
    """2 eta E G_c, the sensitivity that Theorem 2 states; it counts epochs where steps count (pass steps to be right).

    Source: LaDP-FL, Theorem 2, equation (9).
    """
    return 2 * positive("learning_rate", learning_rate) * at_least("epochs", epochs, 1) * positive("clip", clip)


def scale_leak_delta(dimension: int, ratio: float, epsilon: float) -> float:
    """delta at epsilon of N(0, I) against N(0, ratio^2 I) in `dimension` coordinates: what the noise scale ALONE gives away.

    The likelihood ratio depends on ||x||^2, a chi-square variable, so both directions are exact; the larger is returned.

    Args:
        dimension: coordinates that share the scale, >= 1. ratio: of the two standard deviations, > 0. epsilon: >= 0.
    """
    dimension, ratio, epsilon = at_least("dimension", dimension, 1), positive("ratio", ratio), non_negative("epsilon", epsilon)
    ratio = max(ratio, 1 / ratio)
    if ratio == 1:
        return 0.0
    spread, excess = dimension * math.log(ratio), -math.expm1(-2 * math.log(ratio)) / 2
    inner, outer = (spread - epsilon) / excess, (spread + epsilon) / excess
    half = dimension / 2
    narrow = (
        float(gammainc(half, inner / 2)) - _weighted(epsilon, float(gammainc(half, inner / (2 * ratio**2)))) if inner > 0 else 0.0
    )
    wide = float(gammaincc(half, outer / (2 * ratio**2))) - _weighted(epsilon, float(gammaincc(half, outer / 2)))
    return max(narrow, wide, 0.0)


def _weighted(epsilon: float, probability: float) -> float:
    """e^epsilon times a probability, 0 where that underflows."""
    return math.exp(epsilon + math.log(probability)) if probability > 0 else 0.0


def softmax_kl(first: Sequence[float] | NDArray[np.float64], second: Sequence[float] | NDArray[np.float64]) -> float:
    """KL divergence in nats between the softmax of two flat weight vectors: the paper's privacy estimate before clipping to B.

    Source: LaDP-FL, Algorithm 3.
    """
    p, q = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if p.shape != q.shape or p.ndim != 1 or not (np.all(np.isfinite(p)) and np.all(np.isfinite(q))):
        raise ConfigError(f"two finite flat vectors of one length are needed, got shapes {p.shape} and {q.shape}")
    log_p, log_q = log_softmax(p), log_softmax(q)
    return max(0.0, float(np.exp(log_p) @ (log_p - log_q)))
