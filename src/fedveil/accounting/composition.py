"""How the costs of several releases add up: naive, advanced, zCDP, RDP and GDP composition, and conversions to epsilon."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting._check import at_least, non_negative, numpy_defaults, open_probability, probability, vector
from fedveil.errors import ConfigError

_Numbers = Sequence[float] | NDArray[np.float64]


@numpy_defaults
def naive(epsilons: _Numbers, deltas: _Numbers) -> tuple[float, float]:
    """Basic composition: (sum of epsilons, sum of deltas capped at 1).

    Source: Dwork & Roth 2014, Theorem 3.16.
    """
    first, second = vector("epsilons", epsilons), vector("deltas", deltas)
    if first.size != second.size:
        raise ConfigError(f"one delta per epsilon: got {first.size} epsilons and {second.size} deltas")
    return math.fsum(first), min(1.0, math.fsum(second))


@numpy_defaults
def advanced(epsilon: float, delta: float, count: int, slack: float) -> tuple[float, float]:
    """Advanced composition of `count` adaptive (epsilon, delta)-DP releases.

    Args:
        epsilon, delta: the cost of each release.
        count: number of releases, >= 0.
        slack: the additional delta', in (0, 1).

    Returns:
        (sqrt(2 k ln(1/delta')) eps + k eps (e^eps - 1), k delta + delta'), delta capped at 1.

    Source: Dwork & Roth 2014, Theorem 3.20.
    """
    epsilon, delta = non_negative("epsilon", epsilon), probability("delta", delta)
    slack, count = open_probability("slack", slack), at_least("count", count, 0)
    growth = math.expm1(epsilon) if epsilon < 700 else math.inf
    total = epsilon * math.sqrt(2 * count * math.log(1 / slack)) + (count * epsilon * growth if count and epsilon else 0.0)
    return total, min(1.0, count * delta + slack)


@numpy_defaults
def gdp(mus: _Numbers) -> float:
    """mu of the (adaptive) composition of mu_t-GDP releases: sqrt(sum mu_t^2).

    Source: Dong, Roth & Su 2022, Corollary 3.3.
    """
    return float(np.linalg.norm(vector("mus", mus)))


@numpy_defaults
def zcdp(rhos: _Numbers) -> float:
    """zCDP parameter of the composition: the sum.

    Source: Bun & Steinke 2016, Lemma 2.3.
    """
    return math.fsum(vector("rhos", rhos))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """The classical conversion rho + 2 sqrt(rho ln(1/delta)) of rho-zCDP.

    Source: Bun & Steinke 2016, Proposition 1.3.
    """
    rho = non_negative("rho", rho)
    return rho + 2 * math.sqrt(rho * math.log(1 / open_probability("delta", delta)))


@numpy_defaults
def rdp(curves: Sequence[_Numbers]) -> NDArray[np.float64]:
    """Renyi curve of the composition on a common grid of orders: the sum of the curves.

    Source: Mironov 2017, Proposition 1.
    """
    if len({len(curve) for curve in curves}) != 1:
        raise ConfigError(f"Renyi curves must share one grid of orders, got lengths {sorted({len(c) for c in curves})}")
    total: NDArray[np.float64] = np.sum(np.asarray(curves, dtype=np.float64), axis=0)
    return total


@numpy_defaults
def rdp_epsilons(orders: _Numbers, values: _Numbers, delta: float) -> NDArray[np.float64]:
    """The epsilon that each order proves: R(a) + ln(1 - 1/a) - ln(delta a) / (a - 1), at least 0.

    Args:
        orders: Renyi orders, each > 1.
        values: Renyi divergences at these orders, >= 0, inf allowed.
        delta: in (0, 1).

    Source: Canonne, Kamath & Steinke 2020, Proposition 12.
    """
    alphas, curve = np.asarray(orders, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if alphas.shape != curve.shape or alphas.size == 0:
        raise ConfigError(f"one Renyi value per order: got shapes {alphas.shape} and {curve.shape}")
    if not np.all(alphas > 1) or not np.all(curve >= 0):
        raise ConfigError("Renyi orders must be > 1 and their values >= 0 (NaN is refused)")
    logs = np.log1p(-1 / alphas) - (math.log(open_probability("delta", delta)) + np.log(alphas)) / (alphas - 1)
    return np.maximum(curve + logs, 0.0)


def rdp_epsilon(orders: _Numbers, values: _Numbers, delta: float) -> float:
    """The best epsilon over the grid of orders; see `rdp_epsilons`."""
    return float(np.min(rdp_epsilons(orders, values, delta)))


@numpy_defaults
def rdp_log_delta(orders: _Numbers, values: _Numbers, epsilon: float) -> float:
    """Logarithm of the best delta that a Renyi curve proves at `epsilon`, at most 0.

    Source: Canonne, Kamath & Steinke 2020, Proposition 12, solved for delta.
    """
    alphas, curve = np.asarray(orders, dtype=np.float64), np.asarray(values, dtype=np.float64)
    logs = (alphas - 1) * (curve - non_negative("epsilon", epsilon) + np.log1p(-1 / alphas)) - np.log(alphas)
    return min(0.0, float(np.min(logs)))
