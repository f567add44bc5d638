"""Inexact noise samplers: the addition to delta, and that a large one is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from fedveil.accounting.finite_precision import sampler_delta, total_variation
from fedveil.accounting.gaussian import delta_of
from fedveil.errors import ConfigError


def test_addition_to_delta_by_hand() -> None:
    added = sampler_delta(1e-20, 10**6, 100, 2.0, 1e-5)
    assert added == pytest.approx((1 + math.exp(2)) * 1e-12, rel=1e-12)
    assert sampler_delta(0.0, 10**9, 10**6, 1e4, 1e-5) == 0
    assert sampler_delta(1e-3, 0, 5, 1.0, 1e-5) == 0


def test_total_variation() -> None:
    assert total_variation(0) == total_variation(2) == 0
    assert total_variation(4) == 2.0**-128
    assert 1e4 * total_variation(10_000_000) < 1e-2 * 1e-15


def test_one_per_cent_of_delta_is_refused() -> None:
    with pytest.raises(ConfigError, match="less than 1 %"):
        sampler_delta(2.0**-53, 11_200_000, 100, 1.0, 1e-5)
    limit = 1e-7 / (1 + math.e)
    assert sampler_delta(limit * 0.999, 1, 1, 1.0, 1e-5) < 1e-7
    for bad in (limit * 1.001, 1.0):
        with pytest.raises(ConfigError, match="sampler"):
            sampler_delta(bad, 1, 1, 1.0, 1e-5)
    with pytest.raises(ConfigError, match="sampler"):
        sampler_delta(1e-30, 1, 1, 1e4, 1e-5)


def test_a_truncated_normal_leaks_no_more_than_said() -> None:
    """Noise cut off at 3: its variation is known, and the true delta at epsilon = 1 stays below the bound but above the ideal."""
    x = np.linspace(-9, 10, 400_001)
    step, tau = x[1] - x[0], 2 * norm.sf(3)

    def density(mean: float) -> np.ndarray:
        return np.where(np.abs(x - mean) <= 3, norm.pdf(x, mean), 0) / (1 - tau)

    true = np.maximum(density(0.5) - math.e * density(0), 0).sum() * step
    assert delta_of(0.5, 1) < true <= delta_of(0.5, 1) + (1 + math.e) * tau
