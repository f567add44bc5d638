"""The exact Gaussian mechanism, and composition theorems.

Everything follows from one identity. With x = epsilon / mu - mu / 2 and the Mills ratio M(s) = (1 - Phi(s)) / phi(s),

    delta(epsilon; mu) = Phi(-x) - e^epsilon Phi(-x - mu) = phi(x) (M(x) - M(x + mu)),

because e^epsilon phi(x + mu) = phi(x). The right-hand side neither overflows nor, for small mu, cancels once M(x) - M(x + mu)
is written as the integral of -M'(s) = 1 - s M(s).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy
from numpy.typing import NDArray

from fedveil.accounting._numbers import (
    crossing,
    non_negative,
    numpy_defaults,
    open_probability,
    positive,
    probability,
    vector,
)
from fedveil.errors import ConfigError

_LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)
_SQRT_HALF_PI = math.sqrt(math.pi / 2)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
_ASYMPTOTIC_FROM = 30.0  # beyond it, 12 terms of the asymptotic series are exact to double precision


def _mills(s: float) -> float:
    return _SQRT_HALF_PI * float(scipy.special.erfcx(s / math.sqrt(2)))


def _mills_slope(s: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return -M'(s) = 1 - s M(s) for s >= -1, without cancellation for large s."""
    direct = 1 - s * _SQRT_HALF_PI * scipy.special.erfcx(s / math.sqrt(2))
    inverse = 1 / np.maximum(s, _ASYMPTOTIC_FROM) ** 2
    series = np.zeros_like(s)
    for k in range(12, 0, -1):
        series = (2 * k - 1) * inverse * (1 - series)
    return np.where(s < _ASYMPTOTIC_FROM, direct, series)


def _mills_drop(x: float, mu: float) -> float:
    """Return M(x) - M(x + mu) for x >= -1/2, or for x > 0 if mu > 1."""
    if mu > 1:
        return _mills(x) - _mills(x + mu)
    return 0.5 * mu * float(_WEIGHTS @ _mills_slope(x + 0.5 * mu * (_NODES + 1)))


@numpy_defaults
def log_delta_of(mu: float, epsilon: float) -> float:
    """Return the natural logarithm of `delta_of`, finite even where delta itself underflows (-inf at mu = 0).

    Args:
        mu: Gaussian-DP parameter, >= 0.
        epsilon: >= 0.

    Source: Balle & Wang 2018, Theorem 8; Dong, Roth & Su 2022, Corollary 2.13.
    """
    mu, epsilon = non_negative("mu", mu), non_negative("epsilon", epsilon)
    if mu == 0:
        return -math.inf
    x = epsilon / mu - mu / 2
    if x <= 0 and mu > 1:
        complement = scipy.special.ndtr(x) + math.exp(-x * x / 2 - _LOG_SQRT_2PI) * _mills(x + mu)
        return math.log1p(-float(complement))
    return -x * x / 2 - _LOG_SQRT_2PI + math.log(_mills_drop(x, mu))


