"""Gaussian releases on a secret sample of known size: when a client leaves the sample, another one takes its place.

Let p be the part of the clients that is in the sample, noise std z and clip 1. Coupling "client i is not in the sample" with "i
is in it instead of j" gives (1-p) N(a) + p N(b) against (1-p) N(a) + p N(0), with |a|, |b| <= 1: the base moves with membership.
The worst case at every epsilon >= 0 (docs/privacy-theorems.md, "The number of participants is seen"):

- data against zeroed: others -1, the client +1, that is (1-p) N(0) + p N(2) against (1-p) N(0) + p N(1) (`wide`);
- zeroed against data: (1-p) N(0) + p N(1) against N(0) (`narrow`), also for replace-one, both ways, with sensitivity 2C = 1.

Both curves are suprema of functions linear in p. So they are convex in p, and a law of p may be replaced by one on fewer values
with the same mean: the bound stays above. They also grow with p.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp

from fedveil.accounting._check import numpy_defaults
from fedveil.accounting.gaussian import log_deltas_of
from fedveil.accounting.half_curves import HalfCurve, Mixtures, grid, half_curve, joined, second_moment
from fedveil.accounting.pld import LARGEST_LOSS, Pld
from fedveil.accounting.subsampled import log_convex
from fedveil.accounting.types import Adjacency

_Array = NDArray[np.float64]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_TINY_NOISE = 0.05
_ORDERS_PER_STD = 200.0  # beyond it the unsampled divergence is used


@dataclass(frozen=True)
class SwappedPairs:
    """`count` releases on samples that hold the part `shares[i]` of the clients with probability `weights[i]`, seen by everybody.

    lost: the probability of the tail that the weights leave out; it is added to delta. A share of 0, which is free, is left out.
    """

    shares: tuple[float, ...]
    weights: tuple[float, ...]
    lost: float
    noise_multiplier: float
    count: int

    def spread(self, *, replace: bool) -> float:
        """Rough std of one release's loss."""
        return _spread(dataclasses.replace(self, count=1), not replace)

    def highest(self, tail: float) -> float:
        """A loss beyond which one release keeps less than `tail` of delta."""
        z, p = self.noise_multiplier, np.array(self.shares)
        logs = np.log(p) + np.log(np.array(self.weights)) - math.log(tail)
        x = 2 + z * np.sqrt(2 * np.maximum(logs, 1.0))
        return min(float(np.max(_wide_ratio(p, z, x))), LARGEST_LOSS)

    def losses(self, step: float, highest: float, direction: bool | None, *, replace: bool) -> Pld:
        """The dominating pair; None: the narrow curve both ways under replace-one, else the wide one, which covers everything."""
        one = dataclasses.replace(self, count=1)
        forward = _half(one, step, highest, not replace if direction is None else direction)
        backward = forward if direction is None else _half(one, step, highest, not direction)
        return joined(step, forward, backward, self.lost)


def _wide_ratio(p: _Array, z: float, x: _Array) -> _Array:
    """ln of the ratio of (1-p) N(0) + p N(2) to (1-p) N(0) + p N(1) at x."""
    with np.errstate(divide="ignore"):
        stay, move = np.log1p(-p), np.log(p)
    first, second = np.logaddexp(stay, move + (2 * x - 2) / z**2), np.logaddexp(stay, move + (x - 0.5) / z**2)
    return np.asarray(first - second, dtype=np.float64)


