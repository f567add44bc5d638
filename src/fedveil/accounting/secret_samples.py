"""What each kind of release on a secret sample costs, for the accountants: unsampled mu, Renyi divergences, loss distribution."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting import pld, seen_count, subsampled, swapped_pairs, user_records
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


def rate_of(event: SecretSample) -> float:
    """The probability with which a client, or a record, is in the sample."""
    return event.cohort / event.clients if isinstance(event, FixedSampleGaussian) else float(event.rate)


def unsampled_mu(event: SecretSample) -> float:
    """mu of one release when sampling is ignored: a mixture with equal weights is no further apart than its parts."""
    return (event.records if isinstance(event, UserRecordsGaussian) else 1) / event.noise_multiplier


def _simplest(event: SecretSample) -> SecretSample:
    """One release, without its count, as the kind that is priced best."""
    if isinstance(event, UserRecordsGaussian) and event.records == 1:
        return SampledGaussian(event.rate, event.noise_multiplier)
    return dataclasses.replace(event, count=1)


def split(events: Sequence[Event]) -> tuple[float, Counter[SecretSample]]:
    """(mu of all releases without amplification, number of amplified ones by kind); anything else is refused."""
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
            known = "Gaussian, SampledGaussian, SeenCountGaussian, FixedSampleGaussian, UserRecordsGaussian and Unbounded"
            raise ConfigError(f"this accountant knows {known} events, not {event!r}")
    return math.sqrt(math.fsum(squares)), sampled


def rdp(event: SecretSample, orders: _Array, adjacency: Adjacency | None) -> _Array:
    """Renyi divergences of one release with a rate in (0, 1)."""
    if isinstance(event, SampledGaussian):
        return subsampled.rdp(event.rate, event.noise_multiplier, orders, adjacency=adjacency)
    if isinstance(event, UserRecordsGaussian):
        return user_records.rdp(event.records, event.rate, event.noise_multiplier, orders, adjacency=adjacency)
    return swapped_pairs.rdp(seen_count.renyi_pairs_of(event), orders, adjacency)


def release(event: SecretSample, count: int) -> pld.Release:
    """`count` releases with a rate in (0, 1], for composition by loss distributions."""
    if isinstance(event, SampledGaussian):
        return pld.Sampled(event.rate, event.noise_multiplier, count)
    many = dataclasses.replace(event, count=count)
    return user_records.pairs_of(many) if isinstance(many, UserRecordsGaussian) else seen_count.pairs_of(many)


def releases(mu: float, sampled: Counter[SecretSample]) -> list[pld.Release]:
    """What `split` returned, for composition by loss distributions."""
    plain: list[pld.Release] = [pld.Sampled(1.0, 1 / max(mu, 1 / LARGEST), 1)] if mu > 0 else []
    return plain + [release(event, count) for event, count in sampled.items()]


def one_release_delta(event: SecretSample, epsilon: float, adjacency: Adjacency | None) -> float:
    """delta at epsilon of one release with a rate in (0, 1), in closed form; the worse direction."""
    z, pair = event.noise_multiplier, adjacency or Adjacency.ZERO_OUT
    if isinstance(event, SampledGaussian):
        return subsampled.one_release_delta(event.rate, z, epsilon, adjacency)
    if isinstance(event, UserRecordsGaussian):
        return user_records.one_release_delta(event, epsilon, adjacency)
    if isinstance(event, FixedSampleGaussian):
        return max(seen_count.fixed_sample_delta(rate_of(event), z, epsilon, pair))
    return max(seen_count.seen_count_delta(event.clients, event.rate, z, epsilon, pair))


def is_amplified(event: Event) -> bool:
    """Whether an accountant credits the event with amplification by sampling: a rate above 0 and below 1."""
    return not isinstance(event, Gaussian | Unbounded) and 0 < rate_of(event) < 1
