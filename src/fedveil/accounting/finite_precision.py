"""The cost of finite precision: floating-point sums, noise in rounded shares, and inexact samplers.

With unit roundoff u (2^-24 in float32, 2^-53 in float64) m operations err by at most gamma_m = m u / (1 - m u) (Higham 2002,
Lemma 3.1). Clipping in floating point leaves a norm of up to C (1 + e_n). Each of the two sums of up to B contributions errs by
up to B gamma_m of that, and rounding to the grid by up to h sqrt(d) / 2:

    sensitivity = C (1 + e_n) (1 + 2 B gamma_m) + h sqrt(d)          (zero-out; replace-one has 2 in place of the first 1).

If each contribution is truncated towards zero to the grid and integers are added instead, neither sum nor grid has an error.

The caller must enforce that B is a cap (contributions beyond it are dropped by a rule that reads no data; under sampling, a rule
on who may take part, not on who does), that the clip is rounded down to a float32, and that non-finite contributions are zero.

Each of n parties adds round(N(0, s^2)) to integer data, s in grid steps. At every integer the mass function of the total noise is
within a factor e^(+-kappa) of that of round(N(0, n s^2) + V), V independent, a sum of n - 1 uniforms on +-1/2: post-processing of
the continuous Gaussian of variance n s^2. kappa = -sum_(k<n) ln(1 - 2 sum_(m>=1) e^(-2 pi^2 s^2 m^2 k/(k+1))). Proof:
docs/privacy-theorems.md, "Noise in shares".

The shares are rounded to nearest. Clamping a share breaks the statement; reducing the sum modulo a number does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import numpy as np
import scipy

from fedveil.accounting._numbers import at_least, non_negative, numpy_defaults, open_probability, positive, probability
from fedveil.accounting.types import small
from fedveil.errors import ConfigError

Precision = Literal["float32", "float64"]
Order = Literal["any", "pairwise"]
_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}
_UP = 1 + 1e-15  # covers the rounding of these formulas themselves


def _roundoff(precision: Precision) -> float:
    if precision not in _ROUNDOFF:
        raise ConfigError(f"precision must be float32 or float64, got {precision!r}")
    return _ROUNDOFF[precision]


def gamma(operations: int, precision: Precision) -> float:
    """Return gamma_m = m u / (1 - m u), the relative error of m operations in a row.

    Args:
        operations: m >= 0, with m u < 1. precision: float32 or float64.

    Source: Higham 2002, Lemma 3.1.
    """
    total = at_least("operations", operations, 0) * _roundoff(precision)
    if total >= 1:
        raise ConfigError(
            f"operations = {operations} is too many: the rounding error of {precision} is bounded for fewer than "
            f"{1 / _roundoff(precision):.3g} operations in a row: add up in float64, or pairwise"
        )
    return total / (1 - total)


def additions(terms: int, order: Order) -> int:
    """Return the number of additions per term: the number of terms in any order, its ceil(log2) pairwise.

    Args:
        terms: >= 1. order: pairwise only if the implementation guarantees it.
    """
    terms = at_least("terms", terms, 1)
    if order not in ("any", "pairwise"):
        raise ConfigError(f"order must be any or pairwise, got {order!r}")
    return terms if order == "any" else (terms - 1).bit_length()


def norm_excess(dimension: int, precision: Precision, order: Order = "any") -> float:
    """Return e_n: a contribution clipped in floating point has a norm of at most C (1 + e_n).

    The norm is computed in `precision` and stored, like scale and product, in float32:
    (1 + u32)^2 / ((1 - u32) sqrt(1 - gamma_(m+1))) - 1, and a factor 1 / (1 - u64) for a root taken in float64.

    Args:
        dimension: d >= 1. precision: of the sum of squares. order: of the additions.
    """
    u32 = _ROUNDOFF["float32"]
    error = gamma(additions(dimension, order) + 1, precision)
    if error >= 1:
        raise ConfigError(
            f"dimension = {dimension} is too large: the rounding error of a norm in {precision} has no bound there: "
            f"add up in float64, or pairwise"
        )
    root = _ROUNDOFF["float64"] if precision == "float64" else 0.0
    log = 2 * math.log1p(u32) - math.log1p(-u32) - math.log1p(-root) - 0.5 * math.log1p(-error)
    return math.expm1(log) * _UP


def sum_error(contributions: int, precision: Precision, order: Order = "any", *, weighted: bool = False) -> float:
    """Return 2 B gamma_m, by which rounding increases the distance of two sums of B contributions of norm 1.

    Args:
        contributions: B >= 1, an enforced cap. precision: of the sum. order: of the additions.
        weighted: each contribution is multiplied by a weight inside the sum, which is one more operation.
    """
    operations = additions(contributions, order) + (1 if weighted else 0)
    return 2 * contributions * gamma(operations, precision) * _UP


_LEAST_STEPS = 4.0
"""Least std of a share, in grid steps: at or above it the slack of any run is below 1e-50."""

_LARGEST_CHUNK = 2**16


@numpy_defaults
def log_kappa(steps: float, shares: int) -> float:
    """Return ln kappa per coordinate of one release; -inf for a single share, inf if the statement gives no bound.

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
        logs.append(float(scipy.special.logsumexp(np.where(log_r < -36, log_r + r, exact))))
    return float(scipy.special.logsumexp(logs))


