"""Epsilon from below: never above the truth where that is known in closed form or by quadrature, and close to it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedveil.accounting import gaussian
from fedveil.accounting.accountant import bound
from fedveil.accounting.attack_power import epsilon_at_least
from fedveil.accounting.subsampled import one_step_delta
from fedveil.accounting.types import Adjacency, SampledGaussian

CASES = [(0.5, 1.0), (0.1, 2.0), (0.01, 1.0), (0.9, 0.3)]


@pytest.mark.parametrize(("q", "z"), CASES)
@pytest.mark.parametrize("delta", [1e-5, 1e-11, 1e-40])
def test_one_release_is_exact(q: float, z: float, delta: float) -> None:
    found = epsilon_at_least(SampledGaussian(q, z, 1), delta, Adjacency.ZERO_OUT)
    assert max(one_step_delta(q, z, found)) >= delta
    assert max(one_step_delta(q, z, found * (1 + 1e-6))) <= delta


def profile(q: float, z: float, epsilon: float, *, replace: bool, remove: bool) -> float:
    """delta of one release by quadrature, at any real epsilon."""
    x = np.linspace(-14 * z - 1, 14 * z + 2, 8_001)
    centres = (0.5, -0.5) if replace else (1.0, 0.0)
    p, q_ = (q * norm.pdf(x, c, z) + (1 - q) * norm.pdf(x, 0, z) for c in centres)
    p, q_ = (p, q_) if remove else (q_, p)
    return float(np.trapezoid(np.maximum(p - math.exp(epsilon) * q_, 0), x))


def two_releases(q: float, z: float, epsilon: float, *, replace: bool, remove: bool) -> float:
    """delta of two releases: the mean over the first loss of the delta that is left to the second."""
    x = np.linspace(-10 * z - 1, 10 * z + 2, 401)
    centres = (0.5, -0.5) if replace else (1.0, 0.0)
    p, q_ = (q * norm.pdf(x, c, z) + (1 - q) * norm.pdf(x, 0, z) for c in centres)
    p, q_ = (p, q_) if remove else (q_, p)
    left = [profile(q, z, epsilon - l, replace=replace, remove=remove) for l in np.log(p / q_)]
    return float(np.trapezoid(p * np.array(left), x))


@pytest.mark.few(1)
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_two_releases_by_quadrature(adjacency: Adjacency) -> None:
    q, z, delta, replace = 0.3, 1.0, 1e-4, adjacency is Adjacency.REPLACE_ONE
    directions = (True,) if replace else (True, False)

    def excess(epsilon: float) -> float:
        return max(two_releases(q, z, epsilon, replace=replace, remove=d) for d in directions) - delta

    found = epsilon_at_least(SampledGaussian(q, z, 2), delta, adjacency)
    assert excess(found) > -1e-3 * delta
    assert excess(1.002 * found) < 0


@pytest.mark.few(6)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize(("q", "z"), CASES)
@pytest.mark.parametrize("count", [3, 50])
def test_just_below_the_accountant_where_that_is_sharp(adjacency: Adjacency, q: float, z: float, count: int) -> None:
    event = SampledGaussian(q, z, count)
    upper = bound([event], 1e-5, accountant="pld", adjacency=adjacency)[0]
    assert 0.99 * upper <= epsilon_at_least(event, 1e-5, adjacency) <= upper


def test_nearly_always_sampled_is_nearly_gaussian() -> None:
    for count, delta in ((4, 1e-5), (30, 1e-11)):
        truth = gaussian.epsilon_of(math.sqrt(count), delta)
        assert epsilon_at_least(SampledGaussian(1.0, 1.0, count), delta, Adjacency.ZERO_OUT) == pytest.approx(truth, rel=1e-8)
        assert 0.99 * truth <= epsilon_at_least(SampledGaussian(1 - 1e-9, 1.0, count), delta, Adjacency.ZERO_OUT) <= truth


@pytest.mark.parametrize("delta", [1e-13, 1e-30, 1e-300])
def test_a_tiny_delta_is_bounded_too(delta: float) -> None:
    """Where FFT cannot tell delta from rounding: at least as much as one of the releases, at most what unsampled ones cost."""
    one, many = (epsilon_at_least(SampledGaussian(0.5, 1.0, n), delta, Adjacency.ZERO_OUT) for n in (1, 10))
    assert 0 < one <= many <= gaussian.epsilon_of(math.sqrt(10), delta)


@pytest.mark.parametrize("event", [SampledGaussian(0.0, 1.0, 5), SampledGaussian(0.5, 1.0, 0), SampledGaussian(1e-6, 1.0, 1)])
def test_nothing_released_is_nothing(event: SampledGaussian) -> None:
    assert epsilon_at_least(event, 1e-5, Adjacency.ZERO_OUT) == 0
