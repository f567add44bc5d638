"""The cost of a release on a secret sample, of clients or of a user's records.

A user has k records of clip 1, the noise std is z, and J ~ Bin(k, q) of the user's records are in a release.

- Zero-out: sum_j P(J = j) N(j) against N(0), in both directions (docs/privacy-theorems.md, "Several records a user"). This is
  tight when all records pull the same way. Treating the user as present with probability 1 - (1-q)^k would cost far more.
- Other adjacencies: the adversary is told J, which gives N(j) against N(0) with probability P(J = j), in both directions. This
  is valid for any replacement of the records, but not tight.

Units: noise std = `noise_multiplier` and sensitivity to one record 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import scipy
from numpy.typing import NDArray

from fedveil.accounting import fixed_size, pld, subsampled
from fedveil.accounting._numbers import at_least, non_negative, numpy_defaults, open_probability, positive, probability
from fedveil.accounting.gaussian import log_delta_of
from fedveil.accounting.pld import LARGEST_LOSS, Mixtures, Pld, grid, half_curve, joined, second_moment
from fedveil.accounting.types import (
    LARGEST,
    Adjacency,
    Event,
    FixedSampleGaussian,
    Gaussian,
    SampledGaussian,
    SecretSample,
    SeenCountGaussian,
    Unbounded,
    UserRecordsGaussian,
)
from fedveil.errors import ConfigError

_Array = NDArray[np.float64]
_LARGEST_ORDER = 512


@lru_cache(maxsize=64)
def _log_binomial(records: int, rate: float) -> _Array:
    j = np.arange(records + 1, dtype=np.float64)
    choose = scipy.special.gammaln(records + 1) - scipy.special.gammaln(j + 1) - scipy.special.gammaln(records - j + 1)
    return np.asarray(choose + j * math.log(rate) + (records - j) * math.log1p(-rate), dtype=np.float64)


def _log_ratio(log_w: _Array, z: float, x: _Array) -> tuple[_Array, _Array]:
    """Return the log density ratio of sum_j w_j N(j) to N(0) at each x, and its slope."""
    j = np.arange(log_w.size, dtype=np.float64)
    logs = log_w + (j * x[:, None] - j * j / 2) / (z * z)
    total = scipy.special.logsumexp(logs, axis=1)
    return np.asarray(total, dtype=np.float64), np.asarray(np.exp(logs - total[:, None]) @ j / (z * z), dtype=np.float64)


def _points(log_w: _Array, z: float, values: _Array) -> _Array:
    """Return the x at which the log density ratio equals each value, or -inf if it is larger everywhere."""
    reachable = values > log_w[0]
    j = np.arange(1, log_w.size, dtype=np.float64)
    # Newton from the right, as the log ratio is convex: it is at least each term, so each root is below all roots of the terms
    start = np.min((values[:, None] - log_w[1:]) * (z * z) / j + j / 2, axis=1)
    x = np.where(reachable, start, 0.0)
    for _ in range(200):
        value, slope = _log_ratio(log_w, z, x)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = np.where(reachable & (slope > 0), (value - values) / slope, 0.0)
        x = x - np.maximum(step, 0.0)
        if np.all(step <= 1e-14 * (1 + np.abs(x))):
            break
    return np.where(reachable, x, -np.inf)


@dataclass(frozen=True)
class UserPairs:
    """`count` releases on Poisson samples in which a user has up to `records` records."""

    records: int
    rate: float
    noise_multiplier: float
    count: int

    def _mixtures(self, losses: _Array, direction: bool | None) -> Mixtures:
        """Return the positive losses: data against zeroed (True), zeroed against data (False), or with J revealed (None)."""
        z, log_w = self.noise_multiplier, _log_binomial(self.records, self.rate)
        weights, centres = np.exp(log_w), np.arange(self.records + 1) / z
        zero, one = np.zeros(1), np.ones(1)
        if direction is None:
            points = losses / centres[1:, None] + centres[1:, None] / 2
            return Mixtures(points, [(weights[1:], centres[1:])], [(weights[1:], np.zeros(self.records))])
        mixed = [(w * one, c * one) for w, c in zip(weights, centres, strict=True)]
        if direction:
            return Mixtures(_points(log_w, z, losses)[None] / z, mixed, [(one, zero)])
        mirrored = [(w, -c) for w, c in mixed]  # x -> -x makes the loss of N(0) against the mixture grow with x
        return Mixtures(-_points(log_w, z, -losses)[None] / z, [(one, zero)], mirrored)

    def spread(self, *, replace: bool) -> float:
        """Return the rough std of one release's loss."""
        return _spread(self.records, self.rate, self.noise_multiplier)

    def highest(self, tail: float) -> float:
        """Return a loss above which one release contributes less than `tail` to delta."""
        z, log_w = self.noise_multiplier, _log_binomial(self.records, self.rate)[1:]
        j = np.arange(1, self.records + 1, dtype=np.float64)
        likely = np.maximum(log_w - math.log(tail) + math.log(self.records), 1.0)
        losses = j * (np.sqrt(2 * likely) * z + j / 2) / (z * z)
        return min(float(np.max(np.where(log_w > math.log(tail / self.records), losses, 0.0))), LARGEST_LOSS)

    def losses(self, step: float, highest: float, direction: bool | None, *, replace: bool) -> Pld:
        """Return the dominating pair; `direction` alone determines the adjacency, so `replace` is ignored."""
        indices, losses = grid(step, highest)
        forward = half_curve(indices, losses, self._mixtures(losses, direction))
        backward = forward if direction is None else half_curve(indices, losses, self._mixtures(losses, not direction))
        return joined(step, forward, backward)


