"""What floating-point arithmetic adds to the sensitivity of a sum of clipped gradients that is rounded to a grid afterwards.

With unit roundoff u (2^-24 in float32, 2^-53 in float64) m operations err by at most gamma_m = m u / (1 - m u) (Higham 2002,
Lemma 3.1). Clipping in floating point leaves a norm of up to C (1 + e_n). Each of the two sums of up to B contributions errs by
up to B gamma_m of that, and rounding to the grid by up to h sqrt(d) / 2:

    sensitivity = C (1 + e_n) (1 + 2 B gamma_m) + h sqrt(d)          (zero-out; replace-one has 2 in place of the first 1).

Truncating each contribution towards zero to the grid and adding whole numbers instead has no error of the sum and of the grid.

For the caller to enforce: B is a cap (what exceeds it is dropped by a rule that reads no data; under sampling, a rule on who may
take part, not on who came), the clip is rounded down to a float32, and a contribution that is not finite counts as zero.
"""

from __future__ import annotations

import math
from typing import Literal

from fedveil.accounting._check import at_least, non_negative
from fedveil.accounting.types import Adjacency
from fedveil.errors import ConfigError

Precision = Literal["float32", "float64"]
Order = Literal["any", "pairwise"]
_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}
_LEAST_CLIP = 1e-10
_UP = 1 + 1e-15  # covers the rounding of these formulas themselves


def _roundoff(precision: Precision) -> float:
    if precision not in _ROUNDOFF:
        raise ConfigError(f"precision must be float32 or float64, got {precision!r}")
    return _ROUNDOFF[precision]


def gamma(operations: int, precision: Precision) -> float:
    """gamma_m = m u / (1 - m u): the relative error of m operations in a row.

    Args:
        operations: m >= 0, with m u < 1. precision: float32 or float64.

    Source: Higham 2002, Lemma 3.1.
    """
    total = at_least("operations", operations, 0) * _roundoff(precision)
    if total >= 1:
        raise ConfigError(f"{operations} operations in {precision} have no error bound: add up in float64, or pairwise")
    return total / (1 - total)


def additions(terms: int, order: Order) -> int:
    """How many additions a term goes through: the number of terms in any order, ceil(log2) of it pairwise.

    Args:
        terms: >= 1. order: pairwise only where the implementation promises it.
    """
    terms = at_least("terms", terms, 1)
    if order not in ("any", "pairwise"):
        raise ConfigError(f"order must be any or pairwise, got {order!r}")
    return terms if order == "any" else (terms - 1).bit_length()


def norm_excess(dimension: int, precision: Precision, order: Order = "any") -> float:
    """e_n: a contribution clipped in floating point has a norm of at most C (1 + e_n).

    The norm is computed in `precision` and stored, like scale and product, in float32:
    (1 + u32)^2 / ((1 - u32) sqrt(1 - gamma_(m+1))) - 1, and a factor 1 / (1 - u64) for a root taken in float64.

    Args:
        dimension: d >= 1. precision: of the sum of squares. order: in which the squares are added.
    """
    u32 = _ROUNDOFF["float32"]
    error = gamma(additions(dimension, order) + 1, precision)
    if error >= 1:
        raise ConfigError(f"the norm of {dimension} numbers in {precision} has no error bound: add up in float64, or pairwise")
    root = _ROUNDOFF["float64"] if precision == "float64" else 0.0
    log = 2 * math.log1p(u32) - math.log1p(-u32) - math.log1p(-root) - 0.5 * math.log1p(-error)
    return math.expm1(log) * _UP


def sum_error(contributions: int, precision: Precision, order: Order = "any", *, weighted: bool = False) -> float:
    """2 B gamma_m: how far two rounded sums of B contributions of norm 1 are further apart than the exact ones.

    Args:
        contributions: B >= 1, an enforced cap. precision: of the sum. order: in which contributions are added.
        weighted: each is multiplied by a weight inside the sum: one more operation.
    """
    operations = additions(contributions, order) + (1 if weighted else 0)
    return 2 * contributions * gamma(operations, precision) * _UP


def summed_sensitivity(
    clip: float,
    dimension: int,
    contributions: int,
    grid_step: float,
    *,
    precision: Precision = "float64",
    order: Order = "any",
    adjacency: Adjacency = Adjacency.ZERO_OUT,
) -> float:
    """L2 sensitivity of a floating-point sum of clipped contributions, rounded to nearest on a grid.

    Args:
        clip: C >= 1e-10. dimension: d >= 1. contributions: B >= 1, an enforced cap. grid_step: h >= 0, in the units of the clip.
        precision, order: of norms and sums. adjacency: replace-one doubles what one contribution moves, not the error of the sum.

    Raises:
        ConfigError: values out of range, or so many terms that nothing bounds their sum.
    """
    each = _checked_clip(clip) * (1 + norm_excess(dimension, precision, order))
    moved = adjacency.factor + sum_error(contributions, precision, order)
    return (each * moved + non_negative("grid_step", grid_step) * math.sqrt(dimension)) * _UP


def _checked_clip(clip: float) -> float:
    if not (clip >= _LEAST_CLIP and math.isfinite(clip)):
        raise ConfigError(f"clip must be finite and at least {_LEAST_CLIP:g} (below it float32 loses bits), got {clip}")
    return float(clip)
