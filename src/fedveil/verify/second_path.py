"""Epsilon from a list of releases by a second path: closed form for Gaussian releases, loss distributions for sampled ones.

A sampled release is described by its tails: log-probabilities that the privacy loss exceeds l >= 0, in both directions, under
both data sets. In each cell of a grid of losses, mass moves to both ends such that both totals remain: a bound from above."""

import math
from collections.abc import Callable, Collection
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr, logsumexp, ndtr, ndtri

Array = NDArray[np.floating[Any]]
Tails = Callable[[Array], tuple[Array, Array]]  # from losses l >= 0 to the logarithms of P(loss > l) and Q(loss > l)
Release = tuple[str, float, float]  # kind as in the column `event` of a ledger, sampling rate, noise multiplier
Counts = Collection[tuple[Release, float]]
Pair = tuple[Tails, Tails, float]
Search = tuple[float, float] | None  # expected number of runs, of which the best was released, and shape of its distribution


class Curve:
    """The privacy loss of releases together: counts of sampled ones with rates below 1, and the sum of mu^2 of Gaussian ones."""

    def __init__(self, sampled: Counts, mu_squared: float, delta: float, adjacency: str, search: Search = None) -> None:
        sampled, search = ((), None) if math.isinf(mu_squared) else (sampled, search)
        self.mu, self.exact = math.sqrt(mu_squared), not (sampled or search)
        self.losses, self._alone = list[tuple[Array, Array, float]](), tuple[Tails, ...]()
        if search:
            self.epsilon = _best_of(Curve(sampled, mu_squared, delta / search[0], adjacency), *search)
            share = (1 - delta) / (1 + math.exp(-self.epsilon))
            self.losses = [(np.array([-self.epsilon, self.epsilon]), np.array([1 - delta - share, share]), delta)]
        elif self.exact:
            self.epsilon = gaussian_epsilon(self.mu, delta)
        else:
            releases = tuple(sorted(sampled))
            if mu_squared == 0 and sum(count for _, count in releases) == 1:
                self._alone = _tails(*releases[0][0], adjacency)
            self.losses = _both_directions(releases, self.mu, delta, adjacency)
            self.epsilon = _root(lambda e: self.delta(e) > delta)

    def delta(self, epsilon: float) -> float:
        """Return delta: exact for Gaussian releases and one sampled release, else the bound from the losses."""
        if self.exact:
            return _gaussian_delta(self.mu, epsilon)
        if self._alone:
            both = (tails(np.array([epsilon])) for tails in self._alone)
            return max(float((np.exp(p) - np.exp(epsilon + q))[0]) for p, q in both)
        above = ((losses[(k := int(np.searchsorted(losses, epsilon))) :], mass[k:], far) for losses, mass, far in self.losses)
        return max(far - float(mass @ np.expm1(epsilon - losses)) for losses, mass, far in above)

    def true_positives(self, rate: float) -> float:
        """Return the largest true-positive rate at this false-positive rate: exact for Gaussian releases, else a bound."""
        found = [float(ndtr(self.mu + ndtri(rate)))] if self.exact else []
        for losses, mass, infinite in self.losses:
            wrong = np.cumsum(np.append(0.0, (mass * np.exp(-np.maximum(losses, -700.0)))[::-1]))
            found.append(infinite + float(np.interp(rate, wrong, np.cumsum(np.append(0.0, mass[::-1])))))
        return max(found)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """Return the exact epsilon of mu-GDP (Balle & Wang 2018)."""
    if mu == 0 or math.isinf(mu):
        return mu
    return _root(lambda e: _gaussian_delta(mu, e) > delta)


def _gaussian_delta(mu: float, epsilon: float) -> float:
    """Return Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)."""
    if mu == 0:
        return 0.0
    return float(ndtr(mu / 2 - epsilon / mu) - math.exp(min(epsilon + log_ndtr(-mu / 2 - epsilon / mu), 0.0)))


def _root(above: Callable[[float], bool]) -> float:
    """Return the smallest number for which `above` is false, rounded up with relative error 1e-13."""
    low, high = 0.0, float(above(0.0))
    while above(high):
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if above(middle) else (low, middle)
    return high


def _tails(kind: str, q: float, z: float, adjacency: str) -> tuple[Tails, Tails]:
    """Tails of a release, both directions: with the unit, (1-q) N(0) + q N(1), against N(0); or against (1-q) N(0) + q N(-1)."""
    if kind != "sampled_gaussian":
        raise NotImplementedError(f"releases of the kind {kind} are not computed here")

    def mixed(outside: Array, inside: Array) -> Array:
        return np.logaddexp(np.log1p(-q) + log_ndtr(outside), math.log(q) + log_ndtr(inside)) if q < 1 else log_ndtr(inside)

    def removed(losses: Array) -> tuple[Array, Array]:
        x = 0.5 + z * z * (losses + np.log1p(-np.expm1(-losses) * (1 / q - 1)))  # where the ratio is e^l
        return mixed(-x / z, (1 - x) / z), log_ndtr(-x / z)

    def added(losses: Array) -> tuple[Array, Array]:
        ratio = 1 + np.expm1(-losses) / q  # the loss is never above -ln(1-q)
        x = np.where(ratio > 0, 0.5 + z * z * np.log(np.maximum(ratio, 1e-300)), -np.inf)
        return log_ndtr(x / z), mixed(x / z, (x - 1) / z)

    def replaced(losses: Array) -> tuple[Array, Array]:  # the sensitivity, 1, is the distance from -1/2 to 1/2
        log_c, growth = math.log(2 * q) - 1 / (8 * z * z), (1 - q) * -np.expm1(-losses)
        log_v = losses + np.log(np.maximum(growth + np.hypot(growth, np.exp(log_c - losses / 2)), 1e-300)) - log_c
        x = 2 * z * z * np.where(losses > 0, log_v, 0.0)
        return mixed(-x / z, (0.5 - x) / z), mixed(-x / z, (-0.5 - x) / z)

    return (removed, added) if adjacency == "zero_out" else (replaced, replaced)