@lru_cache(maxsize=256)
def _spread(records: int, rate: float, z: float) -> float:
    pairs = UserPairs(records, rate, z, 1)
    losses = np.append(0.0, np.geomspace(1e-4, 1.0, 120)) * pairs.highest(1e-12)
    return math.sqrt(sum(second_moment(losses, pairs._mixtures(losses, direction)) for direction in (True, False)))


def pairs_of(event: UserRecordsGaussian) -> UserPairs:
    """Convert an event with a rate in (0, 1) to the form that `fedveil.accounting.pld` composes."""
    return UserPairs(event.records, event.rate, event.noise_multiplier, event.count)


# --- one release ------------------------------------------------------------------------------------------------------


@numpy_defaults
def one_step_delta(records: int, rate: float, noise_multiplier: float, epsilon: float) -> tuple[float, float]:
    """Return the exact delta at epsilon of one release for a user with several records, zero-out: (remove, add direction).

    Remove: sum_j w_j Q((t - j)/z) - e^eps Q(t/z) with sum_j w_j e^((j t - j^2/2)/z^2) = e^eps. Add: the same with the roles
    exchanged; it is 0 for eps >= -k ln(1-q).

    Args:
        records: k from 1 to 1000. rate: in (0, 1). noise_multiplier: noise std / sensitivity to one record, > 0. epsilon: >= 0.

    Source: docs/privacy-theorems.md, "Several records a user".
    """
    _check(records, rate, noise_multiplier)
    z, epsilon, log_w = float(noise_multiplier), non_negative("epsilon", epsilon), _log_binomial(records, rate)
    weights, j = np.exp(log_w), np.arange(records + 1)
    over, under = _points(log_w, z, np.array([epsilon, -epsilon]))
    inner = (j * over - j * j / 2) / (z * z)  # the mean of exp(inner) is e^eps
    if inner.min() >= 0:  # a mean of Gaussian deltas, without cancellation
        removed = math.fsum(w * math.exp(log_delta_of(i / z, e)) for i, w, e in zip(j[1:], weights[1:], inner[1:], strict=True))
    else:
        removed = math.fsum(
            [*(weights * scipy.special.ndtr((j - over) / z)), -math.exp(epsilon + float(scipy.special.log_ndtr(-over / z)))]
        )
    added = math.fsum(
        [float(scipy.special.ndtr(under / z)), *(-weights * np.exp(epsilon + scipy.special.log_ndtr((under - j) / z)))]
    )
    return max(removed, 0.0), max(added, 0.0)


