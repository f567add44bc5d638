"""Poisson sampling of clients when the number of participants is seen, and secret samples of fixed size.

Both hide who takes part and show how many do, so a zeroed client is one of the counted. The number is the same in both worlds,
and given that it is k the sample is a random k of the N clients: `fedveil.accounting.swapped_pairs` with p = k / N. A seen count
costs far more than a hidden one. Where the sum's noise grows with the number of participants (noise in shares), everybody sees
the count; then `noise_multiplier` is that of the smallest number of participants for which a round is released.

Units: noise std = `noise_multiplier` and sensitivity 1, which is C for zero-out and 2C for replace-one. N leaves out clients who
collude with the adversary. Adding or removing a client is not covered: with a visible count it has an atom of infinite loss.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting import pld
from fedveil.accounting._check import at_least, non_negative, numpy_defaults, open_probability, positive, probability
from fedveil.accounting.gaussian import log_delta_of
from fedveil.accounting.swapped_pairs import SwappedPairs, narrow_curve, wide_curve
from fedveil.accounting.types import Adjacency, FixedSampleGaussian, SeenCountGaussian

_Array = NDArray[np.float64]
_TAIL = 1e-15  # probability of counts that a whole run leaves out; it is added to delta
_RENYI_TAIL = 1e-60  # these counts are taken for a round with all clients
_SPACING = 0.05  # of the mean count, between the counts kept for large numbers of participants
_RENYI_COUNTS = 24


def _log_tail(clients: int, rate: float, k: int) -> float:
    """Chernoff's bound on ln P(K >= k) for k above the mean and on ln P(K <= k) below it: -N KL(k/N || q)."""
    p = k / clients
    up = p * math.log(p / rate) if p > 0 else 0.0
    down = (1 - p) * (math.log1p(-p) - math.log1p(-rate)) if p < 1 else 0.0
    return -clients * (up + down)


def _window(clients: int, rate: float, tail: float) -> tuple[int, int]:
    """Counts low and high with P(K < low) <= tail and P(K > high) <= tail."""
    mean, target = clients * rate, math.log(tail)

    def first(outside: int, inside: int) -> int:
        """The count nearest to the mean whose tail bound is at most `tail`."""
        while abs(outside - inside) > 1:
            middle = (outside + inside) // 2
            outside, inside = (middle, inside) if _log_tail(clients, rate, middle) <= target else (outside, middle)
        return outside

    low = first(0, math.floor(mean)) + 1 if mean >= 1 and _log_tail(clients, rate, 0) <= target else 0
    high = first(clients, math.ceil(mean)) - 1 if _log_tail(clients, rate, clients) <= target else clients
    return low, max(high, low)


def _probabilities(clients: int, rate: float, low: int, high: int) -> _Array:
    """P(K = k) for low <= k <= high, scaled to sum 1, from the ratios of neighbours."""
    k = np.arange(low, high, dtype=np.float64)
    steps = np.log((clients - k) / (k + 1)) + (math.log(rate) - math.log1p(-rate))
    logs = np.concatenate([[0.0], np.cumsum(steps)])
    weights = np.exp(logs - logs.max())
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def _kept(low: int, high: int, mean: float, std: float) -> list[int]:
    kept, k = [low], low
    while k < high:
        beyond = (abs(k - mean) - 3 * std) / 6
        k = min(k + max(1, int(_SPACING * mean), int(beyond)), high)
        kept.append(k)
    return kept


def _spread_onto(kept: _Array, k: _Array, weights: _Array) -> _Array:
    """Move the mass at each k to the two kept neighbours so that the mean stays."""
    right = np.clip(np.searchsorted(kept, k), 1, kept.size - 1)
    part = (k - kept[right - 1]) / (kept[right] - kept[right - 1])
    moved = np.bincount(right, weights * part, kept.size) + np.bincount(right - 1, weights * (1 - part), kept.size)
    return np.asarray(moved, dtype=np.float64)


@lru_cache(maxsize=256)
def _counts(clients: int, rate: float, tail: float, exact: bool) -> tuple[_Array, _Array, float]:
    """Counts k, their probabilities given that K is not above the window, and a bound on the probability that it is.

    Counts below the window go into it, which is safe since the curves grow with k; counts inside may be thinned out (see
    `swapped_pairs`).
    """
    low, high = _window(clients, rate, tail)
    k = np.arange(low, high + 1, dtype=np.float64)
    weights = _probabilities(clients, rate, low, high)
    lost = math.exp(_log_tail(clients, rate, high + 1)) * (1 + 1e-9) if high < clients else 0.0
    mean = clients * rate
    kept = k if exact else np.array(_kept(low, high, mean, math.sqrt(mean * (1 - rate))), dtype=np.float64)
    return kept, weights if kept.size == k.size else _spread_onto(kept, k, weights), lost


