"""ALDP-FL: Gaussian noise truncated to [-b, b], exactly in one dimension and bounded in many.

Shifted by s, the support becomes [s - b, s + b], so outputs above b can come from one data set only. Their probability is a
lower bound on delta for every epsilon.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from fedveil.accounting._numbers import at_least, non_negative, numpy_defaults, positive
from fedveil.accounting.gaussian import classical_noise_multiplier
from fedveil.errors import ConfigError


def claimed_std(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return Delta sqrt(2 ln(1.25 / delta)) / epsilon, for which the paper claims (epsilon, delta) in each iteration.

    Args:
        epsilon: > 0; the textbook formula is proven for epsilon < 1, the paper takes 4. delta: in (0, 1). sensitivity: >= 0.

    Source: ALDP-FL, equation (21).
    """
    return non_negative("sensitivity", sensitivity) * classical_noise_multiplier(epsilon, delta)


@numpy_defaults
def bound_of(epsilon: float, eta: float) -> float:
    """Return b = (e^eps - eta) / (e^eps + eta), the truncation bound of the noise.

    Args:
        epsilon: > 0. eta: in (-1, 1).

    Source: ALDP-FL, equation (3).
    """
    if not -1 < eta < 1:
        raise ConfigError(f"eta must lie strictly between -1 and 1, got {eta}")
    small = eta * math.exp(-positive("epsilon", epsilon))
    return (1 - small) / (1 + small)


def _mass(low: float, high: float, std: float, bound: float) -> float:
    """Return P(low < noise < high) for the truncated noise."""
    low, high = max(low, -bound) / std, min(high, bound) / std
    if low >= high:
        return 0.0
    gap = float(ndtr(-low) - ndtr(-high)) if low > 0 else float(ndtr(high) - ndtr(low))
    return gap / (1 - 2 * float(ndtr(-bound / std)))


@numpy_defaults
def delta_floor(std: float, bound: float, shift: float) -> float:
    """Return the delta that remains for every epsilon: P(noise > b - s), the mass outside the support of the other noise.

    Args:
        std: of the untruncated Gaussian, > 0. bound: b > 0. shift: s >= 0, difference between the two true values.
    """
    std, bound, shift = positive("std", std), positive("bound", bound), non_negative("shift", shift)
    return 1.0 if shift >= 2 * bound else _mass(bound - shift, bound, std, bound)


@numpy_defaults
def delta_1d(std: float, bound: float, shift: float, epsilon: float) -> float:
    """Return the exact delta at epsilon of one coordinate with truncated Gaussian noise.

    The likelihood ratio e^(s x / sigma^2 - s^2 / (2 sigma^2)) grows with x and is infinite beyond b; the worst event is x > x*:
    x* = min(b, max(s - b, sigma^2 eps / s + s / 2)), delta = P(noise > x* - s) - e^eps P(x* < noise < b).

    Args:
        std, bound, shift: as `delta_floor`. epsilon: >= 0.
    """
    std, bound, shift = positive("std", std), positive("bound", bound), non_negative("shift", shift)
    epsilon = non_negative("epsilon", epsilon)
    if shift == 0:
        return 0.0
    if shift >= 2 * bound:
        return 1.0
    start = min(bound, max(shift - bound, std**2 * epsilon / shift + shift / 2))
    below = _mass(start, bound, std, bound)
    return max(0.0, _mass(start - shift, bound, std, bound) - (math.exp(epsilon) * below if below > 0 else 0.0))


@numpy_defaults
def delta_floor_sup(std: float, bound: float, sensitivity: float, dimension: int) -> float:
    """Return an upper bound on the floor over all difference vectors of norm at most `sensitivity`.

    With g(u) = -ln(1 - floor(sqrt(u))) the worst floor is 1 - exp(-sup sum g(u_i)), sum u_i = s^2. For every slope m >= 0 the sum
    is at most d max_u (g(u) - m u) + m s^2 (weak duality); the smallest such value over m is returned, the maximum being taken on
    a fine grid with a margin. The equal spread attains it when its tangent dominates g (small shifts in many dimensions).

    Args:
        std, bound: as `delta_floor`. sensitivity: L2 norm s >= 0. dimension: d >= 1.
    """
    std, bound = positive("std", std), positive("bound", bound)
    sensitivity, dimension = non_negative("sensitivity", sensitivity), at_least("dimension", dimension, 1)
    if sensitivity == 0:
        return 0.0
    if dimension == 1 or sensitivity >= 2 * bound:
        return delta_floor(std, bound, sensitivity)
    equal = sensitivity / math.sqrt(dimension)
    roots = np.unique(np.concatenate([[0.0], np.geomspace(min(equal * 1e-3, sensitivity * 1e-6), sensitivity, 4001), [equal]]))
    floors = [delta_floor(std, bound, float(v)) for v in roots]
    if max(floors) >= 1:  # the noise is so small that the floor of one coordinate is 1 in double precision
        return 1.0
    g = np.array([-math.log1p(-floor) for floor in floors])
    squares = roots**2

    def dual(log_slope: float) -> float:
        slope = math.exp(log_slope)
        return dimension * _peak(g - slope * squares) + slope * sensitivity**2

    position = int(np.searchsorted(roots, equal))
    guess = math.log(max(float(g[position] - g[position - 1]) / float(squares[position] - squares[position - 1]), 1e-300))
    from scipy.optimize import minimize_scalar

    best = minimize_scalar(dual, bounds=(guess - 20, guess + 20), method="bounded", options={"xatol": 1e-10})
    return -math.expm1(-min(float(best.fun), dual(guess)))


def _peak(values: NDArray[np.float64]) -> float:
    """Return the maximum over the grid plus a margin between its points: half the largest step next to the maximum."""
    index = int(np.argmax(values))
    near = values[max(index - 1, 0) : index + 2]
    return float(values[index]) + 0.5 * float(values[index] - near.min())
