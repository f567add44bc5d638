from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from fedveil.audit.subject import clopper_pearson_upper, epsilon_ceiling, epsilon_from_rates, epsilon_of_mu, mu_from_rates
from fedveil.errors import ConfigError


@pytest.mark.parametrize(("n", "expected"), [(100, 3.28), (500, 4.91), (1000, 5.60), (5000, 7.21), (50000, 9.51)])
def test_ceiling_by_number_of_runs(n: int, expected: float) -> None:
    assert epsilon_ceiling(n) == pytest.approx(expected, abs=0.006)


def test_no_errors_has_a_closed_form() -> None:
    assert clopper_pearson_upper(0, 50, 0.05) == pytest.approx(1 - 0.05 ** (1 / 50), rel=1e-12)
    assert clopper_pearson_upper(50, 50, 0.05) == 1


@given(st.integers(1, 400), st.data())
def test_interval_inverts_the_binomial_tail(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n - 1))
    upper = float(clopper_pearson_upper(k, n, 0.025))
    assert binom.cdf(k, n, upper) == pytest.approx(0.025, rel=1e-6)
    assert upper == pytest.approx(beta.ppf(0.975, k + 1, n - k), rel=1e-9)


@pytest.mark.parametrize("p", [0.05, 0.3, 0.5])
def test_coverage_is_exact_and_not_wasteful(p: float) -> None:
    k = np.arange(201)
    missed = float(np.sum(binom.pmf(k, 200, p)[clopper_pearson_upper(k, 200, 0.05) < p]))
    assert 0.02 < missed <= 0.05


def test_rates_to_epsilon_by_hand() -> None:
    assert epsilon_from_rates(0.1, 0.3, 0.0) == pytest.approx(math.log(0.7 / 0.1))
    assert epsilon_from_rates(0.3, 0.1, 0.05) == pytest.approx(math.log(0.65 / 0.1))
    assert epsilon_from_rates(0.5, 0.5, 0.0) == 0
    assert epsilon_from_rates(1.0, 1.0, 0.1) == 0


def test_rates_to_mu_by_hand() -> None:
    assert mu_from_rates(0.5, 0.5) == 0
    assert mu_from_rates(0.15865525393145707, 0.15865525393145707) == pytest.approx(2.0)
    assert mu_from_rates(1.0, 0.01) == 0


@pytest.mark.parametrize("bad", [(-1, 10, 0.05), (11, 10, 0.05), (1, 0, 0.05), (1, 10, 0.0), (1, 10, 0.7), (math.nan, 10, 0.05)])
def test_bad_counts_and_levels_are_refused(bad: tuple[float, float, float]) -> None:
    with pytest.raises(ConfigError):
        clopper_pearson_upper(*bad)


def test_gaussian_conversion_needs_a_delta() -> None:
    with pytest.raises(ConfigError, match="delta"):
        epsilon_of_mu(1.0, 0.0)
