"""Correlated noise: every participation pattern by brute force, exact rounding, the refused traps."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.accounting.accountant import bound
from fedveil.accounting.correlated_noise import (
    banded_sensitivity,
    dyadic,
    factorisation_event,
    square_root_coefficients,
    toeplitz_sensitivity,
)
from fedveil.accounting.types import Adjacency
from fedveil.errors import ConfigError
from reference_costs import tree_sensitivity_squared

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE


def toeplitz(column: np.ndarray, rounds: int) -> np.ndarray:
    return sum(np.diag(np.full(rounds - j, c), -j) for j, c in enumerate(column[:rounds]))


def patterns(rounds: int, separation: int, most: int) -> list[tuple[int, ...]]:
    return [
        chosen
        for size in range(1, most + 1)
        for chosen in itertools.combinations(range(rounds), size)
        if all(b - a >= separation for a, b in itertools.pairwise(chosen))
    ]


def brute_force(column: np.ndarray, rounds: int, separation: int, most: int) -> float:
    """Largest || sum of signed columns ||: for contributions of norm 1, signs are the extreme points on a line."""
    matrix = toeplitz(column, rounds)
    best = 0.0
    for chosen in patterns(rounds, separation, most):
        for signs in itertools.product((1, -1), repeat=len(chosen) - 1):
            best = max(best, float(np.linalg.norm(matrix[:, chosen] @ np.array([1, *signs]))))
    return best


@pytest.mark.parametrize("rounds", range(1, 9))
def test_square_root_sensitivities_equal_brute_force_for_all_bands_separations_and_participations(rounds: int) -> None:
    for separation, most, band in itertools.product(range(1, rounds + 1), range(1, 5), range(1, rounds + 1)):
        column = square_root_coefficients(band)
        exact = brute_force(column, rounds, separation, most)
        assert toeplitz_sensitivity(column, rounds, separation, most) == pytest.approx(exact, rel=1e-12)
        if band <= separation or min(most, -(-rounds // separation)) == 1:
            assert banded_sensitivity(column, rounds, separation, most) == pytest.approx(exact, rel=1e-12)
        else:
            with pytest.raises(ConfigError, match=f"band of {band} is above the separation of {separation}"):
                banded_sensitivity(column, rounds, separation, most)


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 4), st.lists(st.floats(-2, 2), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_any_signs_within_the_separation(rounds: int, separation: int, most: int, values: list[float]) -> None:
    column = np.array([1.0, *values])[: min(separation, rounds)]
    exact = brute_force(column, rounds, separation, most)
    assert banded_sensitivity(column, rounds, separation, most) == pytest.approx(exact, rel=1e-12)


def test_the_trap_of_a_band_above_the_separation() -> None:
    """Band 8 at separation 4: the column formula would say 1.7907."""
    c = square_root_coefficients(8)
    formula = math.sqrt(sum(float(np.sum(c[: 8 - 4 * j] ** 2)) for j in range(2)))
    assert formula == pytest.approx(1.7907, abs=1e-4)
    assert toeplitz_sensitivity(c, 8, 4, 2) == pytest.approx(2.0736, abs=1e-4)
    with pytest.raises(ConfigError, match="toeplitz_sensitivity"):
        banded_sensitivity(c, 8, 4, 2)
    for bad in ([1.0, -0.5], [0.5, 1.0]):
        with pytest.raises(ConfigError, match="never grow"):
            toeplitz_sensitivity(bad, 8, 1, 2)


def test_vectors_of_several_dimensions_are_no_worse() -> None:
    rng, matrix = np.random.default_rng(3), toeplitz(square_root_coefficients(8), 8)
    limit = toeplitz_sensitivity(square_root_coefficients(8), 8, 2, 3)
    for chosen in patterns(8, 2, 3):
        u = rng.normal(size=(len(chosen), 3))
        u /= np.linalg.norm(u, axis=1, keepdims=True)
        assert np.linalg.norm(matrix[:, chosen] @ u) <= limit


@given(st.integers(1, 40), st.integers(1, 12), st.integers(1, 6), st.integers(2, 30))
@settings(max_examples=60, deadline=None)
def test_sensitivity_of_rounded_coefficients_is_the_smallest_float_above_the_exact_one(
    rounds: int, separation: int, most: int, bits: int
) -> None:
    column = dyadic(square_root_coefficients(rounds), bits)
    assert all((c * 2.0**bits).is_integer() for c in column.tolist())
    assert np.all(np.abs(column - square_root_coefficients(rounds)) <= 2.0 ** -(bits + 1))
    value = toeplitz_sensitivity(column, rounds, separation, most)
    total = [Fraction(0)] * rounds
    for start in range(0, rounds, separation)[:most]:
        for i, c in enumerate(column[: rounds - start].tolist()):
            total[start + i] += Fraction(c)
    square = sum(t * t for t in total)
    assert Fraction(math.nextafter(value, 0)) ** 2 < square <= Fraction(value) ** 2


def test_coarse_rounding_moves_the_sensitivity() -> None:
    c = square_root_coefficients(60)
    assert toeplitz_sensitivity(dyadic(c, 4), 60, 10, 6) != pytest.approx(toeplitz_sensitivity(c, 60, 10, 6), rel=1e-3)


def test_one_event_for_the_run_agrees_with_a_second_library() -> None:
    sensitivity = banded_sensitivity(square_root_coefficients(10), 60, 10, 6)
    accountant = pld_privacy_accountant.PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(8 / sensitivity))
    event = factorisation_event(sensitivity, 1.0, 8.0, ZERO)
    assert bound([event], 1e-5)[0] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)
    assert factorisation_event(sensitivity, 0.3, 8.0, REPLACE).mu == pytest.approx(2 * 0.3 * event.mu, rel=1e-14)
    assert Fraction(event.mu) >= Fraction(sensitivity) / 8


# --- trees ------------------------------------------------------------------------------------------------------------


def tree_cost(chosen: tuple[int, ...], rounds: int) -> int:
    total, size = 0, 1
    while size <= rounds:
        for start in range(0, rounds - size + 1, size):
            total += sum(start <= t < start + size for t in chosen) ** 2
        size *= 2
    return total


@pytest.mark.parametrize("rounds", [1, 2, 5, 7, 8, 11, 12])
def test_tree_sensitivity_equals_exhaustive_search(rounds: int) -> None:
    for separation, most in itertools.product(range(1, rounds + 1), range(1, 6)):
        exact = max(tree_cost(chosen, rounds) for chosen in patterns(rounds, separation, most))
        assert tree_sensitivity_squared(rounds, separation, most) == exact


def test_repeats_in_a_tree_cost_more_than_their_sum() -> None:
    assert tree_sensitivity_squared(60, 10, 6) == 49 > 6 * tree_sensitivity_squared(60)
    assert [tree_sensitivity_squared(t) for t in (1, 2, 3, 4, 63, 64, 1000)] == [1, 2, 2, 3, 6, 7, 10]
    spaced = tree_cost(tuple(range(0, 200, 20)), 200)
    assert tree_sensitivity_squared(200, 20, 10) == 151 >= spaced
