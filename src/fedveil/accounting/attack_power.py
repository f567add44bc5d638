"""Bounds on attacks: the largest true-positive rate under a guarantee, and a lower bound on epsilon for a noise level.

The accountant's bounds are upper bounds, so the epsilon they give for the noise level of an audit may exceed the true one.
Here every error goes the other way. One release has a closed form. For several releases, each loss of the worst pair is
rounded down to a grid, which lowers delta at every epsilon, before and after composition; the mass that truncation and the
FFT may have added is subtracted. A single release also gives a lower bound (post-processing); the larger of the two is returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import scipy
from numpy.typing import NDArray

from fedveil.accounting import gaussian, pld, secret_samples
from fedveil.accounting._numbers import non_negative, numpy_defaults, open_probability, probability
from fedveil.accounting.subsampled import one_step_delta
from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Unbounded, member

_FRACTIONS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.8)
_TAIL = 1e-6


def exact_mu(events: Sequence[Event]) -> float | None:
    """Return the exact mu of the composition if every event is a plain Gaussian release, else None.

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
    """Return the largest true-positive rate under (epsilon, delta)-DP: min(e^eps a + delta, 1 - e^-eps (1 - delta - a), 1).

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
    """Return the largest true-positive rate, at false-positive rate `fpr`, of any test of whether one unit took part.

    The trade-off is exact if all releases are plain Gaussians. Otherwise the smallest of three upper bounds is returned: from
    (epsilon, delta), from further points of the privacy curve, and from the same releases without sampling.

    Args:
        events: the releases that the adversary sees. epsilon, delta: proven for them. adjacency: of their scope.
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


_STEPS_PER_STD = 1000
_LONGEST_SUM = 2**21
_SLACK = 1 - 1e-9
"""Allowance for floating-point error in the losses, the curves and their inversion."""


@numpy_defaults
def epsilon_at_least(event: SampledGaussian, delta: float, adjacency: Adjacency) -> float:
    """Return a lower bound on the epsilon at `delta` of all releases of the event, for their worst pair of neighbours.

    Args:
        event: rate, noise std / sensitivity of the adjacency, and number of releases. delta: in (0, 1).
        adjacency: of the two neighbouring inputs.
    """
    delta, adjacency = open_probability("delta", delta), member(Adjacency, "adjacency", adjacency)
    z = event.noise_multiplier
    if event.count == 0 or event.rate == 0:
        return 0.0
    if event.rate == 1:
        return gaussian.epsilon_of(math.sqrt(event.count) / z, delta) * _SLACK
    bound = _one_release(event.rate, z, delta, adjacency)
    if event.count > 1:
        directions = (None,) if adjacency is Adjacency.REPLACE_ONE else (True, False)
        bound = max(bound, *(_composed(event, delta, direction) for direction in directions))
    return bound * _SLACK


def _one_release(rate: float, z: float, delta: float, adjacency: Adjacency) -> float:
    """Return the exact epsilon of one release, rounded down."""

    def exact(epsilon: float) -> float:
        if adjacency is Adjacency.REPLACE_ONE:
            return float(pld.symmetric_curve(rate, z, np.array([epsilon]), replace=True)[0])
        return max(one_step_delta(rate, z, epsilon))

    return _last_above(exact, delta, gaussian.epsilon_of(1 / z, delta))


def _last_above(curve: Callable[[float], float], delta: float, highest: float) -> float:
    """Return the largest epsilon in [0, highest], rounded down, at which a decreasing curve exceeds delta; 0 if there is none."""
    low, high = 0.0, highest
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > delta else (low, middle)
    return low


def _composed(event: SampledGaussian, delta: float, direction: bool | None) -> float:
    """Return the epsilon of all releases in one direction (remove, add, or None for replace-one), with losses rounded down."""
    release = pld.Sampled(event.rate, event.noise_multiplier, event.count)
    tail = min(1e-3, max(1e-5 * delta, 1e-20))  # below 1e-20, floating-point rounding exceeds the tail
    part = _rounded_down(release, tail, direction)
    low, high = pld.loss_window([part], [event.count], tail)
    if high - low > 2 * _LONGEST_SUM:
        return 0.0
    total = pld.convolve([part], [event.count], (low, high), tail)
    return pld.epsilon(replace(total, infinity=-total.infinity), delta)  # its infinity bounds the numerical error


def _rounded_down(release: pld.Sampled, tail: float, direction: bool | None) -> pld.Pld:
    """Return the losses of one release, each rounded down to the grid; losses below the grid are dropped."""
    rate, z, replace_one = release.rate, release.noise_multiplier, direction is None
    highest = pld.highest_loss(release, tail / release.count)
    spread, std = (pld.loss_spread(release, replace=r) for r in (replace_one, False))
    total = 16 * math.sqrt(release.count) * std + 3 * release.count * std**2
    step = max(spread / _STEPS_PER_STD, 2 * highest / _LONGEST_SUM, total / _LONGEST_SUM)
    last = math.ceil(highest / step)
    if replace_one:
        half = pld.replace_points(rate, z, np.arange(last + 1) * np.float64(step)) / z
        first, points = -last, np.concatenate([-half[:0:-1], half])
        return _masses(step, first, points, [(1 - rate, 0.0), (rate, 0.5 / z)])
    first = max(math.floor(math.log1p(-rate) / step), -last)
    shares = np.maximum(np.expm1(np.arange(first, last + 1) * step) + rate, 0.0) / rate
    points = 0.5 / z + z * np.log(shares, out=np.full_like(shares, -np.inf), where=shares > 0)
    if direction:
        return _masses(step, first, points, [(1 - rate, 0.0), (rate, 1 / z)])
    return _masses(step, -last, -points[::-1], [(1.0, 0.0)])


def _masses(step: float, first: int, points: NDArray[np.float64], mixture: list[tuple[float, float]]) -> pld.Pld:
    """Return the pair whose loss is >= step * (first + i) from points[i] on; P is a mixture of unit normals (weight, mean)."""
    probs = np.zeros_like(points)
    for weight, mean in mixture:
        probs[:-1] += weight * pld.interval_masses(points - mean)
        probs[-1] += weight * float(scipy.special.ndtr(mean - points[-1]))
    return pld.Pld(step, first, probs, 0.0)
