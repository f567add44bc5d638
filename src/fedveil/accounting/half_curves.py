"""Loss distributions of pairs that are known by their two curves of positive losses, placed on a grid from above.

A pair (P, Q) is determined by delta(epsilon) of (P, Q) and of (Q, P) at epsilon >= 0: the first curve has the positive losses
of P, the second its negative ones, because a loss l of (Q, P) with mass m under Q is a loss -l of (P, Q) with mass m e^-l under
P. Both curves have the same value at 0, so what is left of P's mass has loss 0. Each curve is placed on the grid by connecting
the dots (`fedveil.accounting.pld`), on a subset of the grid that thins out towards large losses: any subset stays above, and gaps
of 1/400 of the loss move its second moment by less than 2e-6 of itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from fedveil.accounting.pld import Pld, connect, interval_masses

_Array = NDArray[np.float64]
_DENSE = 400  # every grid point up to this one, then gaps of 1 / _DENSE of the loss


@dataclass(frozen=True)
class HalfCurve:
    """Mass `probs[i]` at loss `step * (i + 1)` and mass `infinity` at loss infinity, of the first distribution of a pair."""

    probs: _Array
    infinity: float


@dataclass(frozen=True)
class Mixtures:
    """Weighted parts of a pair of Gaussian mixtures in units of the noise std; rows are pairs that the adversary can tell apart.

    points: where each row's likelihood ratio reaches each loss (rows by losses), ascending. first, second: (weights, centres) of
    the two mixtures, each with one entry a row.
    """

    points: _Array
    first: Sequence[tuple[_Array, _Array]]
    second: Sequence[tuple[_Array, _Array]]


@lru_cache(maxsize=64)
def _indices(last: int) -> NDArray[np.int64]:
    found = list(range(min(_DENSE, last) + 1))
    while found[-1] < last:
        found.append(min(found[-1] + max(1, found[-1] // _DENSE), last))
    return np.array(found, dtype=np.int64)


def grid(step: float, highest: float) -> tuple[NDArray[np.int64], _Array]:
    """Multiples of `step` from 0 to `highest` at which a curve is evaluated, and their losses."""
    indices = _indices(max(1, math.ceil(highest / step)))
    return indices, np.asarray(indices * np.float64(step), dtype=np.float64)


def _masses(points: _Array, parts: Sequence[tuple[_Array, _Array]]) -> tuple[_Array, float]:
    """(mass between consecutive points, mass above the last), summed over rows and parts."""
    inside, above = np.zeros(points.shape[1] - 1), 0.0
    for weights, centres in parts:
        shifted = points - centres[:, None]
        inside += weights @ interval_masses(shifted)
        above += float(weights @ ndtr(-shifted[:, -1]))
    return inside, above


def half_curve(indices: NDArray[np.int64], losses: _Array, pair: Mixtures) -> HalfCurve:
    """The positive losses of a pair of mixtures, by connecting the dots; mass beyond the last loss goes to infinity."""
    (p, p_above), (q, q_above) = _masses(pair.points, pair.first), _masses(pair.points, pair.second)
    low, high = connect(losses, p, q)
    dense = np.zeros(int(indices[-1]) + 1)
    dense[indices[:-1]] += low
    dense[indices[1:]] += high
    kept = min(p_above, math.exp(losses[-1]) * q_above)
    dense[-1] += kept
    return HalfCurve(dense[1:], p_above - kept)


def joined(step: float, forward: HalfCurve, backward: HalfCurve, lost: float = 0.0) -> Pld:
    """The loss distribution under P of a pair (P, Q).

    Args:
        step: of the grid.
        forward, backward: the positive losses of (P, Q) and of (Q, P).
        lost: probability with which something is released that was left out: counts as loss infinity.
    """
    size = max(forward.probs.size, backward.probs.size)
    negative, positive = np.zeros(size), np.zeros(size)
    positive[: forward.probs.size] = forward.probs
    n = backward.probs.size
    negative[:n] = backward.probs * np.exp(-step * np.arange(1, n + 1))
    rest = 1.0 - forward.infinity - math.fsum(positive) - math.fsum(negative)
    probs = np.concatenate([negative[::-1], [max(rest, 0.0)], positive])
    return Pld(step, -size, (1 - lost) * probs, lost + (1 - lost) * forward.infinity)


def second_moment(losses: _Array, pair: Mixtures) -> float:
    """Roughly the mean square of the positive losses of a pair, from a few losses."""
    inside, above = _masses(pair.points, pair.first)
    return float(inside @ (losses[:-1] * losses[1:])) + above * float(losses[-1]) ** 2