def kappa(steps: float, shares: int) -> float:
    """Return the largest |ln| of the ratio of mass functions, per coordinate of one release; arguments as in `log_kappa`.

    It is 0 on underflow.
    """
    return math.exp(log_kappa(steps, shares)) * (1 + 1e-12)


def delta_with_shares(delta_of: Callable[[float], float], epsilon: float, steps: float, shares: int, coordinates: int) -> float:
    """Return the bound e^(kappa d) delta_Gauss(epsilon - 2 kappa d) on delta, for any privacy curve of continuous noise.

    Args:
        delta_of: delta at epsilon >= 0 of the run with continuous Gaussian noise of std sqrt(n) s.
        epsilon: >= 0; for epsilon < 2 kappa d the result is 1.
        steps, shares: as in `log_kappa`. coordinates: d >= 0, of all releases together.
    """
    epsilon, d = non_negative("epsilon", epsilon), at_least("coordinates", coordinates, 0)
    slack = kappa(steps, shares) * d if d else 0.0
    if epsilon < 2 * slack or math.isinf(slack):
        return 1.0
    return min(1.0, math.exp(slack) * delta_of(epsilon - 2 * slack))


def share_slack(steps: float, shares: int, coordinates: int) -> float:
    """Return kappa d of a run whose shares have a std of at least 4 grid steps, so that the plain Gaussian may be charged.

    Epsilon grows by twice this and delta by a factor e^slack; neither changes a printed digit.

    Args:
        steps: std of one share in grid steps, >= 4. shares: n >= 1. coordinates: d >= 0, of all releases together.

    Raises:
        ConfigError: fewer than 4 steps per share.
    """
    if not steps >= _LEAST_STEPS:
        raise ConfigError(
            f"a share of the noise has a std of {steps:g} grid steps, and the sum of shares is charged as a Gaussian from "
            f"{_LEAST_STEPS:g} on: take a finer grid, more noise or fewer shares"
        )
    return kappa(steps, shares) * at_least("coordinates", coordinates, 0)


_LARGEST_PART = 0.01


def total_variation(n: int) -> float:
    """Return a bound on the total variation between one draw of n coordinates by `fedveil.mechanism.sampler` and its ideal law.

    Rounding adds nothing. The words are distinct blocks of a permutation of 2^128 values, whereas ideal words may repeat: the
    distance is at most m (m - 1) / 2^129 for m pairs, 2^-84 at 11 million coordinates. The bound also rests on the usual
    assumption that AES-256 and shake_256 with a secret key cannot be told from random.

    Source: PRP/PRF switching lemma (Bellare & Rogaway 2006, Lemma 1).
    """
    pairs = (n + 1) // 2
    return pairs * (pairs - 1) * 2.0**-129


def sampler_delta(variation: float, coordinates: int, releases: int, epsilon: float, delta: float) -> float:
    """Return the addition to delta for an inexact sampler: (1 + e^epsilon) tau d T, which must be below 1 % of delta.

    For both neighbouring inputs the law of all releases is within tau d T of the ideal one, even if rounds depend on earlier
    ones, so P'(S) <= P(S) + tau d T <= e^eps Q(S) + delta + tau d T <= e^eps Q'(S) + delta + (1 + e^eps) tau d T.

    Args:
        variation: tau in [0, 1], total variation between the sampler's law of one coordinate and the ideal one.
        coordinates: d >= 0 of a release. releases: T >= 0. epsilon: >= 0, delta: in (0, 1), proven for ideal noise.

    Raises:
        ConfigError: the addition is 1 % of delta or more.
    """
    tau, delta = probability("variation", variation), open_probability("delta", delta)
    total = tau * at_least("coordinates", coordinates, 0) * at_least("releases", releases, 0)
    epsilon = non_negative("epsilon", epsilon)
    added = total * (1 + math.exp(epsilon)) if epsilon < 700 else (math.inf if total > 0 else 0.0)
    if not added < _LARGEST_PART * delta:
        raise ConfigError(
            f"the noise sampler's error (total variation {tau:g} a coordinate) adds {added:.3g} to delta = {small(delta)}, where "
            f"less than 1 % of it is allowed: use a more exact sampler, fewer coordinates or releases, or a larger delta"
        )
    return added
