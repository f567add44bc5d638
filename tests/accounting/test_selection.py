"""Private selection: laws of K, exact toy divergences below the bounds, a second library, traps."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.special import logsumexp, ndtr

from fedveil.accounting import accountant
from fedveil.accounting.selection import (
    RandomTries,
    curve_of,
    needed_noise_multiplier,
    selection_bound,
    selection_divergence,
    selection_epsilon,
    selection_rdp,
    tries_of_mean,
    truncation_delta,
)
from fedveil.accounting.subsampled import ORDERS
from fedveil.accounting.types import Adjacency, Gaussian, SampledGaussian
from fedveil.errors import ConfigError

ZERO = Adjacency.ZERO_OUT
laws = st.builds(tries_of_mean, st.sampled_from([-0.9, -0.5, 0.0, 0.5, 1.0, 3.0]), st.floats(1.1, 60))


@given(laws)
@settings(max_examples=40, deadline=None)
def test_probabilities_add_up_and_have_the_mean(law: RandomTries) -> None:
    assume(law.gamma > 1e-4)
    most = int(40 / law.gamma)
    ratios = (1 - law.gamma) * (np.arange(1, most) + law.eta) / np.arange(2, most + 1)
    p = law.probability_of(1) * np.concatenate([[1.0], np.cumprod(ratios)])
    assert p.sum() == pytest.approx(1, rel=1e-9)
    assert p @ np.arange(1, most + 1) == pytest.approx(law.mean, rel=1e-8)
    assert law.probability_of(3) == pytest.approx(p[2], rel=1e-12)
    for k in (0, 1, 7, 50):
        assert law.tail(k) == pytest.approx(p[k:].sum(), rel=1e-8, abs=1e-14)


def log_density_of_the_best(law: RandomTries, mu: float, x: np.ndarray) -> np.ndarray:
    """ln of the density of the largest of K scores N(mu, 1): K's generating function, differentiated."""
    slope = math.log(law.probability_of(1)) - (1 + law.eta) * np.log(law.gamma + (1 - law.gamma) * ndtr(mu - x))
    return slope - (x - mu) ** 2 / 2 - math.log(2 * math.pi) / 2


@pytest.mark.parametrize(
    ("mu", "mean", "eta", "delta", "right", "by_renyi"),
    [
        (0.5, 10, 0.0, 1e-5, 2.938, 3.639),
        (1.0, 10, 0.0, 1e-5, 6.213, 7.410),
        (1.0, 3, 0.0, 1e-5, 5.347, 6.421),
        (0.2, 30, -0.5, 1e-6, 1.253, 1.431),
    ],
)
def test_the_privacy_profile_prices_a_search_below_its_renyi_divergences(
    mu: float, mean: float, eta: float, delta: float, right: float, by_renyi: float
) -> None:
    law = tries_of_mean(eta, mean)
    assert selection_bound(law, [Gaussian(mu)], delta) == (pytest.approx(right, abs=5e-4), "profile")
    assert selection_epsilon(law, curve_of([Gaussian(mu)]), delta) == pytest.approx(by_renyi, abs=5e-4)


