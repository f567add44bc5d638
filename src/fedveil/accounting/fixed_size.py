"""Secret samples of fixed size, and Poisson samples of visible size.

Let p be the share of the clients in the sample, noise std z and clip 1. Coupling "client i is not in the sample" with "i is in
it instead of j" gives (1-p) N(a) + p N(b) against (1-p) N(a) + p N(0), with |a|, |b| <= 1: the base moves with membership.
The worst case at every epsilon >= 0 (docs/privacy-theorems.md, "The number of participants is seen"):

- data against zeroed: others -1, the client +1, that is (1-p) N(0) + p N(2) against (1-p) N(0) + p N(1) (`wide`);
- zeroed against data: (1-p) N(0) + p N(1) against N(0) (`narrow`), also for replace-one, both ways, with sensitivity 2C = 1.

Both curves are suprema of functions linear in p, so they are convex in p. A distribution of p may therefore be spread onto fewer
values with the same mean: the bound only grows. Both curves also increase with p.

Both kinds of sample hide who takes part and reveal how many do, so a zeroed client is counted. The count is the same for both
neighbouring inputs, and given a count k the sample is a random k of the N clients: the bound above with p = k / N. A visible
count costs far more than a hidden one. If the sum's noise grows with the number of participants (noise in shares), everybody
sees the count; `noise_multiplier` is then that of the smallest number of participants for which a round is released.

Units: noise std = `noise_multiplier` and sensitivity 1, which is C for zero-out and 2C for replace-one. N excludes clients who
collude with the adversary. Adding or removing a client is not covered: a visible count gives it an atom of infinite loss.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from fedveil.accounting._numbers import at_least, non_negative, numpy_defaults, positive, probability
from fedveil.accounting.gaussian import log_deltas_of
from fedveil.accounting.pld import LARGEST_LOSS, HalfCurve, Mixtures, Pld, grid, half_curve, joined, second_moment
from fedveil.accounting.subsampled import log_convex
from fedveil.accounting.types import Adjacency, FixedSampleGaussian, SeenCountGaussian

_Array = NDArray[np.float64]
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_TINY_NOISE = 0.05
_ORDERS_PER_STD = 200.0  # above it the unsampled divergence is used


@dataclass(frozen=True)
class SwappedPairs:
    """`count` releases on samples of visible size: the share `shares[i]` of the clients with probability `weights[i]`.

    lost: probability of the tail that the weights omit; it is added to delta. A share of 0 costs nothing and is omitted.
    """

    shares: tuple[float, ...]
    weights: tuple[float, ...]
    lost: float
    noise_multiplier: float
    count: int

    def spread(self, *, replace: bool) -> float:
        """Return the rough std of one release's loss."""
        return _spread(dataclasses.replace(self, count=1), not replace)

    def highest(self, tail: float) -> float:
        """Return a loss above which one release contributes less than `tail` to delta."""
        z, p = self.noise_multiplier, np.array(self.shares)
        logs = np.log(p) + np.log(np.array(self.weights)) - math.log(tail)
        x = 2 + z * np.sqrt(2 * np.maximum(logs, 1.0))
        return min(float(np.max(_wide_ratio(p, z, x))), LARGEST_LOSS)

    def losses(self, step: float, highest: float, direction: bool | None, *, replace: bool) -> Pld:
        """Return the dominating pair; None uses one curve both ways: narrow for replace-one, else wide, which covers both."""
        one = dataclasses.replace(self, count=1)
        forward = _half(one, step, highest, not replace if direction is None else direction)
        backward = forward if direction is None else _half(one, step, highest, not direction)
        return joined(step, forward, backward, self.lost)


def _wide_ratio(p: _Array, z: float, x: _Array) -> _Array:
    """Return the log density ratio of (1-p) N(0) + p N(2) to (1-p) N(0) + p N(1) at x."""
    with np.errstate(divide="ignore"):
        stay, move = np.log1p(-p), np.log(p)
    first, second = np.logaddexp(stay, move + (2 * x - 2) / z**2), np.logaddexp(stay, move + (x - 0.5) / z**2)
    return np.asarray(first - second, dtype=np.float64)


