from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from fedveil.accounting import gaussian
from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.audit.canaries import (
    Guesses,
    audit_one_run,
    audit_one_run_gdp,
    ceiling,
    choose_guesses,
    epsilon_bound,
    guess,
    mu_bound,
    p_value,
    simulate_gaussian,
    symmetric_grid,
)
from fedveil.errors import ConfigError

SCOPE = Scope(Unit.RECORD, Adjacency.ZERO_OUT, View.AGGREGATE)
DELTA = 1e-5


def test_guessing_by_hand() -> None:
    scores = [5.0, 1.0, 4.0, 2.0, 3.0]
    coins = [True, False, False, True, True]
    assert guess(scores, coins, 2, 1) == Guesses(5, 3, 2)
    assert guess(scores, coins, 1, 0) == Guesses(5, 1, 1)
    assert guess(scores, coins, 0, 2) == Guesses(5, 2, 1)


@pytest.mark.parametrize(("r", "expected"), [(50, 2.8), (100, 3.5), (200, 4.2), (1000, 5.8)])
def test_ceilings(r: int, expected: float) -> None:
    assert ceiling(r) == pytest.approx(expected, abs=0.05)
    assert epsilon_bound(Guesses(2000, r, r), 0.0) == pytest.approx(ceiling(r), abs=1e-3)


def _p_value_by_loops(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    rate = 1 / (1 + math.exp(-epsilon))
    mass = [binom.pmf(i, r, rate) for i in range(r + 1)]
    tail = sum(mass[v:])
    extra = max((sum(mass[max(v - i, 0) : v]) / i for i in range(1, v + 1)), default=0.0)
    return min(1.0, tail + 2 * m * delta * extra)


@given(st.integers(1, 40), st.data(), st.floats(0, 6), st.sampled_from([0.0, 1e-5, 1e-2]))
def test_p_value_against_a_direct_sum(r: int, data: st.DataObject, epsilon: float, delta: float) -> None:
    v = data.draw(st.integers(0, r))
    assert p_value(Guesses(60, r, v), epsilon, delta) == pytest.approx(
        _p_value_by_loops(60, r, v, epsilon, delta), rel=1e-7, abs=1e-12
    )


def test_bounds_at_delta_zero_invert_the_binomial() -> None:
    bound = epsilon_bound(Guesses(500, 200, 150), 0.0)
    rate = 1 / (1 + math.exp(-bound))
    assert binom.sf(149, 200, rate) == pytest.approx(0.05, abs=1e-4)


@given(st.integers(1, 60), st.data())
def test_more_right_guesses_never_lower_a_bound(r: int, data: st.DataObject) -> None:
    v = data.draw(st.integers(0, r - 1))
    assert epsilon_bound(Guesses(100, r, v), DELTA) <= epsilon_bound(Guesses(100, r, v + 1), DELTA)
    assert mu_bound(Guesses(100, r, v)) <= mu_bound(Guesses(100, r, v + 1))


def _bounds(mu: float, k: tuple[int, int], repeats: int, m: int = 1000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(11)
    found = [guess(*simulate_gaussian(m, mu, rng), *k) for _ in range(repeats)]
    return (
        np.array([epsilon_bound(one, DELTA) for one in found]),
        np.array([gaussian.epsilon_of(mu_bound(one), DELTA) for one in found]),
    )


@pytest.mark.parametrize(
    ("epsilon", "k", "counted", "through_mu"), [(2, (50, 50), 0.70, 1.01), (4, (50, 50), 1.49, 2.24), (8, (75, 75), 2.92, 4.69)]
)
def test_tightness_near_the_reference(epsilon: float, k: tuple[int, int], counted: float, through_mu: float) -> None:
    by_count, by_curve = _bounds(gaussian.mu_of(epsilon, DELTA), k, 60)
    assert by_count.mean() == pytest.approx(counted, rel=0.15)
    assert by_curve.mean() == pytest.approx(through_mu, rel=0.15)


def test_one_run_of_a_thousand_canaries_at_epsilon_four() -> None:
    by_count, _ = _bounds(gaussian.mu_of(4.0, DELTA), (38, 37), 1)
    assert 0.8 <= by_count[0] <= 2.5


def test_half_the_noise_is_refuted() -> None:
    _, by_curve = _bounds(2 * gaussian.mu_of(4.0, DELTA), (75, 75), 20)
    assert np.mean(by_curve > 4) > 0.9
    _, honest = _bounds(gaussian.mu_of(4.0, DELTA), (75, 75), 20)
    assert np.all(honest < 4)


def test_number_of_guesses_comes_from_a_simulation() -> None:
    mu, rng = gaussian.mu_of(4.0, DELTA), np.random.default_rng(0)
    k = choose_guesses(
        lambda g: simulate_gaussian(1000, mu, g), symmetric_grid(1000), lambda one: epsilon_bound(one, DELTA), rng, runs=5
    )
    assert 50 <= sum(k) <= 300


def test_audits_carry_their_terms() -> None:
    scores, coins = simulate_gaussian(1000, 1.0, np.random.default_rng(0))
    found = guess(scores, coins, 50, 50)
    plain, curve = audit_one_run(found, DELTA, SCOPE), audit_one_run_gdp(found, DELTA, SCOPE)
    assert plain.n == curve.n == 1000
    assert plain.rigorous
    assert plain.epsilon < curve.epsilon


def test_bad_guesses_are_refused() -> None:
    with pytest.raises(ConfigError):
        Guesses(10, 5, 6)
    with pytest.raises(ConfigError):
        guess([1.0, 2.0], [True, False], 2, 1)
    with pytest.raises(ConfigError):
        guess([1.0, math.nan], [True, False], 1, 1)
