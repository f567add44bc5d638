from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from fedveil.accounting import gaussian
from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.audit.two_world import (
    Rates,
    Repeats,
    audit_curve,
    audit_dp,
    audit_gdp,
    choose_threshold,
    many_runs,
    midpoint,
    rates,
    tradeoff_of_profile,
)
from fedveil.errors import ConfigError

SCOPE = Scope(Unit.RECORD, Adjacency.ZERO_OUT, View.AGGREGATE)
DELTA = 1e-5


def test_counting_by_hand() -> None:
    assert rates([0, 1, 2], [1, 2, 3, 4], 1.0) == Rates(1, 3, 1, 4)


def test_threshold_of_separated_pilots_lies_between_them() -> None:
    assert 1 < choose_threshold([0.0, 1.0], [5.0, 6.0], 100, DELTA) < 5
    assert midpoint([0.0, 2.0], [5.0, 7.0]) == 3.5


@pytest.mark.parametrize(
    ("epsilon", "n", "through_mu", "counted"),
    [
        (1, 500, 0.15, 0.04),
        (1, 5000, 0.72, 0.31),
        (2, 1000, 1.31, 0.49),
        (4, 1000, 3.20, 1.29),
        (4, 5000, 3.64, 1.80),
        (8, 1000, 6.99, 2.69),
    ],
)
def test_expected_bounds_for_a_gaussian(epsilon: float, n: int, through_mu: float, counted: float) -> None:
    """Expected counts at the midpoint (mu) and at the best threshold (Clopper-Pearson); counts rounded."""
    mu = gaussian.mu_of(epsilon, DELTA)
    error = round(n * ndtr(-mu / 2))
    middle = Rates(error, n, error, n)
    assert audit_gdp(middle, DELTA, SCOPE).epsilon == pytest.approx(through_mu, abs=0.006)
    cuts = np.linspace(-3, mu + 4, 2000)
    best = max(Rates(round(n * ndtr(-t)), n, round(n * ndtr(t - mu)), n).epsilon(DELTA) for t in cuts)
    assert best == pytest.approx(counted, abs=0.02)


def test_missing_noise_is_refuted_and_enough_noise_is_not() -> None:
    mu, rng = gaussian.mu_of(2.0, DELTA), np.random.default_rng(0)
    for factor, refuted in [(0.5, 50), (0.7, 40), (1.0, 0)]:
        shift = mu / factor
        found = [rates(rng.standard_normal(1000), shift + rng.standard_normal(1000), shift / 2) for _ in range(50)]
        count = sum(audit_gdp(counts, DELTA, SCOPE).epsilon > 2 for counts in found)
        assert count <= 1 if refuted == 0 else count >= refuted * 0.6


def test_gaussian_conversion_overstates_where_the_curve_is_not_gaussian() -> None:
    """Randomised response with epsilon = 1: a sound mu becomes a wrong epsilon: the caller must say the curve is Gaussian."""
    wrong = 1 / (1 + math.e)
    counts = Rates(round(20000 * wrong), 20000, round(20000 * wrong), 20000)
    assert audit_dp(counts, 0.0, SCOPE).epsilon < 1
    assert audit_gdp(counts, DELTA, SCOPE).epsilon > 3


def test_curve_of_a_profile_matches_the_gaussian_curve() -> None:
    epsilons = np.linspace(0, 12, 2000)
    curve = tradeoff_of_profile(epsilons, [gaussian.delta_of(1.3, e) for e in epsilons])
    for fpr in (1e-4, 0.01, 0.2, 0.5, 0.9):
        exact = float(ndtr(ndtri(1 - fpr) - 1.3))
        assert curve(fpr) == pytest.approx(exact, abs=1e-4)
        assert curve(fpr) <= exact + 1e-12


def test_general_curve_agrees_with_the_gaussian_test_and_is_sharper_than_counting() -> None:
    mu, n = gaussian.mu_of(4.0, DELTA), 1000
    counts = Rates(round(n * ndtr(-mu / 2)), n, round(n * ndtr(-mu / 2)), n)

    def family(epsilon: float) -> object:
        member = gaussian.mu_of(epsilon, DELTA)
        return lambda fpr: float(ndtr(ndtri(1 - fpr) - member))

    general = audit_curve(counts, family, DELTA, SCOPE)  # type: ignore[arg-type]
    assert general.epsilon == pytest.approx(audit_gdp(counts, DELTA, SCOPE).epsilon, abs=1e-3)
    assert general.epsilon > 2 * counts.epsilon(DELTA)


def test_curve_of_a_claim_that_holds_is_not_refuted() -> None:
    counts = Rates(300, 1000, 300, 1000)
    epsilons = np.linspace(0, 10, 400)
    claim = tradeoff_of_profile(epsilons, [gaussian.delta_of(1.2, e) for e in epsilons])
    false = tradeoff_of_profile(epsilons, [gaussian.delta_of(0.6, e) for e in epsilons])
    assert not counts.refutes(claim)
    assert counts.refutes(false)


def test_many_runs_end_to_end() -> None:
    mu = gaussian.mu_of(4.0, DELTA)

    def run(world: int, rng: np.random.Generator) -> float:
        rounds = rng.standard_normal(4) + world * mu / 2
        return float(rounds.sum())

    audit = many_runs(run, SCOPE, np.random.default_rng(0), Repeats(), gaussian=True)
    assert 2.4 < audit.epsilon < 4
    assert (audit.n, audit.confidence, audit.scope) == (2000, 0.95, SCOPE)
    counted = many_runs(run, SCOPE, np.random.default_rng(0), Repeats())
    assert 0.6 < counted.epsilon < 2.4


def test_bad_scores_are_refused() -> None:
    with pytest.raises(ConfigError, match="NaN"):
        rates([0.0, math.nan], [1.0], 0.5)
    with pytest.raises(ConfigError, match="profile"):
        tradeoff_of_profile([0.0, 1.0], [0.1])