@lru_cache(maxsize=8)  # rows, plan and statement of one run have the same releases
def _both_directions(
    releases: tuple[tuple[Release, float], ...], mu: float, delta: float, adjacency: str
) -> list[tuple[Array, Array, float]]:
    """The loss of all releases together, with the unit against without it, and the other way round."""
    pairs = [(*_tails(*release, adjacency), count) for release, count in releases]
    if mu > 0:
        pairs.append((plain := _tails("sampled_gaussian", 1.0, 1 / mu, "zero_out")[0], plain, 1.0))
    return [_composed(pairs, delta), _composed([(b, a, n) for a, b, n in pairs], delta)]


def _composed(pairs: list[Pair], delta: float) -> tuple[Array, Array, float]:
    """Return the loss of all releases in one direction: values, their masses, and the mass at infinity, bounded from above."""
    tail = 1e-6 * delta
    tops = [(_top(first, tail / count), _top(second, tail / count)) for first, second, count in pairs]
    most = max(map(max, tops))
    rough = [(*_masses((p, q), top, most / 7500)[:2], n) for (p, q, n), top in zip(pairs, tops, strict=True)]
    step = max(2.2 * _reach(rough, tail), most / 4) / (size := 1 << 18)
    product, kept = np.ones(size // 2 + 1, dtype=np.complex128), 0.0
    for (first, second, count), top in zip(pairs, tops, strict=True):
        losses, mass, beyond = _masses((first, second), top, step)
        product *= np.fft.rfft(np.bincount(np.rint(losses / step).astype(np.int64) % size, mass, size)) ** count
        kept += count * math.log1p(-min(beyond, 1 - 1e-16))
    total = np.roll(np.maximum(np.fft.irfft(product, size), 0.0), size // 2)
    if not math.isclose(float(total.sum()), math.exp(kept), abs_tol=1e-6):
        raise NotImplementedError("so many releases")
    return (np.arange(size) - size // 2) * step, total, 2 * tail - math.expm1(kept)


def _top(tails: Tails, tail: float) -> float:
    """Return a loss that is exceeded with probability at most `tail`."""
    return _root(lambda loss: tails(np.array([loss]))[0][0] > math.log(tail))


def _masses(pair: tuple[Tails, Tails], tops: tuple[float, float], step: float) -> tuple[Array, Array, float]:
    """Return losses on the grid, their masses under the first data set, and the mass of infinite loss."""
    up, beyond = _half(pair[0], math.ceil(tops[0] / step) + 1, step)
    down, below = _half(lambda losses: pair[1](losses)[::-1], math.ceil(tops[1] / step) + 1, -step)
    down[-1] += below  # counts as the lowest loss of the grid
    mass = np.concatenate([down[:0:-1], [up[0] + down[0]], up[1:]])
    mass[down.size - 1] += max(0.0, 1.0 - float(mass.sum()) - beyond)  # losses of exactly 0
    return step * np.arange(1 - down.size, up.size), mass, beyond


def _half(tails: Tails, cells: int, step: float) -> tuple[Array, float]:
    """Return masses under the first data set at losses 0, step, ... of one sign, and beyond; tails: of losses further from 0."""
    p, q = tails(sizes := abs(step) * np.arange(cells + 1))
    near = np.sign(step) * sizes[:-1]
    dp, dq = np.maximum(-np.diff(np.exp(p)), 0.0), np.maximum(np.exp(near + q[:-1]) - np.exp(near + q[1:]), 0.0)
    b = np.clip((dp - dq) / -math.expm1(min(-step, 700.0)), 0.0, dp)  # at the far end: dp = a + b and dq = a + b e^-step
    return np.append(dp - b, 0.0) + np.append(0.0, b), math.exp(p[-1])


def _best_of(one: Curve, runs: float, shape: float) -> float:
    """Epsilon of the best of a random number of runs, from the profile of one, at delta / runs (Koskela, Redberg & Wang 2024)."""
    log = _root(lambda t: math.expm1(t := max(t, 1e-9)) < runs * (t if shape == 0 else -math.expm1(-shape * t) / shape))
    return one.epsilon + (1 + shape) * _root(lambda e: one.delta(e) * math.expm1(log) > math.expm1(e))


def _reach(rough: list[tuple[Array, Array, float]], tail: float) -> float:
    """Return a size that the sum of all losses exceeds with probability below 2 `tail`, by Chernoff's bound."""
    least, logarithms = 1e-3, [(losses, np.log(np.maximum(mass, 1e-300)), n) for losses, mass, n in rough]
    for orders in (up := np.geomspace(1e-3, 1e3, 80), -up):
        logs = sum(n * logsumexp(np.multiply.outer(orders, losses) + log, axis=1) for losses, log, n in logarithms)
        least = max(least, float(min((logs - math.log(tail)) / abs(orders))))
    return least
