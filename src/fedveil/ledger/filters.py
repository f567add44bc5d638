"""Privacy filters: how much each release takes from a cap that is fixed in advance, in exact arithmetic.

A filter says what a release costs and what all releases together may cost, on every path. As long as that is enforced before each
release, the preset (epsilon, delta) may be quoted, whatever the releases were chosen from, as long as that was released before.
Costs are rational numbers, so that no number of tiny releases is lost to rounding. Where a cost comes out of floating-point
formulas it is rounded up, and every cap is lowered by 1e-12 of itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Protocol

from fedveil.accounting import accountant, secret_samples, subsampled
from fedveil.accounting._numbers import at_least, non_negative, open_probability
from fedveil.accounting.gaussian import epsilon_of, mu_of
from fedveil.accounting.types import (
    Adjacency,
    Event,
    FixedSampleGaussian,
    Gaussian,
    OneOrder,
    SecretSample,
    SeenCountGaussian,
    Unbounded,
    UserRecordsGaussian,
)
from fedveil.errors import ConfigError

SLACK = 1e-12
"""Relative margin between a formula's value and the cap that is enforced, and again between that cap and a share of it."""


class Filter(Protocol):
    """A rule that caps the total cost of releases."""

    @property
    def limit(self) -> Fraction:
        """What all releases together may cost."""
        ...

    @property
    def quotes(self) -> str:
        """What may be said when the limit is kept."""
        ...

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        """What a release costs; raises ConfigError for a kind that this filter cannot bound."""
        ...


@dataclass(frozen=True)
class GdpFilter:
    """Gaussian releases with sum of mu^2 at most the square of the mu of (epsilon, delta), exactly converted.

    Args:
        epsilon: >= 0. delta: in (0, 1).
        ignore_sampling: charge a Poisson-sampled release as if everybody took part (sound: by joint convexity a mixture with
            equal weights is no further apart than its parts); otherwise it is refused.

    Source: fully adaptive composition in Gaussian DP: Smith & Thakurta 2022; Koskela, Tobaben & Honkela 2023.
    """

    epsilon: float
    delta: float
    ignore_sampling: bool = False

    def __post_init__(self) -> None:
        non_negative("epsilon", self.epsilon)
        open_probability("delta", self.delta)

    @classmethod
    def from_mu(cls, mu: float, delta: float, ignore_sampling: bool = False) -> GdpFilter:
        """The filter that admits Gaussian releases with sum of mu^2 up to mu^2; its epsilon at `delta` is rounded up by 1e-9."""
        return cls(epsilon_of(mu, delta) * (1 + 1e-9), delta, ignore_sampling)

    @cached_property
    def mu(self) -> float:
        """The enforced cap on the mu of all releases together."""
        return mu_of(self.epsilon, self.delta) * (1 - SLACK)

    @cached_property
    def limit(self) -> Fraction:
        """mu^2 of all releases together, at most."""
        return Fraction(self.mu) ** 2

    @property
    def quotes(self) -> str:
        """What may be said when the limit is kept."""
        return f"epsilon = {self.epsilon:g} at delta = {self.delta:g} by the GDP filter"

    def share(self, count: int, slack: float = SLACK) -> float:
        """The mu at which `count` equal releases fit: mu / sqrt(count), lowered by `slack` (1e-6 for noise levels in float32)."""
        return self.mu * (1 - slack) / math.sqrt(at_least("count", count, 1))

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        """count mu^2; for a sampled release that may be ignored, of the unsampled one."""
        if isinstance(event, Gaussian):
            return event.count * Fraction(event.mu) ** 2
        if not isinstance(event, Unbounded) and (self.ignore_sampling or secret_samples.rate_of(event) == 1):
            return event.count * Fraction(math.nextafter(secret_samples.unsampled_mu(event), math.inf)) ** 2
        raise ConfigError(
            f"a GDP filter cannot account for {event}: charge Gaussian(mu) without amplification (ignore_sampling = True), "
            f"or use an RdpFilter, which can"
        )


@dataclass(frozen=True)
class RdpFilter:
    """Gaussian and Poisson-sampled Gaussian releases with sum of Renyi divergences, at one order fixed in advance, at most a cap.

    The cap is the divergence that converts to (epsilon, delta) at this order.

    Args:
        epsilon: >= 0. delta: in (0, 1). order: > 1; choose it before the run, from public numbers (`best_order`).

    Raises:
        ConfigError: the order is too small for this epsilon and delta, so that nothing could be released.

    Source: the filter: Feldman & Zrnic 2021; the conversion: Canonne, Kamath & Steinke 2020, Proposition 12.
    """

    epsilon: float
    delta: float
    order: float

    def __post_init__(self) -> None:
        non_negative("epsilon", self.epsilon)
        open_probability("delta", self.delta)
        if not (self.order > 1 and math.isfinite(self.order)):
            raise ConfigError(f"a Renyi order must be finite and > 1, got {self.order}")
        if self.limit <= 0:
            raise ConfigError(
                f"at Renyi order {self.order:g} no release fits into epsilon = {self.epsilon:g} at delta = {self.delta:g}: take "
                f"a larger order (best_order finds the best one for a plan)"
            )

    @cached_property
    def limit(self) -> Fraction:
        """Renyi divergence of all releases together, at most: epsilon + (ln delta + ln a) / (a - 1) - ln(1 - 1/a)."""
        a = self.order
        terms = (self.epsilon, (math.log(self.delta) + math.log(a)) / (a - 1), -math.log1p(-1 / a))
        return Fraction(math.fsum(terms)) - Fraction(SLACK) * Fraction(math.fsum(map(abs, terms)))

    @property
    def quotes(self) -> str:
        """What may be said when the limit is kept."""
        return f"epsilon = {self.epsilon:g} at delta = {self.delta:g} by the Renyi filter of order {self.order:g}"

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        """count times the Renyi divergence of one release, rounded up by 1e-9 of itself when it is sampled."""
        if isinstance(event, Gaussian):
            return event.count * Fraction(self.order) * Fraction(event.mu) ** 2 / 2
        if not isinstance(event, Unbounded):
            return event.count * _sampled_cost(replace(event, count=1), self.order, adjacency)
        if isinstance(event, OneOrder) and event.order == self.order:
            return Fraction(event.divergence) * (1 + Fraction(1, 10**9))
        raise ConfigError(f"a Renyi filter knows Gaussian releases, sampled or not, and no {event}")


