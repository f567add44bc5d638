"""Exact binomial intervals, and the largest epsilon or mu that given error rates of an attack refute."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri

from fedveil.accounting import gaussian
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]


def check_level(alpha: float) -> float:
    """`alpha` if it is a usable error probability, in (0, 0.5], else ConfigError."""
    if not 0 < alpha <= 0.5:
        raise ConfigError(f"alpha (chance of a wrong refutation) must lie in (0, 0.5], got {alpha}")
    return alpha


def check_delta(delta: float) -> float:
    """`delta` if it lies in [0, 1), else ConfigError."""
    if not 0 <= delta < 1:
        raise ConfigError(f"delta must lie in [0, 1), got {delta}")
    return delta


def clopper_pearson_upper(successes: ArrayLike, trials: ArrayLike, alpha: float) -> Floats:
    """One-sided exact upper bound on a binomial probability.

    Args:
        successes: counts in [0, trials], any shape (fractions allowed, for planning).
        trials: number of trials >= 1, broadcast against `successes`.
        alpha: chance that the bound lies below the truth, in (0, 0.5].

    Source: Clopper & Pearson 1934.
    """
    k, n = _counts(successes, trials)
    inner = betaincinv(k + 1, np.maximum(n - k, 0.5), 1 - check_level(alpha))
    return np.where(k >= n, 1.0, inner)


def _counts(successes: ArrayLike, trials: ArrayLike) -> tuple[Floats, Floats]:
    k, n = np.broadcast_arrays(np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64))
    if not (np.all(n >= 1) and np.all(k >= 0) and np.all(k <= n)):
        raise ConfigError(f"counts must satisfy 0 <= successes <= trials and trials >= 1, got {k.tolist()} of {n.tolist()}")
    return k, n


def epsilon_from_rates(fpr: ArrayLike, fnr: ArrayLike, delta: float) -> Floats:
    """The largest epsilon that error rates (fpr, fnr) refute at `delta`; 0 where they refute nothing.

    Args:
        fpr: upper bounds on the false-positive rate, in (0, 1].
        fnr: upper bounds on the false-negative rate, in (0, 1].
        delta: in [0, 1).

    Source: Kairouz, Oh & Viswanath 2015, Theorem 2.1: (epsilon, delta)-DP forces fpr + e^epsilon fnr >= 1 - delta and vice versa.
    """
    p, q = np.asarray(fpr, dtype=np.float64), np.asarray(fnr, dtype=np.float64)
    rest = 1 - check_delta(delta)
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.where(rest - q > 0, np.log(np.maximum(rest - q, 0) / p), 0.0)
        other = np.where(rest - p > 0, np.log(np.maximum(rest - p, 0) / q), 0.0)
    return np.maximum(np.maximum(one, other), 0.0)


def mu_from_rates(fpr: ArrayLike, fnr: ArrayLike) -> Floats:
    """The largest mu of Gaussian DP that error rates refute: Phi^-1(1 - fpr) - Phi^-1(fnr), 0 where negative.

    Source: Dong, Roth & Su 2022, Definition 2.6.
    """
    p, q = np.asarray(fpr, dtype=np.float64), np.asarray(fnr, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        mu = np.where((p >= 1) | (q >= 1), 0.0, -ndtri(p) - ndtri(q))
    return np.maximum(mu, 0.0)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Epsilon at `delta` of a mu-GDP curve; at delta = 0 a bound on mu > 0 gives inf, so delta must be > 0.

    Valid as a lower bound on epsilon only where the mechanism's trade-off curve is Gaussian.
    """
    if not 0 < delta < 1:
        raise ConfigError(f"a Gaussian trade-off curve turns into an epsilon only at delta in (0, 1), got {delta}")
    return gaussian.epsilon_of(mu, delta)


def epsilon_ceiling(n: int, alpha: float = 0.05, delta: float = 0.0) -> float:
    """The largest epsilon that n error-free runs in each world can show (Clopper-Pearson, alpha / 2 on each rate).

    Args:
        n: runs per world, >= 1.
        alpha: error probability, in (0, 0.5].
        delta: in [0, 1).
    """
    worst = clopper_pearson_upper(0, n, alpha / 2)
    return float(epsilon_from_rates(worst, worst, delta))