def _narrow_ratio(p: _Array, z: float, x: _Array) -> _Array:
    """ln of the ratio of (1-p) N(0) + p N(1) to N(0) at x."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-p), np.log(p) + (x - 0.5) / z**2), dtype=np.float64)


def _wide_points(p: _Array, z: float, losses: _Array) -> _Array:
    """Where `_wide_ratio` equals each loss >= 0: z^2 ln v with c2 v^2 - e^l c1 v - (e^l - 1)(1-p)/p = 0."""
    log_c2, log_linear = -2 / z**2, losses - 0.5 / z**2
    with np.errstate(divide="ignore"):
        log_constant = losses + np.log(-np.expm1(-losses)) + np.log1p(-p) - np.log(p)
    log_root = 0.5 * np.logaddexp(2 * log_linear, math.log(4) + log_c2 + log_constant)
    return np.asarray(z**2 * (np.logaddexp(log_linear, log_root) - math.log(2) - log_c2), dtype=np.float64)


def _narrow_points(p: _Array, z: float, losses: _Array) -> _Array:
    """Where `_narrow_ratio` equals each loss >= 0."""
    return np.asarray(0.5 + z**2 * np.log1p(np.expm1(losses) / p), dtype=np.float64)


@numpy_defaults
def wide_curve(p: _Array, z: float, epsilons: _Array) -> _Array:
    """delta at epsilon >= 0, data against zeroed, for each share p in (0, 1].

    p (h delta_2C(ln(a/h)) + (1-h) delta_C(ln(b/(1-h)))), a = (1-p)(e^eps - 1)/p, b = e^eps, with the h at which both terms have
    their worst event in common.
    """
    t = _wide_points(p, z, epsilons)
    far, near = (2 * t - 2) / z**2, (t - 1.5) / z**2  # ln(a/h) and ln(b/(1-h))
    rest = np.exp(epsilons - near)  # 1 - h
    first = np.exp(log_deltas_of(2 / z, far)) * -np.expm1(np.minimum(epsilons - near, 0.0))
    return np.asarray(p * (first + rest * np.exp(log_deltas_of(1 / z, np.maximum(near, 0.0)))), dtype=np.float64)


@numpy_defaults
def narrow_curve(p: _Array, z: float, epsilons: _Array) -> _Array:
    """delta at epsilon >= 0, zeroed against data, for each share p in (0, 1]: p delta_C(ln(1 + (e^eps - 1)/p))."""
    return np.asarray(p * np.exp(log_deltas_of(1 / z, np.log1p(np.expm1(epsilons) / p))), dtype=np.float64)


def _mixtures(pairs: SwappedPairs, losses: _Array, *, wide: bool) -> Mixtures:
    p, w, z = np.array(pairs.shares)[:, None], np.array(pairs.weights), pairs.noise_multiplier
    points = (_wide_points if wide else _narrow_points)(p, z, losses) / z
    stay, move, zero = w * (1 - p[:, 0]), w * p[:, 0], np.zeros_like(w)
    shifts = (zero + 2 / z, zero + 1 / z) if wide else (zero + 1 / z, zero)
    return Mixtures(points, [(stay, zero), (move, shifts[0])], [(stay, zero), (move, shifts[1])])


@lru_cache(maxsize=4)  # the two directions of one composition share both halves
def _half(pairs: SwappedPairs, step: float, highest: float, wide: bool) -> HalfCurve:
    indices, losses = grid(step, highest)
    return half_curve(indices, losses, _mixtures(pairs, losses, wide=wide))


@lru_cache(maxsize=256)
def _spread(pairs: SwappedPairs, forward_is_wide: bool) -> float:
    losses = np.append(0.0, np.geomspace(1e-4, 1.0, 120)) * pairs.highest(1e-12)
    return math.sqrt(sum(second_moment(losses, _mixtures(pairs, losses, wide=wide)) for wide in (forward_is_wide, False)))


def _log_half_moments(pairs: SwappedPairs, powers: _Array, highest: float, *, wide: bool) -> _Array:
    """ln E_Q[(L^a - 1 - a (L - 1)) 1{L > 1}] for each power a, L = P/Q the ratio of the wide or narrow pair."""
    p, z = np.array(pairs.shares)[:, None], pairs.noise_multiplier
    low = 1.5 if wide else 0.5  # where L = 1, for every share
    edges = np.linspace(low, highest, max(2, math.ceil((highest - low) / min(z, 2 * z * z)) + 1))
    half = 0.5 * np.diff(edges)[:, None]
    x, widths = (edges[:-1, None] + half * (_NODES + 1)).ravel(), np.log(half * _WEIGHTS).ravel()
    base = -x * x / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi)) + widths + np.log(np.array(pairs.weights))[:, None]
    if wide:
        base = base + _narrow_ratio(p, z, x)
    ratio = (_wide_ratio if wide else _narrow_ratio)(p, z, np.broadcast_to(x, base.shape))
    return np.array([logsumexp(base + log_convex(np.full(1, a), ratio)) for a in powers])


@numpy_defaults
def rdp(pairs: SwappedPairs, orders: _Array, adjacency: Adjacency | None) -> _Array:
    """Renyi divergences of one release at orders > 1, the worse direction; `lost` must be 0.

    ln(1 + a (a-1) int (e^((a-1) eps) delta(eps) + e^(-a eps) delta'(eps)) d eps) / (a-1), delta and delta' the two directions'.
    """
    z = pairs.noise_multiplier
    values = np.asarray(orders / (2 * z * z), dtype=np.float64)  # without amplification
    for low, high in ((1.0, 4.0), (4.0, 16.0), (16.0, 64.0), (64.0, 256.0), (256.0, math.inf)):
        group = (orders > low) & (orders <= high) & (orders <= _ORDERS_PER_STD * z)
        if group.any() and z >= _TINY_NOISE:
            values[group] = np.minimum(values[group], _rdp(pairs, orders[group], adjacency))
    return values


def _rdp(pairs: SwappedPairs, a: _Array, adjacency: Adjacency | None) -> _Array:
    z = pairs.noise_multiplier
    end = max(float(a.max()) + 1, 0.5 - z**2 * math.log(min(pairs.shares))) + 12 * z

    def moments(*, wide: bool) -> tuple[_Array, _Array]:
        up, down = (_log_half_moments(pairs, powers, end, wide=wide) for powers in (a, 1 - a))
        return up, down

    if adjacency is Adjacency.REPLACE_ONE:
        pieces = [moments(wide=False)]
    else:
        (up, down) = moments(wide=True)
        other = (up, down) if adjacency is None else moments(wide=False)
        pieces = [(up, other[1]), (other[0], down)]
    worst = np.max([np.logaddexp(*piece) for piece in pieces], axis=0)
    return np.asarray(np.logaddexp(0.0, worst) / (a - 1), dtype=np.float64)
