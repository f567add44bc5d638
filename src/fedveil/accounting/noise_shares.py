"""Noise in shares on a grid: how far the sum of n rounded Gaussians is from a rounded Gaussian.

Each of n parties adds round(N(0, s^2)) to integer data, s in grid steps. At every integer the mass function of the total noise is
within a factor e^(+-kappa) of that of round(N(0, n s^2) + V), V independent, a sum of n - 1 uniforms on +-1/2: post-processing of
the continuous Gaussian of variance n s^2. kappa = -sum_(k<n) ln(1 - 2 sum_(m>=1) e^(-2 pi^2 s^2 m^2 k/(k+1))). Proof:
docs/privacy-theorems.md, "Noise in shares".

The shares are rounded to nearest. Clamping a share breaks the statement; reducing the sum modulo a number does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.special import logsumexp

from fedveil.accounting._check import at_least, non_negative, numpy_defaults, positive
from fedveil.errors import ConfigError

LEAST_STEPS = 4.0
"""Least std of a share, in grid steps: from here on the slack of any run is below 1e-50."""

_LARGEST_CHUNK = 2**16


@numpy_defaults
def log_kappa(steps: float, shares: int) -> float:
    """ln kappa per coordinate of one release; -inf for a single share, inf where the statement says nothing.

    Args:
        steps: std of one share in grid steps, s > 0. shares: n >= 1.
    """
    s, n = positive("steps", steps), at_least("shares", shares, 1)
    logs = [-math.inf]
    for start in range(1, n, _LARGEST_CHUNK):
        k = np.arange(start, min(start + _LARGEST_CHUNK, n), dtype=np.float64)
        a = 2 * math.pi**2 * s * s * (k / (k + 1))
        m = np.arange(2, 2 + math.ceil(math.sqrt(800 / float(a.min()))), dtype=np.float64)
        log_r = math.log(2) - a + np.log1p(np.exp(-a[:, None] * (m * m - 1)).sum(axis=1))
        if np.any(log_r >= 0):
            return math.inf
        r = np.exp(log_r)
        with np.errstate(divide="ignore"):
            exact = np.log(-np.log1p(-r))
        logs.append(float(logsumexp(np.where(log_r < -36, log_r + r, exact))))
    return float(logsumexp(logs))


def kappa(steps: float, shares: int) -> float:
    """The largest |ln| of the ratio of mass functions, per coordinate of one release; arguments as `log_kappa`.

    It is 0 where the logarithm is below what a float can hold.
    """
    return math.exp(log_kappa(steps, shares)) * (1 + 1e-12)


def delta_with_shares(delta_of: Callable[[float], float], epsilon: float, steps: float, shares: int, coordinates: int) -> float:
    """delta(epsilon) <= e^(kappa d) delta_Gauss(epsilon - 2 kappa d), for any privacy curve proven of continuous noise.

    Args:
        delta_of: delta at epsilon >= 0 of the run with continuous Gaussian noise of std sqrt(n) s.
        epsilon: >= 0; at epsilon < 2 kappa d the answer is 1.
        steps, shares: as `log_kappa`. coordinates: d >= 0, of all releases together.
    """
    epsilon, d = non_negative("epsilon", epsilon), at_least("coordinates", coordinates, 0)
    slack = kappa(steps, shares) * d if d else 0.0
    if epsilon < 2 * slack or math.isinf(slack):
        return 1.0
    return min(1.0, math.exp(slack) * delta_of(epsilon - 2 * slack))


def share_slack(steps: float, shares: int, coordinates: int) -> float:
    """kappa d of a run whose shares have a std of at least 4 grid steps: charge the plain Gaussian.

    Epsilon grows by twice this and delta by a factor e^slack, both below what a printed number shows.

    Args:
        steps: std of one share in grid steps, >= 4. shares: n >= 1. coordinates: d >= 0, of all releases together.

    Raises:
        ConfigError: fewer than 4 steps a share.
    """
    if not steps >= LEAST_STEPS:
        raise ConfigError(
            f"a share of the noise has a std of {steps:g} grid steps, and the sum of shares is charged as a Gaussian from "
            f"{LEAST_STEPS:g} on: take a finer grid, more noise or fewer shares"
        )
    return kappa(steps, shares) * at_least("coordinates", coordinates, 0)
