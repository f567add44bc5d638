"""Epsilon from a list of releases by a second path: closed form for Gaussian releases, loss distributions for sampled ones.

Nothing here is shared with `fedveil.accounting`. A sampled release is described by its tails: the probabilities with which the
privacy loss exceeds l >= 0, in both directions, under both worlds. Within each cell of a grid of losses the two masses go to the
cell's ends such that both are kept (connect the dots), so every bound is from above; composition is by FFT.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, ndtr

Array = NDArray[np.floating[Any]]
Tails = Callable[[Array], tuple[Array, Array]]  # from losses l >= 0 to (P(loss > l), Q(loss > l)) of one direction
Release = tuple[str, float, float]  # kind as in the column `event` of a ledger, sampling rate, noise multiplier


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Exact epsilon of mu-GDP: the root of Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu) = delta (Balle & Wang 2018)."""

    def excess(epsilon: float) -> float:
        second = math.exp(min(epsilon + float(log_ndtr(-mu / 2 - epsilon / mu)), 0.0))
        return float(ndtr(mu / 2 - epsilon / mu)) - second - delta

    if mu == 0 or excess(0.0) <= 0:
        return 0.0
    low, high = 0.0, 1.0
    while excess(high) > 0:
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        low, high = ((low + high) / 2, high) if excess((low + high) / 2) > 0 else (low, (low + high) / 2)
    return high


def epsilon_of(sampled: Mapping[Release, float], mu_squared: float, delta: float, adjacency: str) -> tuple[float, bool]:
    """(epsilon, whether it is exact) of everything together.

    sampled: how many of each sampled release; mu_squared: sum of mu^2 of the Gaussian ones. Raises ValueError for unknown kinds.
    """
    if not sampled:
        return gaussian_epsilon(math.sqrt(mu_squared), delta), True
    pairs = [(*_tails(*release, adjacency), count) for release, count in sorted(sampled.items())]
    if mu_squared > 0:
        plain = _gaussian(math.sqrt(mu_squared))
        pairs.append((plain, plain, 1.0))
    back = [(second, first, count) for first, second, count in pairs]
    return max(_composed(pairs, delta), _composed(back, delta)), False


def _gaussian(mu: float) -> Tails:
    return lambda losses: (ndtr(mu / 2 - losses / mu), ndtr(-mu / 2 - losses / mu))


def _tails(kind: str, q: float, z: float, adjacency: str) -> tuple[Tails, Tails]:
    """Both directions of one release: with the unit, (1-q) N(0) + q N(1), against N(0); or against (1-q) N(0) + q N(-1)."""
    if kind != "sampled_gaussian":
        raise ValueError(f"releases of the kind {kind} are not computed here")
    if q == 1:
        return _gaussian(1 / z), _gaussian(1 / z)

    def removed(losses: Array) -> tuple[Array, Array]:
        x = 0.5 + z * z * np.log1p(np.expm1(losses) / q)  # where the ratio is e^l
        return (1 - q) * ndtr(-x / z) + q * ndtr((1 - x) / z), ndtr(-x / z)

    def added(losses: Array) -> tuple[Array, Array]:
        ratio = 1 + np.expm1(-losses) / q  # the loss is never above -ln(1-q)
        x = np.where(ratio > 0, 0.5 + z * z * np.log(np.maximum(ratio, 1e-300)), -np.inf)
        return ndtr(x / z), (1 - q) * ndtr(x / z) + q * ndtr((x - 1) / z)

    def replaced(losses: Array) -> tuple[Array, Array]:  # the sensitivity, 1, is the distance from -1/2 to 1/2
        c, growth = q * math.exp(-1 / (8 * z * z)), np.expm1(losses)
        v = ((1 - q) * growth + np.sqrt(((1 - q) * growth) ** 2 + 4 * c * c * (growth + 1))) / (2 * c)
        x = 2 * z * z * np.log(v)
        middle = (1 - q) * ndtr(-x / z)
        return middle + q * ndtr((0.5 - x) / z), middle + q * ndtr((-0.5 - x) / z)

    return (removed, added) if adjacency == "zero_out" else (replaced, replaced)