@lru_cache(maxsize=4096)
def _sampled_cost(event: SecretSample, order: float, adjacency: Adjacency) -> Fraction:
    rate, records = secret_samples.rate_of(event), event.records if isinstance(event, UserRecordsGaussian) else 1
    unsampled = Fraction(order) * records**2 / (2 * Fraction(event.noise_multiplier) ** 2)
    if rate == 1 or unsampled > 10**300:
        return unsampled
    divergence = float(accountant.rdp_curve(event, [order], adjacency=adjacency)[0])
    return min(Fraction(divergence) * (1 + Fraction(1, 10**9)), unsampled)


def best_order(
    epsilon: float,
    delta: float,
    plan: Sequence[Gaussian | SecretSample],
    adjacency: Adjacency,
    orders: Sequence[float] = subsampled.ORDERS,
) -> float:
    """The order at which a nominal, public plan takes the smallest part of the budget; for `RdpFilter`, before the run.

    Args:
        epsilon: >= 0. delta: in (0, 1). plan: what the run would release if nothing were adapted.
        orders: candidates, each > 1.

    Raises:
        ConfigError: no candidate order can give (epsilon, delta).
    """
    best: tuple[float, float] | None = None
    for order in orders:
        try:
            rule = RdpFilter(epsilon, delta, order)
        except ConfigError:
            continue
        part = float(sum((rule.cost(event, adjacency) for event in plan), Fraction(0)) / rule.limit)
        best = min(best or (part, order), (part, order))
    if best is None:
        raise ConfigError(
            f"no Renyi order up to {max(orders):g} can give epsilon = {epsilon:g} at delta = {delta:g}: raise epsilon or delta"
        )
    return best[1]


@dataclass(frozen=True)
class FixedPlan:
    """A plan fixed in advance: at most `count` releases, each with at least the noise and at most the sampling rate of `event`.

    Because each release is dominated by the planned one, any bound on the plan itself may be quoted, also by privacy loss
    distributions, which allow no adaptive filter.

    Args:
        event: one planned release (its own count is multiplied in). count: how many, >= 0.

    Source: a lower rate is a mixture with a constant and more noise is post-processing, so both are dominated; adaptive
    composition of mechanisms under trade-off functions fixed in advance: Dong, Roth & Su 2022, Theorem 3.2.
    """

    event: Gaussian | SecretSample
    count: int

    def __post_init__(self) -> None:
        at_least("count", self.count, 0)
        if isinstance(self.event, Unbounded):
            raise ConfigError(f"a plan of unbounded releases proves nothing ({self.event.reason}); run without a budget instead")

    @property
    def limit(self) -> Fraction:
        """The number of releases."""
        return Fraction(self.event.count * self.count)

    @property
    def quotes(self) -> str:
        """What may be said when the limit is kept."""
        return f"whatever is proven of {self.count} times {self.event}, fixed in advance"

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        """The number of releases in `event`; raises ConfigError unless each is dominated by the planned one."""
        if isinstance(event, Unbounded):
            raise ConfigError(f"a fixed plan cannot account for {event}")
        rate, mu = _rate_and_mu(event)
        planned_rate, planned_mu = _rate_and_mu(self.event)
        if mu == 0 or (mu <= planned_mu and rate <= planned_rate and _kind(event) == _kind(self.event)):
            return Fraction(event.count)
        raise ConfigError(
            f"{event} is not covered by the fixed plan of {self.event}: take at least its noise and at most its rate"
        )


def _rate_and_mu(event: Gaussian | SecretSample) -> tuple[float, Fraction]:
    if isinstance(event, Gaussian):
        return 1.0, Fraction(event.mu)
    records = event.records if isinstance(event, UserRecordsGaussian) else 1
    return secret_samples.rate_of(event), records / Fraction(event.noise_multiplier)


def _kind(event: Gaussian | SecretSample) -> tuple[str, int]:
    """Releases that are comparable by rate and noise: plain and Poisson-sampled ones, or one other kind with its whole number."""
    if isinstance(event, SeenCountGaussian | FixedSampleGaussian):
        return type(event).__name__, event.clients
    return (type(event).__name__, event.records) if isinstance(event, UserRecordsGaussian) else ("", 1)
