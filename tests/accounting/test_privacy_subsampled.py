"""Poisson sampling: exact integrals, a second library, simulation, and the adjacency that upstream gets wrong."""

from __future__ import annotations

import logging
import math

import dp_accounting
import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant, privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid
from scipy.stats import norm

from fedveil.accounting import pld
from fedveil.accounting.gaussian import delta_of, epsilon_of
from fedveil.accounting.subsampled import ORDERS, epsilon_pld, epsilon_rdp, one_step_delta, rdp
from fedveil.accounting.types import Adjacency
from fedveil.errors import ConfigError

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
rates = st.floats(1e-4, 1)
noises = st.floats(0.3, 20)
logging.getLogger("absl").setLevel(logging.ERROR)


def renyi(rate: float, z: float, order: float) -> float:
    with mp.workdps(30):
        q, s = mp.mpf(rate), mp.mpf(z)

        def integrand(x: mp.mpf) -> mp.mpf:
            return mp.npdf(x, 0, s) * (1 - q + q * mp.exp((2 * x - 1) / (2 * s * s))) ** order

        return float(mp.log(mp.quad(integrand, [-14 * s, 0, 0.5, 1, order, order + 14 * s])) / (order - 1))


@pytest.mark.few(2)
@pytest.mark.parametrize(("rate", "z"), [(0.01, 1.0), (0.1, 0.5), (0.5, 3.0), (0.3, 20.0)])
@pytest.mark.heavy
def test_renyi_divergence_equals_the_integral_at_integer_and_real_orders(rate: float, z: float) -> None:
    orders = [1.0078125, 1.6, 2.0, 6.25, 17.0]
    assert rdp(rate, z, orders, adjacency=ZERO) == pytest.approx([renyi(rate, z, a) for a in orders], rel=1e-9)


@pytest.mark.parametrize(("rate", "z", "order"), [(0.1, 0.1, 100.0), (0.5, 0.3, 300.0), (0.01, 0.45, 65.0), (0.2, 2.0, 500.0)])
def test_replace_one_renyi_divergence_at_large_orders_by_a_finer_sum(rate: float, z: float, order: float) -> None:
    x = np.linspace(-0.5 - 14 * z, order + 14 * z, 1_500_001)
    up, down = (np.logaddexp(math.log1p(-rate), math.log(rate) + (s * x - 0.25) / (2 * z * z)) for s in (1, -1))
    terms = -x * x / (2 * z * z) + order * up + (1 - order) * down
    total = terms.max() + math.log(np.exp(terms - terms.max()).sum() * (x[1] - x[0]) / (z * math.sqrt(2 * math.pi)))
    assert rdp(rate, z, [order], adjacency=REPLACE)[0] == pytest.approx(total / (order - 1), rel=1e-9)


@pytest.mark.parametrize(
    ("rate", "z", "order"), [(0.1, 0.04, 1 + 2**-9), (0.01, 0.02, 1.01), (0.5, 0.045, 1.2), (0.3, 1.0, 1 + 2**-12)]
)
def test_with_little_noise_or_near_order_one_the_renyi_divergence_lies_little_above_the_integral(
    rate: float, z: float, order: float
) -> None:
    exact, ours = renyi(rate, z, order), rdp(rate, z, [order], adjacency=ZERO)[0]
    hidden = rate * order / (2 * z * z)  # as if it were seen who takes part, at order 1
    assert exact <= ours <= (hidden * 1.001 if z == 1 else min(1.3 * exact, 0.999 * order / (2 * z * z)))
    assert rdp(rate, z, [order], adjacency=REPLACE)[0] <= ours


@pytest.mark.parametrize(
    ("rate", "z", "count", "delta", "step"),
    [(0.05, 0.0309, 1500, 1e-6, 0.5), (0.1, 0.0309, 120, 1e-5, 0.1), (0.25, 0.02, 3, 1e-3, 0.1)],
)
def test_with_little_noise_epsilon_lies_little_above_that_of_a_second_library(
    rate: float, z: float, count: int, delta: float, step: float
) -> None:
    one = privacy_loss_distribution.from_gaussian_mechanism(z, sampling_prob=rate, value_discretization_interval=step)
    theirs = one.self_compose(count).get_epsilon_for_delta(delta)
    assert theirs <= epsilon_rdp(rate, z, count, delta, adjacency=ZERO) <= 1.1 * theirs


