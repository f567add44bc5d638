"""Floating-point sums: measured errors below the bounds, an adversarial sequence, the variant without errors."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from fedveil.accounting.finite_precision import additions, gamma, norm_excess, sum_error
from fedveil.accounting.types import Adjacency
from fedveil.errors import ConfigError


def sequential(values: np.ndarray) -> np.float32:
    total = np.float32(0)
    for value in values:
        total = np.float32(total + value)
    return total


def test_a_thousand_scalars_whose_sequential_float32_sums_differ_by_more_than_the_clip() -> None:
    """One world stands at 512, where float32 has steps of 2^-14, the other below it, where they are half as wide."""
    tiny = np.nextafter(np.float32(2.0**-15), np.float32(1))
    data = np.array([1.0] * 512 + [tiny] * 488, dtype=np.float32)
    zeroed = data.copy()
    zeroed[0] = 0
    difference = float(sequential(data)) - float(sequential(zeroed))
    assert difference == pytest.approx(1.01489, abs=5e-6)
    assert np.all(np.abs(data) <= 1)
    assert difference <= 1 + sum_error(1000, "float32")
    assert float(data.astype(np.float64).sum() - zeroed.astype(np.float64).sum()) == 1
    assert sum_error(1000, "float64") < 1e-9  # and so the rule: accumulate in float64


@pytest.mark.parametrize("dimension", [3, 500, 4010])
def test_norms_of_contributions_clipped_in_float32_stay_below_their_bound(dimension: int) -> None:
    rng = np.random.default_rng(dimension)
    worst = 0.0
    for _ in range(20):
        x = (rng.standard_normal(dimension) * rng.choice([1e-3, 1, 30])).astype(np.float32)
        square = np.float32(0)
        for value in x:  # one after the other, the worst order
            square = np.float32(square + np.float32(value * value))
        scale = min(np.float32(1), np.float32(1) / np.sqrt(square))
        clipped = (x * scale).astype(np.float32)
        worst = max(worst, math.sqrt(math.fsum(float(v) ** 2 for v in clipped)) - 1)
    assert worst <= norm_excess(dimension, "float32")
    assert norm_excess(dimension, "float32") < norm_excess(2 * dimension, "float32")
    assert norm_excess(dimension, "float64") < 2e-7


@pytest.mark.parametrize("terms", [2, 17, 1000])
def test_sums_in_float32_err_less_than_their_bound(terms: int) -> None:
    rng = np.random.default_rng(terms)
    for _ in range(20):
        values = rng.uniform(-1, 1, terms).astype(np.float32)
        error = abs(Fraction(float(sequential(values))) - sum(map(Fraction, map(float, values))))
        assert error <= Fraction(sum_error(terms, "float32")) / 2
        paired = values
        while paired.size > 1:
            paired = np.append(paired, np.float32(0)) if paired.size % 2 else paired
            paired = (paired[::2] + paired[1::2]).astype(np.float32)
        error = abs(Fraction(float(paired[0])) - sum(map(Fraction, map(float, values))))
        assert error <= Fraction(sum_error(terms, "float32", "pairwise")) / 2


def test_two_worlds_on_the_grid_stay_within_the_sensitivity() -> None:
    """B contributions of clip 1, float32, rounded to a coarse grid; one of them zeroed or replaced."""
    rng, d, b, h = np.random.default_rng(2), 40, 30, 2.0**-6
    limits = [
        (1 + norm_excess(d, "float32")) * (moved + sum_error(b, "float32")) + h * math.sqrt(d)  # docs/privacy-theorems.md
        for moved in (1, 2)
    ]
    for _ in range(50):
        x = rng.standard_normal((b, d))
        x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
        for limit, other in zip(limits, (np.zeros(d), -x[0]), strict=True):
            sums = []
            for first in (x[0], other.astype(np.float32)):
                total = np.zeros(d, dtype=np.float32)
                for row in (first, *x[1:]):
                    total = (total + row).astype(np.float32)
                sums.append(np.rint(total.astype(np.float64) / h) * h)
            assert np.linalg.norm(sums[0] - sums[1]) <= limit
            cut = [np.trunc(v.astype(np.float64) / h) for v in (x[0], other.astype(np.float32))]
            factor = Adjacency.ZERO_OUT if not other.any() else Adjacency.REPLACE_ONE
            assert np.linalg.norm(cut[0] - cut[1]) * h <= (1 + norm_excess(d, "float32")) * factor.factor


def test_values_by_hand() -> None:
    assert gamma(3, "float32") == pytest.approx(3 * 2.0**-24 / (1 - 3 * 2.0**-24), rel=1e-15)
    assert [additions(n, "pairwise") for n in (1, 2, 3, 1000, 1024, 1025)] == [0, 1, 2, 10, 10, 11]
    assert sum_error(1000, "float32", "pairwise", weighted=True) == pytest.approx(2000 * gamma(11, "float32"), rel=1e-12)


def test_what_has_no_bound_is_refused() -> None:
    for call in (
        lambda: gamma(2**24, "float32"),
        lambda: norm_excess(2**23, "float32"),
        lambda: norm_excess(100, "float16"),  # type: ignore[arg-type]
        lambda: additions(5, "random"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError):
            call()