def _narrow_ratio(p: _Array, z: float, x: _Array) -> _Array:
    """Return the log density ratio of (1-p) N(0) + p N(1) to N(0) at x."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.logaddexp(np.log1p(-p), np.log(p) + (x - 0.5) / z**2), dtype=np.float64)


def _wide_points(p: _Array, z: float, losses: _Array) -> _Array:
    """Return the x at which `_wide_ratio` equals each loss >= 0: z^2 ln v with c2 v^2 - e^l c1 v - (e^l - 1)(1-p)/p = 0."""
    log_c2, log_linear = -2 / z**2, losses - 0.5 / z**2
    with np.errstate(divide="ignore"):
        log_constant = losses + np.log(-np.expm1(-losses)) + np.log1p(-p) - np.log(p)
    log_root = 0.5 * np.logaddexp(2 * log_linear, math.log(4) + log_c2 + log_constant)
    return np.asarray(z**2 * (np.logaddexp(log_linear, log_root) - math.log(2) - log_c2), dtype=np.float64)


def _narrow_points(p: _Array, z: float, losses: _Array) -> _Array:
    """Return the x at which `_narrow_ratio` equals each loss >= 0."""
    return np.asarray(0.5 + z**2 * np.log1p(np.expm1(losses) / p), dtype=np.float64)


@numpy_defaults
def wide_curve(p: _Array, z: float, epsilons: _Array) -> _Array:
    """Return delta at epsilon >= 0, data against zeroed, for each share p in (0, 1].

    It is p (h delta_2C(ln(a/h)) + (1-h) delta_C(ln(b/(1-h)))), a = (1-p)(e^eps - 1)/p, b = e^eps, for the h at which both terms
    have the same worst event.
    """
    t = _wide_points(p, z, epsilons)
    far, near = (2 * t - 2) / z**2, (t - 1.5) / z**2  # ln(a/h) and ln(b/(1-h))
    rest = np.exp(epsilons - near)  # 1 - h
    first = np.exp(log_deltas_of(2 / z, far)) * -np.expm1(np.minimum(epsilons - near, 0.0))
    return np.asarray(p * (first + rest * np.exp(log_deltas_of(1 / z, np.maximum(near, 0.0)))), dtype=np.float64)


@numpy_defaults
def narrow_curve(p: _Array, z: float, epsilons: _Array) -> _Array:
    """Return delta at epsilon >= 0, zeroed against data, for each share p in (0, 1]: p delta_C(ln(1 + (e^eps - 1)/p))."""
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
    """Return ln E_Q[(L^a - 1 - a (L - 1)) 1{L > 1}] for each power a, with L = P/Q of the wide or narrow pair."""
    p, z = np.array(pairs.shares)[:, None], pairs.noise_multiplier
    low = 1.5 if wide else 0.5  # where L = 1, for every share
    edges = np.linspace(low, highest, max(2, math.ceil((highest - low) / min(z, 2 * z * z)) + 1))
    half = 0.5 * np.diff(edges)[:, None]
    x, widths = (edges[:-1, None] + half * (_NODES + 1)).ravel(), np.log(half * _WEIGHTS).ravel()
    base = -x * x / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi)) + widths + np.log(np.array(pairs.weights))[:, None]
    if wide:
        base = base + _narrow_ratio(p, z, x)
    ratio = (_wide_ratio if wide else _narrow_ratio)(p, z, np.broadcast_to(x, base.shape))
    return np.array([scipy.special.logsumexp(base + log_convex(np.full(1, a), ratio)) for a in powers])


@numpy_defaults
def rdp(pairs: SwappedPairs, orders: _Array, adjacency: Adjacency | None) -> _Array:
    """Return the Renyi divergences of one release at orders > 1, in the worse direction; `lost` must be 0.

    ln(1 + a (a-1) int (e^((a-1) eps) delta(eps) + e^(-a eps) delta'(eps)) d eps) / (a-1), for delta, delta' of both directions.
    """
    z = pairs.noise_multiplier
    values = np.asarray(orders / (2 * z * z), dtype=np.float64)  # without amplification
    for low, high in ((1.0, 4.0), (4.0, 16.0), (16.0, 64.0), (64.0, 256.0), (256.0, math.inf)):
        group = (orders > low) & (orders <= high) & (orders <= _ORDERS_PER_STD * z)
        if group.any() and z >= _TINY_NOISE:
            values[group] = np.minimum(values[group], _rdp(pairs, orders[group], adjacency))
    return values


def _rdp(pairs: SwappedPairs, a: _Array, adjacency: Adjacency | None) -> _Array:
    """Return the Renyi divergences at the orders `a`, by numerical integration."""
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


_TAIL = 1e-15  # probability of the counts that a whole run omits; it is added to delta
_RENYI_TAIL = 1e-60  # counts in this tail are priced as a round with all clients
_SPACING = 0.05  # distance between thinned counts, as a share of the mean count
_RENYI_COUNTS = 24


def _log_tail(clients: int, rate: float, k: int) -> float:
    """Return Chernoff's bound on ln P(K >= k) for k above the mean, and on ln P(K <= k) below it: -N KL(k/N || q)."""
    p = k / clients
    up = p * math.log(p / rate) if p > 0 else 0.0
    down = (1 - p) * (math.log1p(-p) - math.log1p(-rate)) if p < 1 else 0.0
    return -clients * (up + down)


def _window(clients: int, rate: float, tail: float) -> tuple[int, int]:
    """Return counts (low, high) with P(K < low) <= tail and P(K > high) <= tail."""
    mean, target = clients * rate, math.log(tail)

    def first(outside: int, inside: int) -> int:
        """Return the count nearest to the mean whose tail bound is at most `tail`."""
        while abs(outside - inside) > 1:
            middle = (outside + inside) // 2
            outside, inside = (middle, inside) if _log_tail(clients, rate, middle) <= target else (outside, middle)
        return outside

    low = first(0, math.floor(mean)) + 1 if mean >= 1 and _log_tail(clients, rate, 0) <= target else 0
    high = first(clients, math.ceil(mean)) - 1 if _log_tail(clients, rate, clients) <= target else clients
    return low, max(high, low)


def _probabilities(clients: int, rate: float, low: int, high: int) -> _Array:
    """Return P(K = k) for low <= k <= high, scaled to sum 1, from the ratios of neighbours."""
    k = np.arange(low, high, dtype=np.float64)
    steps = np.log((clients - k) / (k + 1)) + (math.log(rate) - math.log1p(-rate))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def _thinned(low: int, high: int, mean: float, std: float) -> list[int]:
    counts, k = [low], low
    while k < high:
        beyond = (abs(k - mean) - 3 * std) / 6
        k = min(k + max(1, int(_SPACING * mean), int(beyond)), high)
        counts.append(k)
    return counts


def _spread_onto(points: _Array, k: _Array, weights: _Array) -> _Array:
    """Move the mass at each k to the two neighbouring points, keeping the mean."""
    right = np.clip(np.searchsorted(points, k), 1, points.size - 1)
    part = (k - points[right - 1]) / (points[right] - points[right - 1])
    moved = np.bincount(right, weights * part, points.size) + np.bincount(right - 1, weights * (1 - part), points.size)
    return np.asarray(moved, dtype=np.float64)


@lru_cache(maxsize=256)
def _counts(clients: int, rate: float, tail: float, exact: bool) -> tuple[_Array, _Array, float]:
    """Return counts k, their probabilities given that K is not above the window, and a bound on P(K above the window).

    Counts below the window move into it, which is safe since the curves grow with k. Unless `exact`, counts inside are thinned
    out (see the module's docstring).
    """
    low, high = _window(clients, rate, tail)
    k = np.arange(low, high + 1, dtype=np.float64)
    weights = _probabilities(clients, rate, low, high)
    lost = math.exp(_log_tail(clients, rate, high + 1)) * (1 + 1e-9) if high < clients else 0.0
    mean = clients * rate
    points = k if exact else np.array(_thinned(low, high, mean, math.sqrt(mean * (1 - rate))), dtype=np.float64)
    return points, weights if points.size == k.size else _spread_onto(points, k, weights), lost


def _fixed_pairs(clients: int, cohort: int, z: float, count: int) -> SwappedPairs:
    return SwappedPairs((cohort / clients,), (1.0,), 0.0, z, count)


def pairs_of(event: SeenCountGaussian | FixedSampleGaussian) -> SwappedPairs:
    """Convert an event to the form that `fedveil.accounting.pld` composes; its rate or cohort must be > 0.

    Counts are cut off where all rounds together exceed the cut with probability below 1e-15, which is added to delta.
    """
    if isinstance(event, FixedSampleGaussian):
        return _fixed_pairs(event.clients, event.cohort, event.noise_multiplier, event.count)
    if event.rate == 1:
        return _fixed_pairs(1, 1, event.noise_multiplier, event.count)
    k, weights, lost = _counts(event.clients, float(event.rate), _TAIL / max(event.count, 1), False)
    some = k > 0
    shares = tuple((k[some] / event.clients).tolist())
    return SwappedPairs(shares, tuple(weights[some].tolist()), lost, event.noise_multiplier, event.count)


def renyi_pairs_of(event: SeenCountGaussian | FixedSampleGaussian) -> SwappedPairs:
    """Convert an event as `pairs_of` does, but with nothing omitted and about 24 distinct counts, for Renyi divergences."""
    if isinstance(event, FixedSampleGaussian) or event.rate == 1:
        return pairs_of(event)
    k, weights, lost = _counts(event.clients, float(event.rate), _RENYI_TAIL, False)
    if k.size > _RENYI_COUNTS:
        points = k[np.unique(np.linspace(0, k.size - 1, _RENYI_COUNTS).round().astype(int))]
        k, weights = points, _spread_onto(points, k, weights)
    if lost > 0:
        k, weights = np.append(k, event.clients), np.append(weights, lost)
    some = k > 0
    return SwappedPairs(
        tuple((k[some] / event.clients).tolist()), tuple(weights[some].tolist()), 0.0, event.noise_multiplier, event.count
    )


# --- one release ------------------------------------------------------------------------------------------------------


def _deltas(shares: _Array, weights: _Array, z: float, epsilon: float, adjacency: Adjacency) -> tuple[float, float]:
    some, epsilons = shares > 0, np.full(1, epsilon)
    if not some.any():
        return 0.0, 0.0
    p, w = shares[some], weights[some]
    narrow = math.fsum(w * narrow_curve(p, z, epsilons))
    return (narrow if adjacency is Adjacency.REPLACE_ONE else math.fsum(w * wide_curve(p, z, epsilons))), narrow


@numpy_defaults
def fixed_sample_delta(
    share: float, noise_multiplier: float, epsilon: float, adjacency: Adjacency = Adjacency.ZERO_OUT
) -> tuple[float, float]:
    """Return the exact delta at epsilon of one release on a secret sample of fixed size: (data to zeroed, zeroed to data).

    Args:
        share: size of the sample / number of clients, in [0, 1].
        noise_multiplier: noise std / sensitivity of the adjacency, > 0.
        epsilon: >= 0.
        adjacency: replace-one has the same delta in both directions.

    Source: docs/privacy-theorems.md, "The number of participants is seen".
    """
    share, z = probability("share", share), positive("noise_multiplier", noise_multiplier)
    return _deltas(np.array([share]), np.ones(1), z, non_negative("epsilon", epsilon), adjacency)


@numpy_defaults
def seen_count_delta(
    clients: int, rate: float, noise_multiplier: float, epsilon: float, adjacency: Adjacency = Adjacency.ZERO_OUT
) -> tuple[float, float]:
    """Return the exact delta at epsilon of one release on a Poisson sample of visible size: (data to zeroed, zeroed to data).

    Args:
        clients: N >= 1, without clients who collude.
        rate: in [0, 1].
        noise_multiplier: noise std / sensitivity of the adjacency, > 0.
        epsilon: >= 0.
        adjacency: as in `fixed_sample_delta`.

    Source: the mean of `fixed_sample_delta` over Bin(N, q); counts of probability below 1e-60 are rounded up.
    """
    clients, rate = at_least("clients", clients, 1), probability("rate", rate)
    z, epsilon = positive("noise_multiplier", noise_multiplier), non_negative("epsilon", epsilon)
    if rate in (0, 1):
        return _deltas(np.array([rate]), np.ones(1), z, epsilon, adjacency)
    k, weights, lost = _counts(clients, rate, _RENYI_TAIL, True)
    first, second = _deltas(k / clients, weights, z, epsilon, adjacency)
    return first + lost, second + lost