def test_one_step_delta_by_integration_both_ways() -> None:
    x = np.linspace(-12, 13, 400_001)
    base = norm.pdf(x)
    for rate, mu, epsilon in ((0.1, 1.0, 0.5), (0.1, 1.0, 0.05), (0.6, 2.0, 0.7), (0.9, 0.5, 0.1)):
        mixed = (1 - rate) * base + rate * norm.pdf(x, mu)
        remove = trapezoid(np.maximum(mixed - math.exp(epsilon) * base, 0), x)
        add = trapezoid(np.maximum(base - math.exp(epsilon) * mixed, 0), x)
        assert one_step_delta(rate, 1 / mu, epsilon) == pytest.approx((remove, add), rel=1e-5, abs=1e-9)
    assert one_step_delta(1, 2, 0.4) == pytest.approx((delta_of(0.5, 0.4),) * 2, rel=1e-12)
    assert one_step_delta(0, 2, 0.4) == (0, 0)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rate", "z", "count", "delta"),
    [(0.01, 1.0, 1000, 1e-5), (0.1, 1.0, 60, 1e-5), (0.1, 0.5, 20, 1e-5), (0.5, 10.0, 300, 1e-8), (0.2, 2.0, 1, 1e-5)],
)
@pytest.mark.heavy
def test_loss_distributions_agree_with_a_second_library(rate: float, z: float, count: int, delta: float) -> None:
    accountant = pld_privacy_accountant.PLDAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(z)), count)
    reference = accountant.get_epsilon(delta)
    assert epsilon_pld(rate, z, count, delta, adjacency=ZERO) == pytest.approx(reference, rel=1e-3)


def test_loss_distributions_of_the_plain_gaussian_equal_the_exact_curve_from_above() -> None:
    for mu, count, delta in ((0.1, 50, 1e-5), (0.5, 4, 1e-6), (3.0, 1, 1e-5)):
        exact = epsilon_of(mu * math.sqrt(count), delta)
        for adjacency in (ZERO, REPLACE, None):
            bound = epsilon_pld(1, 1 / mu, count, delta, adjacency=adjacency)
            assert exact * (1 - 1e-9) <= bound <= exact * 1.002


def test_simulated_sampled_mechanism_has_the_computed_delta() -> None:
    """20 rounds, q = 0.2, z = 1.2: the mean of (1 - e^(eps - loss))_+ over simulated outputs; 2/3 of the noise must not fit."""
    rng, rate, z, rounds, epsilon = np.random.default_rng(7), 0.2, 1.2, 20, 1.5
    trials = 200_000

    def simulated(noise: float) -> tuple[float, float]:
        loss = np.zeros(trials)
        for _ in range(rounds):
            x = (rng.random(trials) < rate) + noise * rng.standard_normal(trials)
            loss += np.log(1 - rate + rate * np.exp((2 * x - 1) / (2 * noise**2)))
        values = np.maximum(-np.expm1(epsilon - loss), 0)
        return float(values.mean()), float(values.std() / math.sqrt(trials))

    remove, _ = pld.composed([pld.Sampled(rate, z, rounds)], 1e-9, ZERO)
    computed = pld.delta(remove, epsilon)
    mean, error = simulated(z)
    assert abs(computed - mean) < 4 * error
    assert error < 0.02 * mean
    wrong, error = simulated(z * 2 / 3)
    assert abs(computed - wrong) > 20 * error


