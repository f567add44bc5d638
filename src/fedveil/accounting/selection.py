"""The cost of choosing a run among others: private selection with a random number of tries, or inspection of all of them.

Each try is one run on freshly drawn hyper-parameters; it also releases its score. Two bounds hold for the best of K tries
(proofs: docs/privacy-theorems.md, "Private selection"); `selection_bound` takes the smaller one.

By privacy profiles (Koskela, Redberg & Wang 2024), K truncated negative binomial (eta > -1, gamma in (0, 1)):

    delta_best(eps) <= E[K] delta(eps - (1+eta) e),   e the least with delta'(e) <= gamma / (1 - gamma) (exp(e) - 1)

By Renyi divergences (Papernot & Steinke 2022, Theorems 2 and 6), at order l > 1:

- K truncated negative binomial (eta > -1, gamma in (0, 1); eta = 0 is the logarithmic law, eta = 1 the geometric one):
  eps(l) + (1+eta) [(1 - 1/l') eps'(l') + ln(1/gamma) / l'] + ln E[K] / (l-1), for any l' >= 1;
- K Poisson of mean m >= 1: ln(e^-m + m e^((l-1)(eps(l) + m delta'))) / (l-1), delta' at the epsilon ln(1 + 1/(l-1)).

eps' and delta' belong to the REVERSE direction, so the curves must hold for both. K stays secret: run time, logs and bills must
not reveal the number of tries.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting import accountant
from fedveil.accounting._numbers import at_least, crossing, least_below, non_negative, numpy_defaults, open_probability, positive
from fedveil.accounting.subsampled import ORDERS
from fedveil.accounting.types import Adjacency, Event, Gaussian, Unbounded
from fedveil.errors import ConfigError

_Array = NDArray[np.float64]
_CHUNK = 2**14
_BITS, _DIGITS = 192, 70
"""Bits of the uniform random number behind a draw, and decimal digits of the cumulative sums it is compared with."""


@dataclass(frozen=True)
class RandomTries:
    """Truncated negative binomial law of the number of tries K >= 1, with eta > -1 and gamma in (0, 1)."""

    eta: float
    gamma: float

    def __post_init__(self) -> None:
        if not (self.eta > -1 and math.isfinite(self.eta)):
            raise ConfigError(f"eta must be finite and > -1, got {self.eta}")
        open_probability("gamma", self.gamma)

    @property
    def mean(self) -> float:
        """E[K]: eta (1/gamma - 1) / (1 - gamma^eta), and (1/gamma - 1) / ln(1/gamma) for eta = 0."""
        log = -math.log(self.gamma)
        rest = log if abs(self.eta) * log < 1e-12 else -math.expm1(-self.eta * log) / self.eta
        return math.expm1(log) / rest

    def probability_of(self, tries: int) -> float:
        """P(K = tries), tries >= 1."""
        tries = at_least("tries", tries, 1)
        return float(np.prod(self._ratios(np.arange(1, tries, dtype=np.float64)))) * self._first()

    @numpy_defaults
    def tail(self, most: int) -> float:
        """P(K > most), most >= 0, rounded up."""
        most, term, below = at_least("most", most, 0), self._first(), 0.0
        for start in range(1, most + 1, _CHUNK):
            products = np.cumprod(self._ratios(np.arange(start, min(start + _CHUNK, most + 1), dtype=np.float64)))
            below += term * float(1 + products[:-1].sum())
            term *= float(products[-1])
        if below < 1 - 1e-4:
            return min(1.0, 1 - below + 1e-12)
        above, k = 0.0, most + 1
        while term > 0:  # every later ratio is at most max(first ratio, 1 - gamma)
            products = np.cumprod(self._ratios(np.arange(k, k + _CHUNK, dtype=np.float64)))
            above += term * float(1 + products[:-1].sum())
            term, k = term * float(products[-1]), k + _CHUNK
            ratio = max(float(self._ratios(np.array([float(k)]))[0]), 1 - self.gamma)
            if ratio < 1 and term / (1 - ratio) < 1e-13 * above:
                above += term / (1 - ratio)
                break
        return min(1.0, above * (1 + 1e-10))

    def _first(self) -> float:
        """P(K = 1) = eta (1 - gamma) / (gamma^-eta - 1)."""
        log = -math.log(self.gamma)
        rest = log if abs(self.eta) * log < 1e-12 else math.expm1(self.eta * log) / self.eta
        return -math.expm1(-log) / rest

    def _ratios(self, k: _Array) -> _Array:
        """P(K = k + 1) / P(K = k) = (1 - gamma) (k + eta) / (k + 1)."""
        return np.asarray((1 - self.gamma) * (k + self.eta) / (k + 1), dtype=np.float64)


def tries_of_mean(eta: float, mean: float) -> RandomTries:
    """Return the truncated negative binomial law with a given shape and mean.

    Args:
        eta: > -1; 0 is logarithmic, 1 geometric. Laws of equal mean still differ: P(K = 1) grows as eta falls.
        mean: E[K] > 1.
    """
    if not 1 < mean < 1e6:
        raise ConfigError(f"the mean number of tries must lie between 1 and 1e6, got {mean}")

    def excess(log: float) -> float:
        return math.log(RandomTries(eta, math.exp(-log)).mean / mean)

    return RandomTries(eta, math.exp(-crossing(excess, 1e-9, 600.0 / max(1.0, abs(eta)))))


def draw(law: RandomTries, random_bits: Callable[[int], int] = secrets.randbits) -> int:
    """Draw a number of tries K >= 1 by inverting the distribution function, within total variation 1e-50 of the law.

    Args:
        random_bits: returns a uniform integer of the given number of bits; the default is the operating system's secret source.
    """
    with localcontext(prec=_DIGITS):
        eta, gamma = Decimal(law.eta), Decimal(law.gamma)
        term = eta * (1 - gamma) / (gamma**-eta - 1) if eta else (gamma - 1) / gamma.ln()
        remainder, tries = Decimal(random_bits(_BITS)) / Decimal(2) ** _BITS, 1
        while remainder >= term:
            remainder -= term
            term *= (1 - gamma) * (tries + eta) / (tries + 1)
            tries += 1
    return tries


Curve = Callable[[_Array], _Array]


def _extra(law: RandomTries, orders: _Array, values: _Array) -> _Array:
    """Return (1 - 1/l') eps'(l') + ln(1/gamma) / l' at each order l' >= 1."""
    return np.asarray((1 - 1 / orders) * values - math.log(law.gamma) / orders, dtype=np.float64)


@numpy_defaults
def selection_rdp(law: RandomTries, orders: _Array, values: _Array, reverse_values: _Array | None = None) -> _Array:
    """Return the Renyi divergences of the best of K tries, at the given orders.

    Args:
        law: of K. orders: Renyi orders, each > 1; the order l' is the best of them.
        values: divergences of one try at these orders. reverse_values: those of the other direction; None: the same.

    Source: Papernot & Steinke 2022, Theorem 2.
    """
    alphas, curve = np.asarray(orders, dtype=np.float64), np.asarray(values, dtype=np.float64)
    reverse = curve if reverse_values is None else np.asarray(reverse_values, dtype=np.float64)
    if alphas.shape != curve.shape or alphas.shape != reverse.shape or alphas.size == 0 or not np.all(alphas > 1):
        raise ConfigError(f"one divergence per order > 1: got shapes {alphas.shape}, {curve.shape} and {reverse.shape}")
    extra = (1 + law.eta) * float(np.min(_extra(law, alphas, reverse)))
    return np.asarray(curve + extra + math.log(law.mean) / (alphas - 1), dtype=np.float64)


@numpy_defaults
def selection_epsilon(law: RandomTries, curve: Curve, delta: float) -> float:
    """Return epsilon at `delta` of the best of K tries by Renyi divergences alone; `selection_bound` is sharper.

    Args:
        law: of K. curve: Renyi divergences of one try at an array of orders > 1, valid in both directions. delta: in (0, 1).

    Source: `selection_rdp`; conversion by Canonne, Kamath & Steinke 2020, Proposition 12.
    """
    delta = open_probability("delta", delta)

    def total(orders: _Array, values: _Array) -> _Array:
        converted = np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
        return np.asarray(values + math.log(law.mean) / (orders - 1) + converted, dtype=np.float64)

    return max(0.0, _least(total, curve) + _surcharge(law, curve))


@numpy_defaults
def selection_bound(
    law: RandomTries, events: Sequence[Event], delta: float, adjacency: Adjacency | None = None
) -> tuple[float, str]:
    """Return (epsilon at `delta` of the best of K tries, the bound used: "profile" or "rdp").

    Args:
        law: of K. events: all releases of one try, each with a proven cost. delta: in (0, 1). adjacency: of the events.

    Source: docs/privacy-theorems.md, "Private selection", by profiles; `selection_epsilon`.
    """
    delta = open_probability("delta", delta)
    profile, odds = accountant.delta_curve(events, adjacency=adjacency), law.gamma / (1 - law.gamma)
    surcharge = least_below(lambda e: profile(e)[0] - odds * math.expm1(e), 0.0, math.log1p(1 / odds))  # delta' <= 1
    one_try, _ = accountant.bound(events, delta / law.mean, adjacency=adjacency)
    by_profile = one_try + (1 + law.eta) * surcharge
    return min((by_profile, "profile"), (selection_epsilon(law, curve_of(events, adjacency), delta), "rdp"))


@numpy_defaults
def selection_divergence(law: RandomTries, curve: Curve, order: float) -> float:
    """Return the Renyi divergence at one order > 1 of the best of K tries; arguments as in `selection_epsilon`."""
    one = float(curve(np.array([order]))[0])
    return one + math.log(law.mean) / (order - 1) + _surcharge(law, curve)


def _surcharge(law: RandomTries, curve: Curve) -> float:
    """Return (1 + eta) times the minimum of `_extra`; l' = 1 costs ln(1/gamma) for any curve."""
    extra = _least(lambda orders, values: _extra(law, orders, values), curve)
    return (1 + law.eta) * min(extra, -math.log(law.gamma))


def _least(cost: Callable[[_Array, _Array], _Array], curve: Curve) -> float:
    """Return the minimal cost over orders: on the grid, then refined twice between the neighbours of the best order."""
    orders, best = np.array(ORDERS), math.inf
    for _ in range(3):
        costs = cost(orders, curve(orders))
        i = int(np.argmin(costs))
        best = min(best, float(costs[i]))
        low, high = orders[max(i - 1, 0)], orders[min(i + 1, orders.size - 1)]
        orders = 1 + np.geomspace(low - 1, high - 1, 17)
    return best


def curve_of(events: Sequence[Event], adjacency: Adjacency | None = None) -> Curve:
    """Return the Renyi curve of all releases of one try, valid in both directions."""

    def curve(orders: _Array) -> _Array:
        return sum((accountant.rdp_curve(event, orders, adjacency=adjacency) for event in events), np.zeros(orders.shape))

    return curve


@numpy_defaults
def needed_noise_multiplier(
    law: RandomTries,
    make_events: Callable[[float], Sequence[Event]],
    epsilon: float,
    delta: float,
    *,
    adjacency: Adjacency | None = None,
    tolerance: float | None = None,
) -> float:
    """Return a noise multiplier per try, rounded up, at which the best of K tries costs at most epsilon at delta.

    Args:
        law: of K. make_events: releases of one try at a given noise multiplier. epsilon: > 0. delta: in (0, 1).
        adjacency: of the events. tolerance: as in `fedveil.accounting.accountant.calibrate`.

    Raises:
        ConfigError: no noise multiplier up to 1e6 suffices.
    """
    epsilon = positive("epsilon", epsilon)
    precision = accountant.calibration_precision(make_events(1.0), tolerance)

    def cost(z: float) -> float:
        return _cost(law, tuple(make_events(z)), delta, adjacency)

    if cost(1e6) > epsilon:
        raise ConfigError(
            f"no noise multiplier up to 1e6 gives epsilon = {epsilon:g} to the best of {law.mean:g} expected runs: take "
            f"fewer runs, a larger epsilon, or more noise on what each releases besides (privacy.selection.score_noise)"
        )
    return accountant.least_noise(cost, epsilon, delta, precision)


@lru_cache(maxsize=1024)  # a search calibrates each setting several times
def _cost(law: RandomTries, events: tuple[Event, ...], delta: float, adjacency: Adjacency | None) -> float:
    return selection_bound(law, events, delta, adjacency)[0]


def truncation_delta(law: RandomTries, most: int, epsilon: float) -> float:
    """Return what a limit of `most` tries adds to delta: (1 + e^epsilon) P(K > most), large for a moderate `most`.

    Args:
        law: of K. most: K_max >= 1. epsilon: >= 0, proven without the limit.
    """
    epsilon = non_negative("epsilon", epsilon)
    return min(1.0, (1 + math.exp(min(epsilon, 700.0))) * law.tail(at_least("most", most, 1)))


@dataclass(frozen=True)
class Selection:
    """Selection of a run among others of equal price.

    Args:
        runs: the expected number of runs, or, if `shape` is None, the number of runs that were inspected.
        shape: eta > -1 of the truncated negative binomial law of a secret number of runs, of which only the best is released;
            0 is the logarithmic law. None if all runs were inspected.
        score_noise: noise multiplier of the private score that each run releases; None if the score uses public data.
    """

    runs: float
    shape: float | None = None
    score_noise: float | None = None

    def __post_init__(self) -> None:
        if self.shape is not None:
            tries_of_mean(self.shape, self.runs)
        elif self.runs < 1 or self.runs != int(self.runs):
            raise ConfigError(f"{self.runs:g} runs cannot be looked at: give a whole number of at least 1")
        if self.score_noise is not None and not 0 < self.score_noise < math.inf:
            raise ConfigError(f"the noise multiplier of a score must be finite and > 0, got {self.score_noise}")

    @property
    def law(self) -> RandomTries | None:
        """Return the law of the secret number of runs, or None if all runs were inspected."""
        return None if self.shape is None else tries_of_mean(self.shape, self.runs)

    def releases(self, events: Sequence[Event], adjacency: Adjacency) -> list[Event]:
        """Return all releases of one run: its events and the noisy score."""
        if self.score_noise is None or any(isinstance(event, Unbounded) for event in events):
            return list(events)
        return [*events, Gaussian(adjacency.factor / self.score_noise)]

    def bound(self, events: Sequence[Event], delta: float, adjacency: Adjacency) -> tuple[float, str]:
        """Return epsilon at `delta` of the whole search, and the accountant's name.

        Args:
            events: all releases of one run.
        """
        if any(isinstance(event, Unbounded) for event in events):
            return math.inf, "none"
        if (law := self.law) is not None:
            return selection_bound(law, events, delta, adjacency)
        return accountant.bound(self.every(events), delta, adjacency=adjacency)

    def every(self, events: Sequence[Event]) -> list[Event]:
        """Return the releases of all inspected runs, given those of one run."""
        times = int(self.runs)
        return [event if isinstance(event, Unbounded) else replace(event, count=event.count * times) for event in events]
