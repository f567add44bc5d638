"""Poisson-sampled Gaussians as a family: error rates bound the noise through the very curve that the accountant proves.

Where a mechanism is a composition of sampled Gaussian releases with unknown noise, refuting the curve of noise multiplier z
shows that the noise is less than z. This is far sharper than counting, as Gaussian DP is for plain Gaussians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedveil.accounting import pld
from fedveil.accounting.formatting import at_most
from fedveil.accounting.lower_bounds import epsilon_at_least
from fedveil.accounting.types import Adjacency, Audit, SampledGaussian, Scope
from fedveil.audit.subject import Floats
from fedveil.audit.two_world import Rates, Repeats, Run, Tradeoff, expected_bounds, midpoint, tradeoff_of_profile


def curve_of(event: SampledGaussian, delta: float, adjacency: Adjacency) -> Tradeoff:
    """The trade-off curve that the accountant proves for this event: refuting it refutes the noise that was charged."""
    releases = [pld.Sampled(event.rate, event.noise_multiplier, event.count)]
    distributions = pld.composed(releases, 1e-3 * delta, adjacency)
    top = max(pld.epsilon(one, 1e-3) for one in distributions)
    grid = np.linspace(0.0, 20.0 if math.isinf(top) else 2 * top + 0.1, 200)
    return tradeoff_of_profile(grid, [max(pld.delta(one, e) for one in distributions) for e in grid])


def largest_noise(counts: Rates, event: SampledGaussian, delta: float, adjacency: Adjacency, alpha: float = 0.05) -> float:
    """An upper confidence bound on the noise multiplier: the least one whose proven curve the counts refute; inf if none.

    Args:
        counts: of a test of runs whose cost is `event` but for its noise multiplier.
        delta: sets the accuracy of the curves. adjacency: of the two worlds. alpha: error probability.
    """

    def refuted(z: float) -> bool:
        return counts.refutes(curve_of(replace(event, noise_multiplier=z), delta, adjacency), alpha)

    low, high = 0.1 * event.noise_multiplier, 100 * event.noise_multiplier
    if not refuted(high):
        return math.inf
    while high > low * 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high


def choose_cut(
    pilots: Sequence[Floats], event: SampledGaussian, n: int, delta: float, adjacency: Adjacency, alpha: float
) -> float:
    """The threshold that promises to refute the least noise in n runs per world, judged on pilot scores."""
    s0, s1 = (np.sort(scores) for scores in pilots)
    points = np.unique(np.concatenate([s0, s1]))
    cuts = (points[:-1] + points[1:]) / 2
    upper = expected_bounds(s0, s1, cuts, n, alpha)
    for factor in np.geomspace(0.3, 100.0, 30):
        curve = curve_of(replace(event, noise_multiplier=factor * event.noise_multiplier), delta, adjacency)
        margins = [curve(p) - q for p, q in zip(*upper, strict=True)]
        if max(margins) > 0:
            return float(cuts[int(np.argmax(margins))])
    return midpoint(s0, s1)


def audit_sampled(
    counts: Rates,
    event: SampledGaussian,
    delta: float,
    scope: Scope,
    alpha: float = 0.05,
    *,
    note: str = "",
    test: str = "two worlds",
) -> Audit:
    """The bound through the noise that the counts leave possible, for a mechanism that costs `event` but for its noise.

    From that noise to epsilon from below: what the accountant would charge for it is an upper bound, and may exceed the truth.
    """
    z = largest_noise(counts, event, delta, scope.adjacency, alpha)
    found = 0.0 if math.isinf(z) else epsilon_at_least(replace(event, noise_multiplier=z), delta, scope.adjacency)
    shown = "no noise is refuted" if math.isinf(z) else f"noise multiplier at most {at_most(z)}"
    remark = f"{shown} (charged: {event.noise_multiplier:.4g})" + (f"; {note}" if note else "")
    return Audit(found, delta, scope, f"{test}, sampled Gaussian curve", 1 - alpha, counts.n0 + counts.n1, note=remark)


def many_sampled_runs(
    run: Run, event: SampledGaussian, scope: Scope, rng: np.random.Generator, repeats: Repeats, *, note: str = ""
) -> Audit:
    """`many_runs` for runs that cost `event` but for their noise."""
    delta, alpha = repeats.delta, repeats.alpha
    cut = choose_cut(repeats.pilots(run, rng), event, repeats.n, delta, scope.adjacency, alpha)
    return audit_sampled(repeats.rates(run, cut, rng), event, delta, scope, alpha, note=note)
