"""Noise in shares: the ratio of mass functions by exact convolution, the refusal of coarse shares, the trap of clamping."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from scipy.stats import norm

from fedveil.accounting.finite_precision import delta_with_shares, kappa, log_kappa, share_slack
from fedveil.accounting.gaussian import delta_of
from fedveil.errors import ConfigError


def rounded(s: float, reach: int) -> np.ndarray:
    k = np.arange(-reach, reach + 1)
    return np.where(k < 0, norm.cdf((k + 0.5) / s) - norm.cdf((k - 0.5) / s), norm.sf((k - 0.5) / s) - norm.sf((k + 0.5) / s))


def smoothed(s: float, n: int, reach: int) -> np.ndarray:
    """round(N(0, n s^2) + V), V a sum of n - 1 uniforms, by quadrature over V for n = 2."""
    assert n == 2
    nodes, weights = np.polynomial.legendre.leggauss(40)
    std = s * math.sqrt(n)
    k = np.arange(-reach, reach + 1)[:, None]
    low, high = (k - 0.5 - nodes / 2) / std, (k + 0.5 - nodes / 2) / std
    cells = np.where(low > 0, norm.sf(low) - norm.sf(high), norm.cdf(high) - norm.cdf(low))
    return cells @ weights / 2


@pytest.mark.parametrize(("s", "largest"), [(1.0, 5.8336e-5), (0.7, None), (0.5, None)])
def test_ratio_of_mass_functions_stays_within_kappa_by_exact_convolution(s: float, largest: float | None) -> None:
    reach = 12
    exact = np.convolve(rounded(s, 40), rounded(s, 40))[80 - reach : 80 + reach + 1]
    seen = np.abs(np.log(exact / smoothed(s, 2, reach)))[reach - 6 : reach + 7].max()
    assert seen <= kappa(s, 2)
    assert seen > kappa(s, 2) / 50  # the bound is not idle
    if largest is not None:
        assert seen == pytest.approx(largest, rel=2e-2)


def test_many_shares_by_exact_convolution_and_characteristic_functions() -> None:
    """n = 5, s = 0.6: V has four uniforms, whose law the grid of a fine convolution gives."""
    s, n, fine, reach = 0.6, 5, 64, 20
    law = rounded(s, 30)
    total = law
    for _ in range(n - 1):
        total = np.convolve(total, law)
    total = total[n * 30 - reach : n * 30 + reach + 1]
    uniform = np.ones(fine) / fine
    v = uniform
    for _ in range(n - 2):
        v = np.convolve(v, uniform)
    points = (np.arange(v.size) - (v.size - 1) / 2) / fine
    k = np.arange(-reach, reach + 1)[:, None]
    std = s * math.sqrt(n)
    other = (norm.cdf((k + 0.5 - points) / std) - norm.cdf((k - 0.5 - points) / std)) @ v
    middle = slice(reach - 4, reach + 5)
    assert np.abs(np.log(total[middle] / other[middle])).max() <= kappa(s, n) + 2e-4


@pytest.mark.parametrize(("s", "n"), [(0.4, 3), (1.0, 7), (2.0, 10), (5.0, 100)])
def test_kappa_in_high_precision(s: float, n: int) -> None:
    with mp.workdps(400):
        total = mp.mpf(0)
        for k in range(1, n):
            r = 2 * mp.nsum(lambda m, k=k: mp.exp(-2 * mp.pi**2 * mp.mpf(s) ** 2 * m**2 * k / (k + 1)), [1, 40])
            total -= mp.log(1 - r)
        assert log_kappa(s, n) == pytest.approx(float(mp.log(total)), rel=1e-10)


def test_one_share_has_no_slack_and_very_coarse_shares_no_statement() -> None:
    assert log_kappa(0.3, 1) == -math.inf
    assert kappa(0.3, 1) == 0
    assert log_kappa(0.1, 2) == math.inf
    assert delta_with_shares(lambda e: delta_of(1, e), 1.0, 0.1, 2, 10) == 1
    assert log_kappa(1.0, 100_000) > log_kappa(1.0, 1000)


def test_delta_with_shares_is_the_gaussian_one_moved() -> None:
    slack = 1000 * kappa(1, 2)
    moved = delta_with_shares(lambda e: delta_of(0.8, e), 1.0, 1, 2, 1000)
    assert moved == pytest.approx(math.exp(slack) * delta_of(0.8, 1 - 2 * slack), rel=1e-12)
    assert moved > delta_of(0.8, 1.0) * 1.1
    assert delta_with_shares(lambda e: delta_of(0.8, e), 0.1, 1, 2, 1000) == 1
    assert delta_with_shares(lambda e: delta_of(0.8, e), 1.0, 4, 100, 10**9) == delta_of(0.8, 1.0)


def test_from_four_steps_a_share_on_nothing_is_left_to_charge() -> None:
    assert 0 < share_slack(4, 1000, 10**12) < 1e-50
    assert share_slack(4096, 10**6, 10**12) == 0
    for steps in (3.99, 0.5, math.nan):
        with pytest.raises(ConfigError, match="from 4 on"):
            share_slack(steps, 10, 10)


def test_clamping_a_share_breaks_the_statement() -> None:
    """Shares clamped at 3 steps: the ratio leaves e^kappa by far."""
    law = rounded(1.0, 40)
    clamped = law[37:44].copy()
    clamped[0], clamped[-1] = law[:38].sum(), law[43:].sum()
    total = np.convolve(clamped, clamped)
    ratio = np.abs(np.log(total / smoothed(1.0, 2, 6)))
    assert ratio.max() > 1000 * kappa(1, 2)
