"""The random number of tries of a private selection: the truncated negative binomial law, and exact draws from it."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting._check import at_least, numpy_defaults, open_probability
from fedveil.accounting._roots import crossing
from fedveil.errors import ConfigError

_Array = NDArray[np.float64]
_CHUNK = 2**14
_BITS, _DIGITS = 192, 70
"""Of the uniform number that a draw is made from, and of the sums that it is compared with."""


@dataclass(frozen=True)
class RandomTries:
    """The truncated negative binomial law of the number of tries K >= 1: eta > -1 and gamma in (0, 1)."""

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
        while term > 0:  # from here on each ratio is at most the larger of the first one and 1 - gamma
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
    """The truncated negative binomial law of a shape and mean.

    Args:
        eta: > -1; 0 is logarithmic, 1 geometric. Equal means are not equal searches: P(K = 1) grows as eta falls.
        mean: E[K] > 1.
    """
    if not 1 < mean < 1e6:
        raise ConfigError(f"the mean number of tries must lie between 1 and 1e6, got {mean}")

    def excess(log: float) -> float:
        return math.log(RandomTries(eta, math.exp(-log)).mean / mean)

    return RandomTries(eta, math.exp(-crossing(excess, 1e-9, 600.0 / max(1.0, abs(eta)))))


def draw(law: RandomTries, random_bits: Callable[[int], int] = secrets.randbits) -> int:
    """A number of tries K >= 1 by inversion of the distribution function; its law is within total variation 1e-50.

    Args:
        random_bits: a uniform number of so many bits; by default from the operating system, and so secret.
    """
    with localcontext(prec=_DIGITS):
        eta, gamma = Decimal(law.eta), Decimal(law.gamma)
        term = eta * (1 - gamma) / (gamma**-eta - 1) if eta else (gamma - 1) / gamma.ln()
        left, tries = Decimal(random_bits(_BITS)) / Decimal(2) ** _BITS, 1
        while left >= term:
            left -= term
            term *= (1 - gamma) * (tries + eta) / (tries + 1)
            tries += 1
    return tries