def _user_release_delta(event: UserRecordsGaussian, epsilon: float, adjacency: Adjacency | None) -> float:
    """Return delta at epsilon >= 0 of one release with a rate in (0, 1): exact for zero-out, else as if J were revealed."""
    if adjacency is Adjacency.ZERO_OUT:
        return max(one_step_delta(event.records, event.rate, event.noise_multiplier, epsilon))
    weights = np.exp(_log_binomial(event.records, event.rate)).tolist()
    told = (w * math.exp(log_delta_of(j / event.noise_multiplier, epsilon)) for j, w in enumerate(weights))
    return math.fsum(told)


def _check(records: int, rate: float, noise_multiplier: float) -> None:
    if at_least("records", records, 1) > 1000:
        raise ConfigError(f"records must be an integer from 1 to 1000, got {records}")
    open_probability("rate", probability("rate", rate))
    positive("noise_multiplier", noise_multiplier)


def _cumulants(log_w: _Array, z: float, highest: int) -> _Array:
    """Return ln E_Q[L^a] for a = 0..highest: ln E exp(sum_(i<l) J_i J_l / z^2) over a independent copies of J, by their sum."""
    j = np.arange(log_w.size, dtype=np.float64)
    one = log_w - j * j / (2 * z * z)
    total, moments = np.zeros(1), np.zeros(highest + 1)
    for a in range(1, highest + 1):
        size = total.size + j.size - 1
        shifted = np.full((j.size, size), -np.inf)
        for i in range(j.size):
            shifted[i, i : i + total.size] = total + one[i]
        total = scipy.special.logsumexp(shifted, axis=0)
        s = np.arange(size, dtype=np.float64)
        moments[a] = float(scipy.special.logsumexp(total + s * s / (2 * z * z)))
    return moments


def _add_divergences(log_w: _Array, z: float, orders: _Array) -> _Array:
    """Return ln E_Q[L^(1-a)] / (a - 1) of N(0) against the mixture, by the trapezoidal rule."""
    low = -12 * z - 1 / z
    x = np.linspace(low, 12 * z, math.ceil((12 * z - low) / min(0.4 * z, 0.5 * z * z)) + 1)
    base = -x * x / (2 * z * z) - math.log(z * math.sqrt(2 * math.pi)) + math.log(x[1] - x[0])
    ratio, _ = _log_ratio(log_w, z, x)
    return np.array([max(float(scipy.special.logsumexp(base + (1 - a) * ratio)), 0.0) / (a - 1) for a in orders])


@numpy_defaults
def user_rdp(records: int, rate: float, noise_multiplier: float, orders: _Array, *, adjacency: Adjacency | None = None) -> _Array:
    """Return the Renyi divergences of one release for a user with several records, in the worse direction.

    Integer orders are exact. Between them the convex (a - 1) R(a) is interpolated; above order 512 sampling is ignored.

    Args:
        records: k from 1 to 1000. rate: in (0, 1). noise_multiplier: noise std / sensitivity to one record, > 0.
        orders: each > 1. adjacency: zero-out is tight; for any other the adversary learns how many records are in the sample.

    Source: docs/privacy-theorems.md, "Several records a user".
    """
    _check(records, rate, noise_multiplier)
    z, log_w, a = float(noise_multiplier), _log_binomial(records, rate), np.asarray(orders, dtype=np.float64)
    unsampled = a * records**2 / (2 * z * z)
    if adjacency is not Adjacency.ZERO_OUT:
        j = np.arange(records + 1, dtype=np.float64)
        bounds = scipy.special.logsumexp(log_w + (a * (a - 1))[:, None] * j * j / (2 * z * z), axis=1) / (a - 1)
        return np.asarray(np.minimum(bounds, unsampled), dtype=np.float64)
    credited = (a <= _LARGEST_ORDER) & (a * records <= 4096)
    if not credited.any() or z < 0.05:
        return np.asarray(unsampled, dtype=np.float64)
    moments = _cumulants(log_w, z, math.ceil(float(a[credited].max())))
    removed = np.interp(a[credited], np.arange(moments.size), moments) / (a[credited] - 1)
    values = np.asarray(unsampled, dtype=np.float64)
    values[credited] = np.minimum(values[credited], np.maximum(removed, _add_divergences(log_w, z, a[credited])))
    return values