@pytest.mark.parametrize("eta", [-0.9, -0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("mean", "mu", "delta"), [(3, 0.5, 1e-5), (10, 1.0, 1e-3), (40, 0.2, 1e-5), (300, 2.0, 1e-4)])
def test_exact_delta_of_a_toy_is_below_the_target_in_both_directions(eta: float, mean: float, mu: float, delta: float) -> None:
    law, x = tries_of_mean(eta, mean), np.linspace(-14, 18, 200_001)
    p, q = (np.exp(log_density_of_the_best(law, shift, x)) for shift in (mu, 0))
    epsilon, _ = selection_bound(law, [Gaussian(mu)], delta)
    exact = [np.maximum(one - math.exp(epsilon) * other, 0).sum() * (x[1] - x[0]) for one, other in ((p, q), (q, p))]
    assert max(exact) <= delta
    assert epsilon > accountant.bound([Gaussian(mu)], delta)[0]


@settings(max_examples=60, deadline=None)
@given(laws, st.lists(st.tuples(st.floats(0.02, 1), st.floats(0.02, 1)), min_size=2, max_size=6), st.floats(0, 2))
def test_profiles_of_enumerated_mechanisms_stay_below_the_theorem(
    law: RandomTries, weights: list[tuple[float, float]], epsilon: float
) -> None:
    """As docs/privacy-theorems.md has it: the forward profile at delta, the reverse one aside."""
    assume(law.gamma > 0.02)
    p, q = (np.array(column) / sum(column) for column in zip(*weights, strict=True))
    odds = law.gamma / (1 - law.gamma)
    for one, other in ((p, q), (q, p)):
        aside = next(
            e for e in np.linspace(0, 20, 4001) if np.maximum(other - math.exp(e) * one, 0).sum() <= odds * math.expm1(e)
        )
        moved = math.exp(epsilon - (1 + law.eta) * aside)
        exact = np.maximum(law_of_best(law, one) - math.exp(epsilon) * law_of_best(law, other), 0).sum()
        assert exact <= law.mean * np.maximum(one - moved * other, 0).sum() + 1e-9


@pytest.mark.parametrize("eta", [-0.5, 0.0, 1.0, 2.0])
@pytest.mark.parametrize(("mean", "mu"), [(3, 0.5), (10, 1.0), (40, 0.2)])
def test_exact_divergence_of_a_toy_stays_below_the_bound_in_both_directions(eta: float, mean: float, mu: float) -> None:
    law, x = tries_of_mean(eta, mean), np.linspace(-14, 18, 200_001)
    p, q = log_density_of_the_best(law, mu, x), log_density_of_the_best(law, 0, x)
    assert np.exp(p).sum() * (x[1] - x[0]) == pytest.approx(1, rel=1e-6)
    orders = np.linspace(1.05, 60, 600)
    bound = selection_rdp(law, orders, orders * mu**2 / 2)
    for i in (10, 30, 80):
        a = orders[i]
        for first, second in ((p, q), (q, p)):
            exact = math.log(np.exp(a * first + (1 - a) * second).sum() * (x[1] - x[0])) / (a - 1)
            assert exact <= bound[i]
    single = orders * mu**2 / 2
    assert np.all(bound > single)


@pytest.mark.parametrize(("eta", "gamma"), [(0.0, 0.027), (1.0, 0.1), (0.5, 0.01)])
def test_epsilon_agrees_with_a_second_library(eta: float, gamma: float) -> None:
    orders = np.concatenate([np.arange(1.1, 12, 0.05), np.arange(12, 90.0)])
    theirs = rdp_privacy_accountant.RdpAccountant(orders=orders)
    inner = dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(5.0)), 60)
    theirs.compose(RepeatAndSelectDpEvent(inner, RandomTries(eta, gamma).mean, eta))
    law = RandomTries(eta, gamma)
    event = SampledGaussian(0.1, 5.0, 60)
    ours = selection_epsilon(law, lambda a: accountant.rdp_curve(event, a, adjacency=ZERO), 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-3)
    assert ours <= theirs.get_epsilon(1e-5) * (1 + 1e-9)


def test_orders_both_ways_and_a_reverse_curve_that_costs_more() -> None:
    law, orders = tries_of_mean(0, 10), np.arange(1.5, 64)
    one = orders * 0.02
    assert np.all(selection_rdp(law, orders, one, 2 * one) > selection_rdp(law, orders, one))
    assert np.all(np.isfinite(selection_rdp(law, orders, one, np.full_like(one, 5.0))))
    with pytest.raises(ConfigError, match="order"):
        selection_rdp(law, orders, one[1:])
    with pytest.raises(ConfigError, match="order"):
        selection_rdp(law, np.array([1.0, 2.0]), np.ones(2))


def test_calibration_meets_its_target_and_is_monotone() -> None:
    law = tries_of_mean(0, 10)
    z = needed_noise_multiplier(law, lambda z: [Gaussian(1 / z)], 2.0, 1e-6)
    costs = [selection_bound(law, [Gaussian(1 / m)], 1e-6)[0] for m in (z, z * 0.999, 2 * z)]
    assert costs[2] < costs[0] <= 2.0 < costs[1]


def test_truncating_the_number_of_tries_is_not_free() -> None:
    law = tries_of_mean(0, 10)
    assert truncation_delta(law, 30, 1.0) == pytest.approx((1 + math.e) * law.tail(30), rel=1e-12)
    assert truncation_delta(law, 30, 1.0) > 0.25
    assert truncation_delta(law, 1000, 1.0) < 1e-9
    assert truncation_delta(law, 1, 1e6) == 1