@numpy_defaults
def log_deltas_of(mu: float, epsilons: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `log_delta_of` for an array of epsilons >= 0 at one mu > 0."""
    mu = positive("mu", mu)
    x = np.asarray(epsilons, dtype=np.float64) / mu - mu / 2
    if mu <= 1:
        drop = 0.5 * mu * (_mills_slope(x[..., None] + 0.5 * mu * (_NODES + 1)) @ _WEIGHTS)
        return np.asarray(-x * x / 2 - _LOG_SQRT_2PI + np.log(drop), dtype=np.float64)
    beyond = _SQRT_HALF_PI * scipy.special.erfcx((x + mu) / math.sqrt(2))
    right, left = np.maximum(x, 0.0), np.minimum(x, 0.0)
    far = (
        -right * right / 2
        - _LOG_SQRT_2PI
        + np.log(_SQRT_HALF_PI * scipy.special.erfcx(right / math.sqrt(2)) - np.where(x > 0, beyond, 0.0))
    )
    near = np.log1p(-(scipy.special.ndtr(left) + np.exp(-left * left / 2 - _LOG_SQRT_2PI) * np.where(x > 0, 0.0, beyond)))
    return np.where(x > 0, far, near)


def delta_of(mu: float, epsilon: float) -> float:
    """Return the exact delta at `epsilon` of a mu-GDP Gaussian mechanism: Phi(-e/mu + mu/2) - exp(e) Phi(-e/mu - mu/2).

    Args:
        mu: Gaussian-DP parameter, >= 0.
        epsilon: >= 0.

    Source: Balle & Wang 2018, Theorem 8; Dong, Roth & Su 2022, Corollary 2.13.
    """
    return math.exp(log_delta_of(mu, epsilon))


@numpy_defaults
def epsilon_of(mu: float, delta: float) -> float:
    """Return the exact epsilon at `delta` of a mu-GDP Gaussian mechanism, the inverse of `delta_of` (0 if delta suffices alone).

    Args:
        mu: Gaussian-DP parameter, >= 0.
        delta: in [0, 1); at delta = 0 the result is inf unless mu = 0.
    """
    mu, delta = non_negative("mu", mu), probability("delta", delta)
    if mu == 0 or delta == 1:
        return 0.0
    if delta == 0:
        return math.inf
    target = math.log(delta)
    if log_delta_of(mu, 0.0) <= target:
        return 0.0
    high = float(-scipy.special.ndtri(delta)) + mu / 2  # delta <= Phi(-x)
    high = max(high * (1 + 1e-9), 1e-300)
    low = high / 2
    while low > 0 and log_delta_of(mu, low * mu) <= target:
        low, high = low / 2, low
    return crossing(lambda y: log_delta_of(mu, y * mu) - target, low, high) * mu


@numpy_defaults
def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu whose Gaussian mechanism is (epsilon, delta)-DP, the inverse of `delta_of` in mu.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
    """
    epsilon, delta = non_negative("epsilon", epsilon), open_probability("delta", delta)
    if epsilon == 0:
        return 2 * math.sqrt(2) * float(scipy.special.erfinv(delta))
    target = math.log(delta)

    def excess(log_mu: float) -> float:
        return log_delta_of(math.exp(log_mu), epsilon) - target

    low = high = math.log(epsilon / (math.sqrt(2 * math.log(1.25 / delta)) + math.sqrt(2 * epsilon)))
    while excess(low) > 0:
        low -= 1
    while excess(high) < 0:
        high += 1
    if low == high:
        return math.exp(low)
    return math.exp(crossing(excess, low, high))


@numpy_defaults
def tpr(mu: float, fpr: float) -> float:
    """Return the largest true-positive rate of attacks on a mu-GDP release at false-positive rate `fpr`: Phi(Phi^-1(fpr) + mu).

    Args:
        mu: Gaussian-DP parameter, >= 0.
        fpr: in [0, 1].

    Source: Dong, Roth & Su 2022, Definition 2.6 (trade-off function G_mu).
    """
    return float(scipy.special.ndtr(scipy.special.ndtri(probability("fpr", fpr)) + non_negative("mu", mu)))


def noise_std_for(epsilon: float, delta: float, sensitivity: float) -> float:
    """Return the smallest Gaussian noise std that makes one release (epsilon, delta)-DP.

    Args:
        epsilon: >= 0.
        delta: in (0, 1).
        sensitivity: L2 sensitivity, >= 0, in the units of the release.

    Source: Balle & Wang 2018, Algorithm 1.
    """
    return non_negative("sensitivity", sensitivity) / mu_of(epsilon, delta)


def classical_noise_multiplier(epsilon: float, delta: float) -> float:
    """Return the textbook calibration sqrt(2 ln(1.25 / delta)) / epsilon, for claims only (it is proven only for epsilon < 1).

    Source: Dwork & Roth 2014, Theorem A.1.
    """
    return math.sqrt(2 * math.log(1.25 / open_probability("delta", delta))) / positive("epsilon", epsilon)


_Numbers = Sequence[float] | NDArray[np.float64]


def _pair(sensitivities: _Numbers, stds: _Numbers) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    first, second = vector("sensitivities", sensitivities), vector("stds", stds)
    if first.size != second.size:
        raise ConfigError(f"one noise std per group: got {first.size} sensitivities and {second.size} stds")
    return first, second


@numpy_defaults
def mu_groups(sensitivities: _Numbers, stds: _Numbers) -> float:
    """Return mu of one release with independently clipped groups: sqrt(sum (Delta_l / sigma_l)^2).

    Args:
        sensitivities: L2 sensitivity of each group, >= 0.
        stds: noise std of each group, >= 0; a group with sensitivity but no noise makes mu infinite.

    Source: scaling group l by 1/sigma_l turns the release into one isotropic Gaussian with shift (x_l / sigma_l)_l.
    """
    deltas, sigmas = _pair(sensitivities, stds)
    if np.any((sigmas == 0) & (deltas > 0)):
        return math.inf
    used = deltas > 0
    return float(np.linalg.norm(deltas[used] / sigmas[used]))


@numpy_defaults
def mu_groups_joint(sensitivities: _Numbers, stds: _Numbers, joint: float) -> float:
    """Return mu of one release with a bound on each group's shift and the bound `joint` on the whole shift.

    The worst shift maximises sum (x_l / sigma_l)^2 over x_l <= Delta_l and sum x_l^2 <= joint^2: a fractional knapsack in
    x_l^2, filled by the smallest sigma first. For replace-one, pass doubled clips and a doubled joint bound: the difference of
    two points of a symmetric convex set lies in twice the set.

    Args:
        sensitivities: L2 sensitivity of each group, >= 0.
        stds: noise std of each group, >= 0.
        joint: L2 sensitivity of the whole release, >= 0.
    """
    deltas, sigmas = _pair(sensitivities, stds)
    remaining = non_negative("joint", joint) ** 2
    total = 0.0
    for index in np.argsort(sigmas, kind="stable"):
        moved = min(remaining, float(deltas[index]) ** 2)
        if moved == 0:
            continue
        if sigmas[index] == 0:
            return math.inf
        total += moved / float(sigmas[index]) ** 2
        remaining -= moved
    return math.sqrt(total)


@numpy_defaults
def naive(epsilons: _Numbers, deltas: _Numbers) -> tuple[float, float]:
    """Return basic composition: (sum of epsilons, sum of deltas capped at 1).

    Source: Dwork & Roth 2014, Theorem 3.16.
    """
    first, second = vector("epsilons", epsilons), vector("deltas", deltas)
    if first.size != second.size:
        raise ConfigError(f"one delta per epsilon: got {first.size} epsilons and {second.size} deltas")
    return math.fsum(first), min(1.0, math.fsum(second))


@numpy_defaults
def gdp(mus: _Numbers) -> float:
    """Return mu of the (adaptive) composition of mu_t-GDP releases: sqrt(sum mu_t^2).

    Source: Dong, Roth & Su 2022, Corollary 3.3.
    """
    return float(np.linalg.norm(vector("mus", mus)))


@numpy_defaults
def zcdp(rhos: _Numbers) -> float:
    """Return the zCDP parameter of the composition, the sum of the parameters.

    Source: Bun & Steinke 2016, Lemma 2.3.
    """
    return math.fsum(vector("rhos", rhos))


def zcdp_epsilon(rho: float, delta: float) -> float:
    """Return epsilon at `delta` of rho-zCDP by the classical conversion rho + 2 sqrt(rho ln(1/delta)).

    Source: Bun & Steinke 2016, Proposition 1.3.
    """
    rho = non_negative("rho", rho)
    return rho + 2 * math.sqrt(rho * math.log(1 / open_probability("delta", delta)))


@numpy_defaults
def rdp(curves: Sequence[_Numbers]) -> NDArray[np.float64]:
    """Return the Renyi curve of the composition on a common grid of orders, the sum of the curves.

    Source: Mironov 2017, Proposition 1.
    """
    if len({len(curve) for curve in curves}) != 1:
        raise ConfigError(f"Renyi curves must share one grid of orders, got lengths {sorted({len(c) for c in curves})}")
    total: NDArray[np.float64] = np.sum(np.asarray(curves, dtype=np.float64), axis=0)
    return total


@numpy_defaults
def rdp_epsilons(orders: _Numbers, values: _Numbers, delta: float) -> NDArray[np.float64]:
    """Return the epsilon that each order proves: R(a) + ln(1 - 1/a) - ln(delta a) / (a - 1), at least 0.

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
    """Return the smallest epsilon over the grid of orders; see `rdp_epsilons`."""
    return float(np.min(rdp_epsilons(orders, values, delta)))


@numpy_defaults
def rdp_log_delta(orders: _Numbers, values: _Numbers, epsilon: float) -> float:
    """Return the logarithm of the smallest delta that a Renyi curve proves at `epsilon`, at most 0.

    Source: Canonne, Kamath & Steinke 2020, Proposition 12, solved for delta.
    """
    alphas, curve = np.asarray(orders, dtype=np.float64), np.asarray(values, dtype=np.float64)
    logs = (alphas - 1) * (curve - non_negative("epsilon", epsilon) + np.log1p(-1 / alphas)) - np.log(alphas)
    return min(0.0, float(np.min(logs)))