def _fixed_pairs(clients: int, cohort: int, z: float, count: int) -> SwappedPairs:
    return SwappedPairs((cohort / clients,), (1.0,), 0.0, z, count)


def pairs_of(event: SeenCountGaussian | FixedSampleGaussian) -> SwappedPairs:
    """The releases of an event as `fedveil.accounting.pld` composes them; somebody must take part with probability > 0.

    The number of participants is cut off where all rounds together exceed it with probability below 1e-15, added to delta.
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
    """As `pairs_of`, with nothing left out and at most 24 different counts, for Renyi divergences."""
    if isinstance(event, FixedSampleGaussian) or event.rate == 1:
        return pairs_of(event)
    k, weights, lost = _counts(event.clients, float(event.rate), _RENYI_TAIL, False)
    if k.size > _RENYI_COUNTS:
        kept = k[np.unique(np.linspace(0, k.size - 1, _RENYI_COUNTS).round().astype(int))]
        k, weights = kept, _spread_onto(kept, k, weights)
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
    """The exact delta at epsilon of one release on a secret sample of fixed size: (data to zeroed, zeroed to data).

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
    """The exact delta at epsilon of one release on a Poisson sample whose size is seen: (data to zeroed, zeroed to data).

    Args:
        clients: N >= 1, without clients who collude.
        rate: in [0, 1].
        noise_multiplier: noise std / sensitivity of the adjacency, > 0.
        epsilon: >= 0.
        adjacency: as `fixed_sample_delta`.

    Source: the mean of `fixed_sample_delta` over Bin(N, q); counts of probability below 1e-60 are rounded up.
    """
    clients, rate = at_least("clients", clients, 1), probability("rate", rate)
    z, epsilon = positive("noise_multiplier", noise_multiplier), non_negative("epsilon", epsilon)
    if rate in (0, 1):
        return _deltas(np.array([rate]), np.ones(1), z, epsilon, adjacency)
    k, weights, lost = _counts(clients, rate, _RENYI_TAIL, True)
    first, second = _deltas(k / clients, weights, z, epsilon, adjacency)
    return first + lost, second + lost


@numpy_defaults
def named_participants_delta(rate: float, noise_multiplier: float, count: int, epsilon: float) -> float:
    """The exact delta at epsilon when it is seen WHO takes part: sum_j Bin(T, q)(j) delta_Gauss(eps; sqrt(j)/z), both directions.

    Also an upper bound when only the number is seen, or nothing.

    Args:
        rate: in [0, 1]. noise_multiplier: noise std / sensitivity, > 0. count: number of rounds T, >= 0. epsilon: >= 0.
    """
    rate, z = probability("rate", rate), positive("noise_multiplier", noise_multiplier)
    count, epsilon = at_least("count", count, 0), non_negative("epsilon", epsilon)
    if count == 0 or rate in (0, 1):
        return math.exp(log_delta_of(math.sqrt(count * rate) / z, epsilon))
    j, weights, lost = _counts(count, rate, _RENYI_TAIL, True)
    terms = (w * math.exp(log_delta_of(math.sqrt(n) / z, epsilon)) for n, w in zip(j.tolist(), weights.tolist(), strict=True))
    return math.fsum(terms) + lost


@numpy_defaults
def epsilon_pld(
    event: SeenCountGaussian | FixedSampleGaussian,
    delta: float,
    *,
    adjacency: Adjacency | None = None,
    step: float | None = None,
) -> float:
    """Epsilon of an event by privacy loss distributions, from above; the worse of both directions.

    Args:
        event: the releases. delta: in (0, 1).
        adjacency: None covers zero-out and replace-one.
        step: of the grid of losses, as `fedveil.accounting.pld.composed`.
    """
    delta = open_probability("delta", delta)
    idle = event.rate == 0 if isinstance(event, SeenCountGaussian) else event.cohort == 0
    if event.count == 0 or idle:
        return 0.0
    return max(pld.epsilon(total, delta) for total in pld.composed([pairs_of(event)], min(1e-3, 1e-5 * delta), adjacency, step))
