"""Audit subjects, and the exact binomial intervals that audits use.

The protocol is one call: `mechanism(world, rng)` runs the whole release on the private input of world 0 or world 1, with all
noise drawn from `rng`, and returns everything that an adversary in the view receives. Adapting a release takes one line:

    mechanism = on_pair(lambda update, rng: Output(door(update, rng)), update_0, update_1)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, ndtri

from fedveil.accounting import gaussian
from fedveil.accounting.types import SampledGaussian, Scope
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]
Private = TypeVar("Private")


@dataclass(frozen=True)
class Output:
    """A release as the adversary receives it: the vector and its side channels.

    vector: [d], in the dtype that is sent; entries that were not sent hold any fixed value (0).
    sent: [d] booleans, True where the entry was sent; None = all.
    extras: further released numbers or arrays (a loss, a norm, a count), by name.
    """

    vector: NDArray[Any]
    sent: NDArray[np.bool_] | None = None
    extras: Mapping[str, float | NDArray[Any]] = field(default_factory=dict)


class AuditedMechanism(Protocol):
    """A release on the private input of world 0 or 1; all its randomness comes from `rng`."""

    def __call__(self, world: int, rng: np.random.Generator, /) -> Output:
        """Release once in `world` (0 or 1)."""
        ...


def on_pair(release: Callable[[Private, np.random.Generator], Output], a: Private, b: Private) -> AuditedMechanism:
    """Return the mechanism that runs `release` on `a` in world 0 and on `b` in world 1."""

    def mechanism(world: int, rng: np.random.Generator, /) -> Output:
        return release(b if world else a, rng)

    return mechanism


@dataclass(frozen=True)
class Subject:
    """An audited release: the mechanism on two neighbouring inputs, and known facts about it.

    scope: unit, adjacency and view that the two worlds stand for.
    mean: the noiseless upload in world 0 and in world 1, each [d]; known, because an auditor has both inputs.
    noise_std: std of the noise on each coordinate in world 0 and world 1, each [d]; 0 = no noise there.
    gaussian: whether the trade-off curve between the worlds is Gaussian (plain Gaussian noise, equal in both worlds).
    bounded: whether the noise has bounded support, so that a neighbour's upload can lie where this one never does.
    layers: slices of the vector by name, for the recomputation of noise per layer; default one layer "all".
    sampled: the cost, if the noise is plain Gaussian and the unit is in the release by a secret chance.
    rate: the chance that the unit is in the release, if that is secret; `mechanism` draws it, `mean` includes the unit.
    present: the release with the unit in it, for the structural test: a leak in it is a leak at every delta < rate.
    """

    name: str
    mechanism: AuditedMechanism
    scope: Scope
    mean: tuple[Floats, Floats]
    noise_std: tuple[Floats, Floats]
    gaussian: bool = False
    bounded: bool = False
    layers: Mapping[str, slice] = field(default_factory=dict)
    sampled: SampledGaussian | None = None
    rate: float = 1.0
    present: AuditedMechanism | None = None

    def __post_init__(self) -> None:
        shapes = {np.shape(array) for array in (*self.mean, *self.noise_std)}
        if len(shapes) != 1 or len(shapes.pop()) != 1:
            got = [np.shape(array) for array in (*self.mean, *self.noise_std)]
            raise ConfigError(f"{self.name}: mean and noise_std must be four vectors of one length, got {got}")
        for array in (*self.mean, *self.noise_std):
            if not np.all(np.isfinite(array)):
                raise ConfigError(f"{self.name}: mean and noise_std must be finite")
        if not 0 < self.rate <= 1 or (self.rate < 1 and self.gaussian):
            raise ConfigError(f"{self.name}: rate must be in (0, 1], and 1 where the curve is Gaussian, got {self.rate}")
        if any(np.any(std < 0) for std in self.noise_std):
            raise ConfigError(f"{self.name}: noise_std must be >= 0")

    @property
    def d(self) -> int:
        return int(self.mean[0].size)

    @property
    def named_layers(self) -> Mapping[str, slice]:
        """Return the layers, or the whole vector as one."""
        return self.layers or {"all": slice(0, self.d)}


def isotropic(d: int, std: float) -> tuple[Floats, Floats]:
    """Return the same noise std on all d coordinates, for both worlds."""
    return np.full(d, std), np.full(d, std)


def check_level(alpha: float) -> float:
    """Return `alpha` if it is a usable error probability, in (0, 0.5]; else raise ConfigError."""
    if not 0 < alpha <= 0.5:
        raise ConfigError(f"alpha (chance of a wrong refutation) must lie in (0, 0.5], got {alpha}")
    return alpha


def check_delta(delta: float) -> float:
    """Return `delta` if it lies in [0, 1); else raise ConfigError."""
    if not 0 <= delta < 1:
        raise ConfigError(f"delta must lie in [0, 1), got {delta}")
    return delta


def clopper_pearson_upper(successes: ArrayLike, trials: ArrayLike, alpha: float) -> Floats:
    """Return a one-sided exact upper bound on a binomial probability.

    Args:
        successes: counts in [0, trials], any shape (fractions allowed, for planning).
        trials: number of trials >= 1, broadcast against `successes`.
        alpha: chance that the bound lies below the truth, in (0, 0.5].

    Source: Clopper & Pearson 1934.
    """
    k, n = _counts(successes, trials)
    inner = betaincinv(k + 1, np.maximum(n - k, 0.5), 1 - check_level(alpha))
    return np.where(k >= n, 1.0, inner)


def _counts(successes: ArrayLike, trials: ArrayLike) -> tuple[Floats, Floats]:
    k, n = np.broadcast_arrays(np.asarray(successes, dtype=np.float64), np.asarray(trials, dtype=np.float64))
    if not (np.all(n >= 1) and np.all(k >= 0) and np.all(k <= n)):
        raise ConfigError(f"counts must satisfy 0 <= successes <= trials and trials >= 1, got {k.tolist()} of {n.tolist()}")
    return k, n


def epsilon_from_rates(fpr: ArrayLike, fnr: ArrayLike, delta: float) -> Floats:
    """Return the largest epsilon that error rates (fpr, fnr) refute at `delta`, or 0 if they refute none.

    Args:
        fpr: upper bounds on the false-positive rate, in (0, 1].
        fnr: upper bounds on the false-negative rate, in (0, 1].
        delta: in [0, 1).

    Source: Kairouz, Oh & Viswanath 2015, Theorem 2.1: (epsilon, delta)-DP forces fpr + e^epsilon fnr >= 1 - delta and vice versa.
    """
    p, q = np.asarray(fpr, dtype=np.float64), np.asarray(fnr, dtype=np.float64)
    rest = 1 - check_delta(delta)
    with np.errstate(divide="ignore", invalid="ignore"):
        one = np.where(rest - q > 0, np.log(np.maximum(rest - q, 0) / p), 0.0)
        other = np.where(rest - p > 0, np.log(np.maximum(rest - p, 0) / q), 0.0)
    return np.maximum(np.maximum(one, other), 0.0)


def mu_from_rates(fpr: ArrayLike, fnr: ArrayLike) -> Floats:
    """Return the largest mu of Gaussian DP that error rates refute: Phi^-1(1 - fpr) - Phi^-1(fnr), at least 0.

    Source: Dong, Roth & Su 2022, Definition 2.6.
    """
    p, q = np.asarray(fpr, dtype=np.float64), np.asarray(fnr, dtype=np.float64)
    with np.errstate(invalid="ignore"):
        mu = np.where((p >= 1) | (q >= 1), 0.0, -ndtri(p) - ndtri(q))
    return np.maximum(mu, 0.0)


def epsilon_of_mu(mu: float, delta: float) -> float:
    """Return epsilon at `delta` of a mu-GDP curve; at delta = 0 any mu > 0 gives inf, so delta must be > 0.

    Valid as a lower bound on epsilon only if the mechanism's trade-off curve is Gaussian.
    """
    if not 0 < delta < 1:
        raise ConfigError(f"a Gaussian trade-off curve turns into an epsilon only at delta in (0, 1), got {delta}")
    return gaussian.epsilon_of(mu, delta)


def epsilon_ceiling(n: int, alpha: float = 0.05, delta: float = 0.0) -> float:
    """Return the largest epsilon that n error-free runs in each world can show (Clopper-Pearson, alpha / 2 on each rate).

    Args:
        n: runs per world, >= 1.
        alpha: error probability, in (0, 0.5].
        delta: in [0, 1).
    """
    worst = clopper_pearson_upper(0, n, alpha / 2)
    return float(epsilon_from_rates(worst, worst, delta))