def test_pure_privacy() -> None:
    law = tries_of_mean(1, 5)
    # randomised response with p = e^eps/(1 + e^eps): the best of K is within 3 eps for the geometric law
    eps = 0.7
    p = math.exp(eps) / (1 + math.exp(eps))
    k = np.arange(1, 4000)
    weights = law.probability_of(1) * np.concatenate([[1.0], np.cumprod(np.full(k.size - 1, 1 - law.gamma))])
    none = [float(weights @ ((1 - q) ** k)) for q in (p, 1 - p)]
    assert abs(math.log(none[0] / none[1])) <= 3 * eps
    for bad in (-1.0, math.nan):
        with pytest.raises(ConfigError, match="eta"):
            RandomTries(bad, 0.1)
    with pytest.raises(ConfigError, match="gamma"):
        RandomTries(0, 1.0)
    with pytest.raises(ConfigError, match="mean number"):
        tries_of_mean(0, 1.0)


def law_of_best(law: RandomTries, p: np.ndarray, most: int | None = None) -> np.ndarray:
    """Of the best of K draws from a few outcomes, the last the best, by enumeration of K; K stops at `most`."""
    k = np.arange(1, 3001)
    ratios = (1 - law.gamma) * (k[:-1] + law.eta) / (k[:-1] + 1)
    weights = law.probability_of(1) * np.concatenate([[1.0], np.cumprod(ratios)])
    if most is not None:
        weights[most - 1] = weights[most - 1 :].sum()
        weights[most:] = 0
    return np.diff([float(weights @ below**k) for below in np.concatenate([[0.0], np.cumsum(p)]).clip(0, 1)])


def renyi(p: np.ndarray, q: np.ndarray, orders: np.ndarray) -> np.ndarray:
    return np.array([logsumexp(a * np.log(p) + (1 - a) * np.log(q)) / (a - 1) for a in orders])


def some_orders() -> np.ndarray:
    return 1 + np.geomspace(0.01, 200, 80)


def test_enumerated_divergences_of_random_mechanisms_stay_below_the_bound() -> None:
    rng, orders = np.random.default_rng(1), some_orders()
    for _ in range(60):
        p, q = (x / x.sum() for x in rng.dirichlet(np.full(4, 0.4), size=2) + 1e-6)
        law = tries_of_mean(float(rng.choice([-0.5, 0, 1, 2])), float(rng.choice([2, 5, 10])))
        exact = renyi(law_of_best(law, p), law_of_best(law, q), orders)
        assert np.all(exact <= selection_rdp(law, orders, renyi(p, q, orders), renyi(q, p, orders)) * (1 + 1e-6) + 1e-9)


def test_a_bound_that_takes_the_reverse_curve_for_the_forward_one_is_no_bound() -> None:
    p, q, orders = np.array([0.91, 0.07, 0.02]), np.array([0.62, 0.06, 0.32]), some_orders()
    law = tries_of_mean(2.0, 10.0)
    exact, forward, reverse = renyi(law_of_best(law, p), law_of_best(law, q), orders), renyi(p, q, orders), renyi(q, p, orders)
    assert np.all(exact <= selection_rdp(law, orders, forward, reverse))
    assert np.max(exact - selection_rdp(law, orders, forward, forward)) > 0.5
    assert np.max(exact - (forward + math.log(law.mean) / (orders - 1))) > 0.5  # nor is one without the price of choosing


def test_a_number_of_runs_that_stops_early_costs_what_the_truncation_says() -> None:
    law, p, q = tries_of_mean(0.0, 10.0), np.array([0.9, 0.1]), np.array([0.7, 0.3])
    epsilon = float(np.max(np.abs(np.log(law_of_best(law, p) / law_of_best(law, q)))))

    def delta(most: int) -> float:
        first, second = law_of_best(law, p, most), law_of_best(law, q, most)
        return max(float(np.maximum(a - math.exp(epsilon) * b, 0).sum()) for a, b in ((first, second), (second, first)))

    for most in (2, 12, 40):  # without the limit delta is 0 here
        assert 1e-4 < delta(most) <= truncation_delta(law, most, epsilon)


def test_several_events_cost_more_than_one_and_a_known_order_agrees_with_the_whole_curve() -> None:
    law, events = tries_of_mean(0, 10), [SampledGaussian(0.1, 8.0, 60), Gaussian(0.05)]
    one, both = (selection_epsilon(law, curve_of(e, ZERO), 1e-5) for e in (events[:1], events))
    assert one < both
    orders = np.array([12.0, 30.0])
    grid = np.concatenate([orders, np.array(ORDERS)])
    expected = selection_rdp(law, grid, curve_of(events, ZERO)(grid))[:2]
    found = [selection_divergence(law, curve_of(events, ZERO), order) for order in orders]
    assert found == pytest.approx(expected, rel=1e-3)
    assert np.all(np.array(found) <= expected * (1 + 1e-12))