def _composed(pairs: list[tuple[Tails, Tails, float]], delta: float) -> float:
    """Epsilon at delta of all releases together in one direction, from above."""
    tail = 1e-6 * delta
    tops = [(_top(first, tail / count), _top(second, tail / count)) for first, second, count in pairs]
    coarse = max(max(top) for top in tops) / 7500
    rough = [(*_masses(pair[:2], top, coarse)[:2], pair[2]) for pair, top in zip(pairs, tops, strict=True)]
    reach = _reach(rough, tail)
    spread = math.sqrt(sum(n * float(mass @ (losses - mass @ losses) ** 2) for losses, mass, n in rough))
    step = max(2.2 * reach / 2**20, min(coarse, spread / 2000))
    size = 1 << math.ceil(math.log2(2.2 * reach / step))
    product: Any = np.ones(size // 2 + 1, dtype=np.complex128)
    infinite = 0.0
    for (first, second, count), top in zip(pairs, tops, strict=True):
        losses, mass, beyond = _masses((first, second), top, step)
        product *= np.fft.rfft(np.bincount(np.rint(losses / step).astype(np.int64) % size, mass, size)) ** count
        infinite += count * beyond
    total = np.roll(np.maximum(np.fft.irfft(product, size), 0.0), size // 2)
    return _smallest_epsilon((np.arange(size) - size // 2) * step, total, delta - infinite - 2 * tail)


def _top(tails: Tails, tail: float) -> float:
    """A loss that is exceeded with probability at most `tail`."""
    low, high = 0.0, 1.0
    while high < 600 and tails(np.array([high]))[0][0] > tail:
        high *= 2
    for _ in range(60):
        above = tails(np.array([(low + high) / 2]))[0][0] > tail
        low, high = ((low + high) / 2, high) if above else (low, (low + high) / 2)
    return high


def _masses(pair: tuple[Tails, Tails], tops: tuple[float, float], step: float) -> tuple[Array, Array, float]:
    """Losses on the grid, their masses under the first world, and the mass that counts as an infinite loss."""
    up, beyond = _half(pair[0], math.ceil(tops[0] / step) + 1, step)
    down, below = _half(lambda losses: pair[1](losses)[::-1], math.ceil(tops[1] / step) + 1, -step)
    down[-1] += below  # counts as the lowest loss of the grid
    mass = np.concatenate([down[:0:-1], [up[0] + down[0]], up[1:]])
    mass[down.size - 1] += max(0.0, 1.0 - float(mass.sum()) - beyond)  # losses of exactly 0
    return step * np.arange(1 - down.size, up.size), mass, beyond


def _half(tails: Tails, cells: int, step: float) -> tuple[Array, float]:
    """Masses of the first world at losses 0, step, ..., of one sign, and beyond; tails: of what lies further from 0."""
    sizes = abs(step) * np.arange(cells + 1)
    p, q = tails(sizes)
    dp, dq = np.maximum(p[:-1] - p[1:], 0.0), np.maximum(q[:-1] - q[1:], 0.0)
    # dp = a + b and dq = a e^-near + b e^-(near + step): b sits at the far end
    b = np.clip((dp - np.exp(np.sign(step) * sizes[:-1]) * dq) / -np.expm1(-step), 0.0, dp)
    mass = np.zeros(cells + 1)
    mass[:-1] += dp - b
    mass[1:] += b
    return mass, float(p[-1])


def _reach(rough: list[tuple[Array, Array, float]], tail: float) -> float:
    """A size that the sum of all losses exceeds with probability below 2 `tail`, by Chernoff's bound."""
    reach = 1e-3
    for sign in (1, -1):
        best = math.inf
        for order in np.geomspace(1e-3, 1e3, 120):
            exponents = [(sign * order * losses, mass, count) for losses, mass, count in rough]
            logs = (n * (e.max() + math.log(float(mass @ np.exp(e - e.max())))) for e, mass, n in exponents)
            best = min(best, (math.fsum(logs) - math.log(tail)) / order)
        reach = max(reach, best)
    return reach


def _smallest_epsilon(losses: Array, mass: Array, delta: float) -> float:
    """The epsilon >= 0 at which sum mass (1 - e^(epsilon - loss))+ is delta."""
    above = np.cumsum(mass[::-1])[::-1]
    weighted = np.cumsum((mass * np.exp(-np.maximum(losses, -700.0)))[::-1])[::-1]
    place = int(np.searchsorted(np.exp(np.minimum(losses, 700.0)) * weighted - above, -delta))
    if delta <= 0 or place >= losses.size:
        return math.inf
    return max(math.log(max(above[place] - delta, 1e-300) / weighted[place]), 0.0)