def rate_of(event: SecretSample) -> float:
    """Return the probability that a client, or a record, is in the sample."""
    return event.cohort / event.clients if isinstance(event, FixedSampleGaussian) else float(event.rate)


def unsampled_mu(event: SecretSample) -> float:
    """Return mu of one release with sampling ignored, which is valid by joint convexity."""
    return (event.records if isinstance(event, UserRecordsGaussian) else 1) / event.noise_multiplier


def _simplest(event: SecretSample) -> SecretSample:
    """Return one release as the event type with the tightest price, with count 1."""
    if isinstance(event, UserRecordsGaussian) and event.records == 1:
        return SampledGaussian(event.rate, event.noise_multiplier)
    return dataclasses.replace(event, count=1)


def split(events: Sequence[Event]) -> tuple[float, Counter[SecretSample]]:
    """Return (mu of all releases without amplification, number of amplified ones by kind); raise ConfigError for other events."""
    squares, sampled = [], Counter[SecretSample]()
    for event in events:
        if isinstance(event, Gaussian):
            squares.append(event.count * event.mu**2)
        elif isinstance(event, SampledGaussian | SeenCountGaussian | FixedSampleGaussian | UserRecordsGaussian):
            rate = rate_of(event)
            if rate == 1:
                squares.append(event.count * unsampled_mu(event) ** 2)
            elif rate > 0 and event.count > 0:
                sampled[_simplest(event)] += event.count
        else:
            supported = "Gaussian, SampledGaussian, SeenCountGaussian, FixedSampleGaussian, UserRecordsGaussian and Unbounded"
            raise ConfigError(f"this accountant knows {supported} events, not {event!r}")
    return math.sqrt(math.fsum(squares)), sampled


def rdp(event: SecretSample, orders: _Array, adjacency: Adjacency | None) -> _Array:
    """Return the Renyi divergences of one release with a rate in (0, 1)."""
    if isinstance(event, SampledGaussian):
        return subsampled.rdp(event.rate, event.noise_multiplier, orders, adjacency=adjacency)
    if isinstance(event, UserRecordsGaussian):
        return user_rdp(event.records, event.rate, event.noise_multiplier, orders, adjacency=adjacency)
    return fixed_size.rdp(fixed_size.renyi_pairs_of(event), orders, adjacency)


def release(event: SecretSample, count: int) -> pld.Release:
    """Convert `count` releases with a rate in (0, 1] for composition by loss distributions."""
    if isinstance(event, SampledGaussian):
        return pld.Sampled(event.rate, event.noise_multiplier, count)
    many = dataclasses.replace(event, count=count)
    return pairs_of(many) if isinstance(many, UserRecordsGaussian) else fixed_size.pairs_of(many)


def releases(mu: float, sampled: Counter[SecretSample]) -> list[pld.Release]:
    """Convert the result of `split` for composition by loss distributions."""
    plain: list[pld.Release] = [pld.Sampled(1.0, 1 / max(mu, 1 / LARGEST), 1)] if mu > 0 else []
    return plain + [release(event, count) for event, count in sampled.items()]


def one_release_delta(event: SecretSample, epsilon: float, adjacency: Adjacency | None) -> float:
    """Return delta at epsilon of one release with a rate in (0, 1), in closed form, in the worse direction."""
    z, pair = event.noise_multiplier, adjacency or Adjacency.ZERO_OUT
    if isinstance(event, SampledGaussian):
        return subsampled.one_release_delta(event.rate, z, epsilon, adjacency)
    if isinstance(event, UserRecordsGaussian):
        return _user_release_delta(event, epsilon, adjacency)
    if isinstance(event, FixedSampleGaussian):
        return max(fixed_size.fixed_sample_delta(rate_of(event), z, epsilon, pair))
    return max(fixed_size.seen_count_delta(event.clients, event.rate, z, epsilon, pair))


def is_amplified(event: Event) -> bool:
    """Return whether the event is amplified by sampling, that is, its rate lies strictly between 0 and 1."""
    return not isinstance(event, Gaussian | Unbounded) and 0 < rate_of(event) < 1
