from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.integrate import trapezoid
from scipy.stats import norm

from fedveil.accounting import gaussian
from fedveil.accounting.types import View
from fedveil.audit.canaries import (
    canaries,
    delta_between,
    epsilon_between,
    estimate,
    final_scores,
    null_tail,
    null_threshold,
    round_scores,
    threshold_bound,
)
from fedveil.errors import ConfigError

DELTA = 1e-5


def test_null_tail_in_three_dimensions_is_uniform() -> None:
    assert null_tail(0.4, 3) == pytest.approx(0.3)
    assert null_tail(-0.4, 3) == pytest.approx(0.7)


def test_null_tail_in_many_dimensions_is_normal() -> None:
    assert null_tail(2 / 100, 10_000) == pytest.approx(norm.sf(2), rel=1e-3)
    assert null_threshold(0.01, 10_000) == pytest.approx(norm.isf(0.01) / 100, rel=1e-3)


def test_null_tail_against_simulation() -> None:
    rng = np.random.default_rng(0)
    scores = final_scores(canaries(20_000, 10, rng), rng.standard_normal(10))
    assert np.mean(scores >= 0.3) == pytest.approx(null_tail(0.3, 10), abs=0.01)


@pytest.mark.parametrize("p", [(0.3, 1.2), (0.3, 0.8), (0.0, 1.5), (0.0, 0.5), (1.0, 1.0), (-1.0, 1.0)])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 2.0])
def test_divergence_between_normals_against_quadrature(p: tuple[float, float], epsilon: float) -> None:
    x = np.linspace(-30, 30, 600_001)
    expected = trapezoid(np.maximum(norm.pdf(x, *p) - math.exp(epsilon) * norm.pdf(x), 0), x)
    assert delta_between(p, (0.0, 1.0), epsilon) == pytest.approx(expected, abs=1e-8)


def test_epsilon_between_equal_normals_is_the_gaussian_one() -> None:
    assert epsilon_between((0.3, 0.2), (0.0, 0.2), DELTA) == pytest.approx(gaussian.epsilon_of(1.5, DELTA), rel=1e-6)
    assert epsilon_between((0.0, 0.2), (0.0, 0.2), DELTA) == 0


def _one_round(k: int, d: int, mu: float, rng: np.random.Generator) -> np.ndarray:
    directions = canaries(k, d, rng)
    return final_scores(directions, directions.sum(axis=0) + rng.standard_normal(d) / mu)


def test_equal_variance_estimate_is_nearly_unbiased_and_the_published_fit_overstates() -> None:
    rng = np.random.default_rng(1)
    scores = [_one_round(100, 5000, 1.0, rng) for _ in range(40)]
    equal = np.array([estimate(s, DELTA, d=5000).epsilon for s in scores])
    unequal = np.array([estimate(s, DELTA, d=5000, equal_variance=False).epsilon for s in scores])
    true = gaussian.epsilon_of(1.0, DELTA)
    assert equal.mean() == pytest.approx(true, abs=0.25)
    assert unequal.mean() > true + 0.8


def test_estimate_says_that_it_is_one() -> None:
    scores = _one_round(100, 2000, 1.0, np.random.default_rng(0))
    audit = estimate(scores, DELTA, d=2000)
    assert not audit.rigorous
    assert str(audit).startswith("estimated")
    assert "confidence" not in str(audit), "there is none to be had of an estimate"
    assert audit.scope.view is View.FINAL


def test_absent_canaries_show_nothing() -> None:
    rng = np.random.default_rng(0)
    scores = final_scores(canaries(500, 2000, rng), rng.standard_normal(2000))
    assert estimate(scores, DELTA, d=2000).epsilon < 0.6


def test_every_round_view() -> None:
    rng = np.random.default_rng(0)
    joined, unseen = canaries(50, 3000, rng), canaries(2000, 3000, rng)
    rounds = joined.reshape(5, 10, 3000).sum(axis=1) + rng.standard_normal((5, 3000))
    audit = estimate(round_scores(joined, rounds), DELTA, unseen=round_scores(unseen, rounds))
    assert audit.scope.view is View.AGGREGATE
    assert not audit.rigorous
    assert 1.5 < audit.epsilon < 8


def test_threshold_bound_by_hand() -> None:
    scores = np.full(100, 0.5)
    audit = threshold_bound(scores, 1000, 0.0)
    assert audit.epsilon == pytest.approx(math.log(0.05 ** (1 / 100) / 0.01))
    assert not audit.rigorous
    assert threshold_bound(scores, 1000, 0.0, independent=True).rigorous


def test_threshold_bound_near_the_reference() -> None:
    rng = np.random.default_rng(2)
    bounds = [threshold_bound(_one_round(100, 5000, 1.0, rng), 5000, DELTA).epsilon for _ in range(20)]
    assert np.mean(bounds) == pytest.approx(1.3, abs=0.3)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        estimate([0.1, 0.2], DELTA)
    with pytest.raises(ConfigError, match="finite"):
        estimate([0.1, math.nan], DELTA, d=10)
    with pytest.raises(ConfigError, match="movement"):
        final_scores(np.eye(3), np.zeros(3))
