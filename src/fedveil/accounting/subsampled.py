"""The Poisson-sampled Gaussian mechanism: each unit joins a round with probability `rate`, independently and secretly.

All lengths are in units of the sensitivity, so the noise std is `noise_multiplier`. The adjacency defines the sensitivity:
zero-out compares (1-q) N(0) + q N(1) with N(0); replace-one compares two mixtures whose contributions lie within 1/2 of zero
(sensitivity 1 = 2C). `adjacency=None` gives curves that hold for both. The module does not apply to fixed-size samples, which
are not Poisson samples, nor against an adversary who sees who takes part, where sampling does not amplify.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import scipy
from numpy.typing import NDArray

from fedveil.accounting import pld
from fedveil.accounting._numbers import (
    at_least,
    least_below,
    non_negative,
    numpy_defaults,
    open_probability,
    positive,
    probability,
)
from fedveil.accounting.gaussian import epsilon_of, log_delta_of, rdp_epsilons
from fedveil.accounting.types import Adjacency, member
from fedveil.errors import ConfigError

_Array = NDArray[np.float64]
_FRACTIONS = (*(1 + 2.0**-k for k in range(20, 1, -1)), *(x / 20 for x in range(26, 40)), *(x / 4 for x in range(9, 32) if x % 4))
_INTEGERS = (*range(2, 65), *range(68, 129, 4), *range(144, 257, 16), *range(288, 513, 32), 640, 768, 1024)
ORDERS: tuple[float, ...] = tuple(sorted({*_FRACTIONS, *map(float, _INTEGERS)}))
_TINY_NOISE = 0.05  # below it, and below order 1 + 2**-10, amplification is ignored: little is lost
_NEAREST = 1 + 2.0**-10


@cache
def _binomials(orders: tuple[int, ...]) -> _Array:
    """Return ln C(a, k) for each order a and k = 0..max, -inf for k > a."""
    alphas, k = np.array(orders, dtype=np.float64)[:, None], np.arange(max(orders) + 1, dtype=np.float64)
    with np.errstate(all="ignore"):
        logs = scipy.special.gammaln(alphas + 1) - scipy.special.gammaln(k + 1) - scipy.special.gammaln(alphas - k + 1)
    return np.where(k <= alphas, logs, -np.inf)


def _log_excess_integer(rate: float, z: float, orders: tuple[int, ...]) -> _Array:
    """Return ln (E_Q[(P/Q)^a] - 1) by the binomial sum of Mironov, Talwar & Zhang 2019, Section 3.3, minus its terms of sum 1."""
    k = np.arange(max(orders) + 1, dtype=np.float64)
    alphas = np.array(orders, dtype=np.float64)[:, None]
    stay = np.where(k <= alphas, (alphas - k) * math.log1p(-rate), 0.0)
    growth = np.maximum((k * k - k) / (2 * z * z), 1e-300)
    lift = growth + np.log(-np.expm1(-growth))
    terms = _binomials(orders) + stay + k * math.log(rate) + lift
    return np.asarray(scipy.special.logsumexp(terms[:, 2:], axis=1), dtype=np.float64)


def _log_ratio(rate: float, z: float, x: _Array) -> _Array:
    """Return the log density ratio of (1-q) N(0) + q N(1) to N(0) at x."""
    return np.asarray(np.logaddexp(math.log1p(-rate), math.log(rate) + (2 * x - 1) / (2 * z * z)), dtype=np.float64)


def log_convex(power: _Array, ratio: _Array) -> _Array:
    """Return ln (L^p - 1 - p (L - 1)) for L = exp(ratio) and p outside (0, 1), where the argument is >= 0."""
    with np.errstate(all="ignore"):
        near = np.log(np.maximum(np.expm1(power * ratio) - power * np.expm1(ratio), 0.0))
        top = np.maximum(power * ratio, ratio)
        far = top + np.log(np.exp(power * ratio - top) - np.exp(-top) - power * (np.exp(ratio - top) - np.exp(-top)))
    return np.where(np.abs(ratio) * np.maximum(np.abs(power), 1) < 1, near, far)


def _log_excess_real(rate: float, z: float, orders: _Array) -> _Array:
    """Return ln (E_Q[(P/Q)^a] - 1) by the trapezoidal rule, whose error is exponentially small for this analytic integrand."""
    x, base = _trapezoid(z, float(orders.max()), 0.6)
    return np.asarray(
        scipy.special.logsumexp(base + log_convex(orders[:, None], _log_ratio(rate, z, x)), axis=1), dtype=np.float64
    )


def _log_excess(rate: float, z: float, orders: _Array) -> _Array:
    """Return ln (E_Q[(P/Q)^a] - 1) of the remove direction, the larger one (Mironov, Talwar & Zhang 2019, Theorem 5)."""
    excess = np.empty_like(orders)
    whole = (orders == np.round(orders)) & (orders <= 2048)
    if whole.any():
        excess[whole] = _log_excess_integer(rate, z, tuple(int(a) for a in orders[whole]))
    if not whole.all():
        excess[~whole] = _log_excess_real(rate, z, orders[~whole])
    return excess


def _trapezoid(z: float, highest: float, fineness: float) -> tuple[_Array, _Array]:
    """Return points from -12 z to highest + 12 z, and ln (step x normal density) at each of them."""
    low, high = -0.5 - 12 * z, highest + 12 * z
    x: _Array = np.linspace(low, high, math.ceil((high - low) / min(0.5 * z, fineness * z * z)) + 1)
    return x, np.asarray(-x * x / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi)) + math.log(x[1] - x[0]), dtype=np.float64)


def _log_excess_replace(rate: float, z: float, orders: _Array) -> _Array:
    """Return ln (E_Q[(P/Q)^a] - 1) for opposite contributions: P = (1-q) N(0) + q N(1/2), Q = (1-q) N(0) + q N(-1/2)."""
    excess = np.empty_like(orders)
    for low, high in pairwise((1.0, 4.0, 16.0, 64.0, 256.0, math.inf)):
        group = (orders > low) & (orders <= high)
        if group.any():
            # above order 64 the integrand's peak is far from the narrow poles near 0 whenever these would need a finer grid
            x, base = _trapezoid(z, float(orders[group].max()), 1.2 if high <= 64 else math.inf)
            up, down = (np.logaddexp(math.log1p(-rate), math.log(rate) + (s * x - 0.25) / (2 * z * z)) for s in (1, -1))
            excess[group] = scipy.special.logsumexp(base + down + log_convex(orders[group][:, None], up - down), axis=1)
    return excess


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(12)


def _panels(low: float, high: float, width: float) -> tuple[_Array, _Array]:
    edges = np.linspace(low, high, max(2, math.ceil((high - low) / width) + 1))
    half = 0.5 * np.diff(edges)[:, None]
    return (edges[:-1, None] + half * (_NODES + 1)).ravel(), (half * _WEIGHTS).ravel()


def _symmetric_surplus(rate: float, z: float, orders: _Array) -> _Array:
    """Return the surplus in E_Q[(P/Q)^a] of the pair that covers every adjacency over the remove direction.

    With k_p(L) = L^p - 1 - p (L - 1), the remove direction has 1 + E_Q[k_a(L)] and the symmetric pair
    1 + E_Q[(k_a(L) + k_(1-a)(L)) 1{L > 1}]; the surplus is the difference.
    """
    alphas = orders[:, None]

    def mean(low: float, high: float, power: _Array) -> _Array:
        x, weights = _panels(low, high, z / 2)
        density = weights * np.exp(-x * x / (2 * z * z)) / (z * math.sqrt(2 * math.pi))
        return np.asarray(np.exp(log_convex(power, _log_ratio(rate, z, x))) @ density, dtype=np.float64)

    return np.maximum(mean(0.5, 1 + 12 * z, 1 - alphas) - mean(-12 * z, 0.5, alphas), 0.0) + 1e-16


@numpy_defaults
def rdp(
    rate: float, noise_multiplier: float, orders: Sequence[float] | _Array = ORDERS, *, adjacency: Adjacency | None = None
) -> _Array:
    """Return the Renyi divergences of one Poisson-sampled Gaussian release at the given orders; multiply by the number of rounds.

    Args:
        rate: sampling probability in [0, 1].
        noise_multiplier: noise std / sensitivity of the adjacency, > 0.
        orders: Renyi orders, each > 1.
        adjacency: zero_out gives the sampled Gaussian mechanism of the literature, replace_one the pair of opposite
            contributions, None the symmetric pair that covers both.

    Source: Mironov, Talwar & Zhang 2019, Theorems 4, 5 and Section 3.3; the other two: docs/privacy.md.
    """
    rate, z = probability("rate", rate), positive("noise_multiplier", noise_multiplier)
    adjacency = None if adjacency is None else member(Adjacency, "adjacency", adjacency)
    alphas = np.asarray(orders, dtype=np.float64)
    if alphas.ndim != 1 or alphas.size == 0 or not np.all((alphas > 1) & np.isfinite(alphas)):
        raise ConfigError(f"Renyi orders must be finite and > 1, got {list(orders)[:5]}")
    if rate == 0:
        return np.zeros_like(alphas)
    growth = np.maximum(alphas * (alphas - 1) / (2 * z * z), 1e-300)
    divergences = np.logaddexp(0.0, math.log(rate) + growth + np.log(-np.expm1(-growth))) / (alphas - 1)
    amplified = (alphas >= _NEAREST) & (rate < 1) & (z >= _TINY_NOISE)
    if amplified.any():
        orders = alphas[amplified]
        excess = _log_excess_replace(rate, z, orders) if adjacency is Adjacency.REPLACE_ONE else _log_excess(rate, z, orders)
        if adjacency is None:
            excess = np.logaddexp(excess, np.log(_symmetric_surplus(rate, z, orders)))
        divergences[amplified] = np.minimum(np.logaddexp(0.0, excess) / (orders - 1), divergences[amplified])
    return divergences


@numpy_defaults
def epsilon_rdp(
    rate: float,
    noise_multiplier: float,
    count: int,
    delta: float,
    *,
    orders: Sequence[float] | _Array = ORDERS,
    adjacency: Adjacency | None = None,
) -> float:
    """Return epsilon of `count` sampled releases by Renyi accounting, over the given orders.

    Source: as `rdp`; conversion by Canonne, Kamath & Steinke 2020, Proposition 12.
    """
    total = at_least("count", count, 0) * rdp(rate, noise_multiplier, orders, adjacency=adjacency)
    return float(np.min(rdp_epsilons(orders, total, delta))) if total.any() else 0.0


@numpy_defaults
def epsilon_pld(rate: float, noise_multiplier: float, count: int, delta: float, *, adjacency: Adjacency | None = None) -> float:
    """Return an upper bound on epsilon of `count` sampled releases by privacy loss distributions; see `fedveil.accounting.pld`.

    A single release has a closed form, valid at any delta.

    Source: Koskela, Jalko & Honkela 2020; Doroshenko et al. 2022, Algorithm 1.
    """
    rate, z, delta = probability("rate", rate), positive("noise_multiplier", noise_multiplier), open_probability("delta", delta)
    if at_least("count", count, 0) == 0 or rate == 0:
        return 0.0
    if count == 1:
        return least_below(lambda e: one_release_delta(rate, z, e, adjacency), delta, epsilon_of(1 / z, delta))
    tail = min(1e-3, 1e-5 * delta)
    return max(pld.epsilon(total, delta) for total in pld.composed([pld.Sampled(rate, z, count)], tail, adjacency))


@numpy_defaults
def one_release_delta(rate: float, noise_multiplier: float, epsilon: float, adjacency: Adjacency | None) -> float:
    """Return the exact delta at epsilon >= 0 of one sampled release in the worse direction; adjacency=None bounds them all."""
    if adjacency is Adjacency.ZERO_OUT:
        return max(one_step_delta(rate, noise_multiplier, epsilon))
    replace = adjacency is Adjacency.REPLACE_ONE
    return float(pld.symmetric_curve(rate, noise_multiplier, np.array([epsilon]), replace=replace)[0])


@numpy_defaults
def one_step_delta(rate: float, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
    """Return the exact delta at epsilon of one sampled release, zero-out: (remove direction, add direction).

    With e^eps = 1 + q (e^eps' - 1): remove is q delta(eps'); add is (1 - (1-q) e^eps) delta(ln(q / (e^-eps - 1 + q))), and 0
    for eps >= -ln(1-q).

    Args:
        rate: sampling probability in [0, 1].
        noise_multiplier: noise std / sensitivity, > 0.
        epsilon: >= 0.

    Source: Balle, Barthe & Gaboardi 2018, Theorem 2; the add direction by exchanging the roles of P and Q.
    """
    rate, mu = probability("rate", rate), 1 / positive("noise_multiplier", noise_multiplier)
    epsilon = non_negative("epsilon", epsilon)
    if rate == 0:
        return 0.0, 0.0
    inner = math.log1p(math.expm1(epsilon) / rate) if epsilon < 700 else epsilon - math.log(rate)
    removed = rate * math.exp(log_delta_of(mu, inner))
    share = rate + math.expm1(-epsilon)
    if share <= 0:
        return removed, 0.0
    return removed, math.exp(epsilon) * share * math.exp(log_delta_of(mu, math.log(rate / share)))
