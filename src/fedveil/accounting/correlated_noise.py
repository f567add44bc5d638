"""Correlated noise: matrix factorisation as a Gaussian release of a whole run.

Row t of x is the clients' contribution in round t; a client takes part in at most k rounds, at least b rounds apart. The
released prefix sums are A C^-1 (C x + noise). By Denisov et al. 2022 (Theorem 2.1) rounds may depend on earlier releases, so the
run costs one Gaussian release of mu = sens clip / noise std, where sens is the largest || C u || over one client's
contributions u of norm <= 1 per round. Proofs: docs/privacy-theorems.md, "Correlated noise".

Sensitivities are computed in integer arithmetic from the given coefficients (binary fractions), and rounded up once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting._numbers import at_least, numpy_defaults, positive
from fedveil.accounting.types import Adjacency, Gaussian
from fedveil.errors import ConfigError

_Array = NDArray[np.float64]
Coefficients = Sequence[float] | _Array


@numpy_defaults
def square_root_coefficients(count: int) -> _Array:
    """Return the first coefficients c_j = binom(2j, j) / 4^j of the square root of the prefix-sum matrix.

    Args:
        count: >= 1.

    Source: Fichtenberger, Henzinger & Upadhyay 2023; c_j = c_(j-1) (2j - 1) / (2j).
    """
    j = np.arange(1, at_least("count", count, 1), dtype=np.float64)
    return np.concatenate([[1.0], np.cumprod((2 * j - 1) / (2 * j))])


@numpy_defaults
def dyadic(coefficients: Coefficients, bits: int) -> _Array:
    """Round coefficients to multiples of 2^-bits, so that noise on a grid stays on a grid; the rounding is monotone.

    Args:
        coefficients: finite. bits: from 0 to 50.
    """
    values, bits = np.asarray(coefficients, dtype=np.float64), at_least("bits", bits, 0)
    if bits > 50 or not np.all(np.isfinite(values)):
        raise ConfigError(f"coefficients must be finite and bits at most 50, got bits = {bits}")
    return np.asarray(np.ldexp(np.rint(np.ldexp(values, bits)), -bits), dtype=np.float64)


def _whole(coefficients: Coefficients, rounds: int) -> tuple[list[int], int]:
    """Return (integers, shift): the coefficients times 2^shift, cut at the last round and without trailing zeros."""
    values = [float(c) for c in coefficients][:rounds]
    while values and values[-1] == 0:
        values.pop()
    if not values or not all(math.isfinite(c) for c in values):
        raise ConfigError("coefficients must be finite numbers with at least one that is not 0")
    ratios = [c.as_integer_ratio() for c in values]
    shift = max(d.bit_length() - 1 for _, d in ratios)
    return [n << (shift - d.bit_length() + 1) for n, d in ratios], shift


def _root_up(square: Fraction) -> float:
    """Return the square root, rounded up to the next float."""
    root = math.sqrt(square)
    while Fraction(root) ** 2 < square:
        root = math.nextafter(root, math.inf)
    while root > 0 and Fraction(math.nextafter(root, 0.0)) ** 2 >= square:
        root = math.nextafter(root, 0.0)
    return root


def _plan(rounds: int, separation: int, participations: int) -> tuple[int, int, int]:
    """Check the arguments and return T, b and the number of participations that fit, min(k, ceil(T / b))."""
    rounds, separation = at_least("rounds", rounds, 1), at_least("separation", separation, 1)
    return rounds, separation, min(at_least("participations", participations, 1), -(-rounds // separation))


@numpy_defaults
def banded_sensitivity(coefficients: Coefficients, rounds: int, separation: int, participations: int) -> float:
    """Return the largest || C u || if the band is at most the separation: sqrt(sum_(j<k) ||c[:T - jb]||^2), rounded up.

    The columns of one client's rounds do not overlap, so their signs do not matter, and a column is longest in an early round.

    Args:
        coefficients: the first column of C, with any signs; the band is its length without trailing zeros.
        rounds: T >= 1. separation: b >= 1, least distance between two participations. participations: k >= 1, at most.

    Raises:
        ConfigError: a band above the separation, where columns overlap and this formula is too small.
    """
    rounds, separation, most = _plan(rounds, separation, participations)
    whole, shift = _whole(coefficients, rounds)
    if most > 1 and len(whole) > separation:
        raise ConfigError(
            f"a band of {len(whole)} is above the separation of {separation} rounds, so one client's columns overlap and the "
            f"column formula is too small: shorten the band to {separation}, or use toeplitz_sensitivity"
        )
    squares = [sum(c * c for c in whole[: rounds - j * separation]) for j in range(most)]
    return _root_up(Fraction(sum(squares), 1 << (2 * shift)))


@numpy_defaults
def toeplitz_sensitivity(coefficients: Coefficients, rounds: int, separation: int, participations: int) -> float:
    """Return the largest || C u || for any band: || sum_(j<k) C e_(jb) ||, rounded up.

    Args:
        coefficients: the first column of C, >= 0 and nonincreasing. rounds, separation, participations: as `banded_sensitivity`.

    Raises:
        ConfigError: coefficients are negative or increase, for which no bound is proven here.

    Source: inner products of columns fall with the round and with the distance; docs/privacy-theorems.md.
    """
    rounds, separation, most = _plan(rounds, separation, participations)
    whole, shift = _whole(coefficients, rounds)
    if min(whole) < 0 or any(late > early for early, late in pairwise(whole)):
        raise ConfigError("toeplitz_sensitivity needs coefficients >= 0 that never grow; otherwise keep the band <= separation")
    total = [0] * rounds
    for start in range(0, most * separation, separation):
        for i, c in enumerate(whole[: rounds - start]):
            total[start + i] += c
    return _root_up(Fraction(sum(t * t for t in total), 1 << (2 * shift)))


def _quotient_up(numerator: Fraction, denominator: Fraction) -> float:
    exact = numerator / denominator
    value = float(exact)
    return value if Fraction(value) >= exact else math.nextafter(value, math.inf)


def factorisation_event(sensitivity: float, clip: float, noise_std: float, adjacency: Adjacency) -> Gaussian:
    """Return the cost of a whole run: one Gaussian release of mu = sensitivity clip factor / noise std, rounded up.

    Args:
        sensitivity: of C, from `banded_sensitivity` or `toeplitz_sensitivity`, > 0.
        clip: bound on a client's contribution to a round, > 0. noise_std: of the independent noise before C^-1, > 0.
        adjacency: replace-one doubles the sensitivity.
    """
    top = Fraction(positive("sensitivity", sensitivity)) * Fraction(positive("clip", clip)) * adjacency.factor
    return Gaussian(_quotient_up(top, Fraction(positive("noise_std", noise_std))))