def replace_pair(rate: float, z: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mixtures with opposite contributions at distance 1 (C = 1/2) on a fine grid, as masses."""
    x = np.linspace(-0.5 - 9 * z, 0.5 + 9 * z, 20_001)
    step = x[1] - x[0]
    base = (1 - rate) * norm.pdf(x, 0, z)
    return (base + rate * norm.pdf(x, 0.5, z)) * step, (base + rate * norm.pdf(x, -0.5, z)) * step, x


@pytest.mark.parametrize(("rate", "z"), [(0.1, 0.5), (0.01, 1.0), (0.5, 2.0), (0.9, 0.4)])
def test_replace_one_bound_is_that_of_opposite_contributions_composed_three_times(rate: float, z: float) -> None:
    p, q, _ = replace_pair(rate, z)
    loss, step = np.log(p / q), 0.002
    cells = np.floor(loss / step).astype(int)  # rounded down: a lower bound on the true delta
    law = np.bincount(cells - cells.min(), weights=p)
    threefold = np.convolve(np.convolve(law, law), law)
    losses = step * (3 * cells.min() + np.arange(threefold.size))
    (bound,) = pld.composed([pld.Sampled(rate, z, 3)], 1e-10, REPLACE)
    for epsilon in (0.0, 0.05, 0.3, 1.0, 2.0):
        lower = float(threefold @ np.maximum(-np.expm1(epsilon - losses), 0))
        upper = float(threefold @ np.maximum(-np.expm1(epsilon - losses - 3 * step), 0))
        assert lower <= pld.delta(bound, epsilon) + 1e-12
        assert pld.delta(bound, epsilon) <= upper * 1.01 + 1e-9


@given(st.floats(0.01, 0.99), st.floats(0.4, 3), st.floats(0, 3), st.floats(0, 0.5), st.floats(-0.5, 0.5), st.floats(-0.5, 0.5))
@settings(max_examples=40, deadline=None)
def test_replace_one_curve_covers_any_two_contributions_in_the_plane(
    rate: float, z: float, epsilon: float, first: float, a: float, b: float
) -> None:
    """One contribution at (first, 0), the other at (a, b) if inside the ball of radius C = 1/2; two dimensions by quadrature."""
    if math.hypot(a, b) > 0.5:
        return
    axis = np.linspace(-0.5 - 7 * z, 0.5 + 7 * z, 301)
    x, y = np.meshgrid(axis, axis)

    def density(u: float, v: float) -> np.ndarray:
        return np.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * z * z)) / (2 * math.pi * z * z)

    p = (1 - rate) * density(0, 0) + rate * density(first, 0)
    q = (1 - rate) * density(0, 0) + rate * density(a, b)
    exact = float(np.maximum(p - math.exp(epsilon) * q, 0).sum() * (axis[1] - axis[0]) ** 2)
    curve = float(pld.symmetric_curve(rate, z, np.array([epsilon]), replace=True)[0])
    assert exact <= curve + 2e-4
    assert curve <= float(pld.symmetric_curve(rate, z, np.array([epsilon]), replace=False)[0]) * (1 + 1e-12)


def test_replace_one_is_not_the_four_times_too_small_value_of_upstream_issue_378() -> None:
    """Unsampled, replacing doubles the sensitivity: with std s C the Renyi divergence is 4 a / (2 s^2), and so is ours."""
    s, order = 1.7, 5.0
    assert rdp(1, s / 2, [order], adjacency=REPLACE)[0] == pytest.approx(4 * order / (2 * s * s))
    assert epsilon_pld(1, s / 2, 1, 1e-5, adjacency=REPLACE) == pytest.approx(epsilon_of(2 / s, 1e-5), rel=2e-3)


@given(st.floats(0.01, 0.9), st.floats(0.4, 3), st.integers(1, 30))
@settings(max_examples=25, deadline=None)
def test_replacing_costs_at_least_removing_half_as_far_and_at_most_removing_as_far(rate: float, z: float, count: int) -> None:
    """A contribution may be replaced by zero (distance C = 1/2): a lower bound; the curve for every adjacency: an upper bound."""
    replaced = epsilon_pld(rate, z, count, 1e-5, adjacency=REPLACE)
    assert epsilon_pld(rate, 2 * z, count, 1e-5, adjacency=ZERO) <= replaced * 1.002 + 1e-6
    assert replaced <= epsilon_pld(rate, z, count, 1e-5) * 1.002 + 1e-6
    orders = [1.3, 3.0, 20.0]
    assert np.all(rdp(rate, 2 * z, orders, adjacency=ZERO) <= rdp(rate, z, orders, adjacency=REPLACE) * (1 + 1e-9))
    assert np.all(rdp(rate, z, orders, adjacency=REPLACE) <= rdp(rate, z, orders) * (1 + 1e-9))


def test_remove_direction_alone_would_not_cover_replacement() -> None:
    """At negative epsilon (needed by composition) the replaced pair is above the remove pair's curve: why we symmetrise."""
    rate, z = 0.1, 0.5
    p, q, _ = replace_pair(rate, z)
    ratio = 0.7
    replaced = float(np.maximum(p - ratio * q, 0).sum())
    removed = ratio * one_step_delta(rate, z, -math.log(ratio))[1] + 1 - ratio
    symmetric = ratio * float(pld.symmetric_curve(rate, z, np.array([-math.log(ratio)]), replace=True)[0]) + 1 - ratio
    assert removed < replaced - 1e-4
    assert replaced == pytest.approx(symmetric, abs=1e-7)


@given(rates, noises, st.sampled_from([ZERO, REPLACE, None]))
@settings(max_examples=60, deadline=None)
def test_renyi_curve_is_monotone_and_ordered(rate: float, z: float, adjacency: Adjacency | None) -> None:
    orders = [1.05, 1.5, 2.0, 8.0, 33.0]
    curve = rdp(rate, z, orders, adjacency=adjacency)
    assert np.all(np.diff(curve) >= -1e-15)
    assert np.all(rdp(rate, z * 1.1, orders, adjacency=adjacency) <= curve * (1 + 1e-9) + 1e-15)
    assert np.all(curve <= np.array(orders) / (2 * z * z) * (1 + 1e-12))
    assert np.all(rdp(rate, z, orders, adjacency=ZERO) <= rdp(rate, z, orders) * (1 + 1e-9))


@pytest.mark.parametrize("adjacency", [ZERO, REPLACE, None])
def test_renyi_divergence_by_its_integral_over_epsilon(adjacency: Adjacency | None) -> None:
    """M(a) = 1 + a (a-1) int over epsilon > 0 of (e^((a-1) eps) + e^(-a eps)) delta(eps), for curves equal in both directions."""
    rate, z = 0.2, 1.5
    eps = np.linspace(0, 25, 100_001)
    curve = pld.symmetric_curve(rate, z, eps, replace=adjacency is REPLACE)
    for order in (1.5, 4.0):
        weight = np.exp((order - 1) * eps) + np.exp(-order * eps)
        direct = math.log1p(order * (order - 1) * trapezoid(weight * curve, eps)) / (order - 1)
        ours = rdp(rate, z, [order], adjacency=adjacency)[0]
        if adjacency is ZERO:
            assert ours < direct * 0.999
        else:
            assert ours == pytest.approx(direct, rel=1e-6)


def test_symmetric_curves_by_integration() -> None:
    for rate, z in ((0.1, 0.5), (0.01, 1.0), (0.9, 2.0), (0.6, 0.3)):
        p, q, _ = replace_pair(rate, z)
        for epsilon in (0.0, 0.01, 0.3, 1.0, 3.0):
            exact = float(np.maximum(p - math.exp(epsilon) * q, 0).sum())
            curve = float(pld.symmetric_curve(rate, z, np.array([epsilon]), replace=True)[0])
            assert curve == pytest.approx(exact, rel=1e-4, abs=1e-10)
            both = pld.symmetric_curve(rate, z, np.array([epsilon]), replace=False)[0]
            assert both == pytest.approx(max(one_step_delta(rate, z, epsilon)), rel=1e-10)


def test_a_million_rounds_and_extremes() -> None:
    assert epsilon_rdp(0.001, 1, 10**6, 1e-5, adjacency=ZERO) == pytest.approx(6.5008, abs=2e-3)
    assert epsilon_pld(0.001, 1, 10**6, 1e-5, adjacency=ZERO) < 6.1
    assert epsilon_rdp(0, 1, 10**6, 1e-5) == 0
    assert epsilon_pld(0.5, 1, 0, 1e-5) == 0
    assert np.all(np.isfinite(rdp(0.9, 0.06, ORDERS)))
    assert np.all(rdp(1e-9, 500, ORDERS) >= 0)
    for bad in ((1.1, 1), (-0.1, 1), (0.1, 0), (0.1, math.nan), (math.nan, 1)):
        with pytest.raises(ConfigError):
            rdp(*bad, [2.0])
    with pytest.raises(ConfigError):
        rdp(0.1, 1, [1.0])
