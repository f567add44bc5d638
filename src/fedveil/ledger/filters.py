"""Privacy filters: a cap on the total cost of releases, fixed in advance and enforced in exact arithmetic.

A filter defines the cost of a release and the limit for all releases together, on every path. If the limit is enforced before
each release, the preset (epsilon, delta) may be quoted even when releases are chosen adaptively from earlier releases.
Costs are rational numbers, so rounding does not lose any number of tiny releases. A cost from a floating-point formula is
rounded up, and every cap is lowered by 1e-12 relatively.
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
    small,
)
from fedveil.errors import ConfigError

_SLACK = 1e-12
"""Relative margin between a formula's value and the enforced cap, and again between the cap and a share of it."""


class Filter(Protocol):
    """Cap on the total cost of releases."""

    @property
    def limit(self) -> Fraction:
        """Return the limit on the cost of all releases together."""
        ...

    @property
    def quotes(self) -> str:
        """Return the guarantee that holds within the limit, as text."""
        ...

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        """Return the cost of a release; raise ConfigError for an event that this filter cannot bound."""
        ...


@dataclass(frozen=True)
class GdpFilter:
    """Filter for Gaussian releases: the sum of mu^2 is at most the squared mu of (epsilon, delta), converted exactly.

    Args:
        epsilon: >= 0. delta: in (0, 1).
        ignore_sampling: charge a Poisson-sampled release as if everybody took part, which is sound by joint convexity; otherwise
            such a release is refused.

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
        """Return the filter with a limit of mu^2 on the sum of squares; its epsilon at `delta` is rounded up by 1e-9."""
        return cls(epsilon_of(mu, delta) * (1 + 1e-9), delta, ignore_sampling)

    @cached_property
    def mu(self) -> float:
        """Return the enforced cap on the mu of all releases together."""
        return mu_of(self.epsilon, self.delta) * (1 - _SLACK)

    @cached_property
    def limit(self) -> Fraction:
        """Return the limit on mu^2 of all releases together."""
        return Fraction(self.mu) ** 2

    @property
    def quotes(self) -> str:
        """Return the guarantee that holds within the limit, as text."""
        return f"epsilon = {self.epsilon:g} at delta = {small(self.delta)} by the GDP filter"

    def share(self, count: int, slack: float = _SLACK) -> float:
        """Return the mu at which `count` equal releases fit: mu / sqrt(count), less `slack` (1e-6 for float32 noise levels)."""
        return self.mu * (1 - slack) / math.sqrt(at_least("count", count, 1))

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        """Return count mu^2; with `ignore_sampling`, a sampled release costs as much as the unsampled one."""
        if isinstance(event, Gaussian):
            return event.count * Fraction(event.mu) ** 2
        if not isinstance(event, Unbounded) and (self.ignore_sampling or secret_samples.rate_of(event) == 1):
            return event.count * Fraction(math.nextafter(secret_samples.unsampled_mu(event), math.inf)) ** 2
        raise ConfigError(
            f"a GDP filter cannot account for {event}: use an RdpFilter, or set ignore_sampling = True to charge a sampled "
            f"release as much as an unsampled one"
        )


@dataclass(frozen=True)
class RdpFilter:
    """Filter for plain and sampled Gaussian releases: it caps the sum of Renyi divergences at one order fixed in advance.

    The cap is the divergence that converts to (epsilon, delta) at this order.

    Args:
        epsilon: >= 0. delta: in (0, 1). order: > 1; choose it before the run, from public numbers (`best_order`).

    Raises:
        ConfigError: the order is too small for this epsilon and delta, so no release would fit.

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
                f"at Renyi order {self.order:g} no release fits into epsilon = {self.epsilon:g} at delta = {small(self.delta)}: "
                f"take a larger order (best_order finds the best one for a plan)"
            )

    @cached_property
    def limit(self) -> Fraction:
        """Return the limit on the total Renyi divergence: epsilon + (ln delta + ln a) / (a - 1) - ln(1 - 1/a)."""
        a = self.order
        terms = (self.epsilon, (math.log(self.delta) + math.log(a)) / (a - 1), -math.log1p(-1 / a))
        return Fraction(math.fsum(terms)) - Fraction(_SLACK) * Fraction(math.fsum(map(abs, terms)))

    @property
    def quotes(self) -> str:
        """Return the guarantee that holds within the limit, as text."""
        return f"epsilon = {self.epsilon:g} at delta = {small(self.delta)} by the Renyi filter of order {self.order:g}"

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        """Return count times the Renyi divergence of one release, rounded up by 1e-9 relatively if it is sampled."""
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
    """Return the order at which a nominal, public plan uses the smallest share of the budget; for `RdpFilter`, before the run.

    Args:
        epsilon: >= 0. delta: in (0, 1). plan: the releases of the run without adaptation.
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
        share = float(sum((rule.cost(event, adjacency) for event in plan), Fraction(0)) / rule.limit)
        best = min(best or (share, order), (share, order))
    if best is None:
        raise ConfigError(
            f"no Renyi order up to {max(orders):g} can give epsilon = {epsilon:g} at delta = {small(delta)}: "
            f"raise epsilon or delta"
        )
    return best[1]


@dataclass(frozen=True)
class FixedPlan:
    """Filter by a plan fixed in advance: at most `count` releases, each with at least the noise and at most the rate of `event`.

    Each release is dominated by the planned one, so any bound on the plan may be quoted, also by privacy loss distributions,
    which allow no adaptive filter.

    Args:
        event: one planned release (multiplied by its count). count: number of them, >= 0.

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
        """Return the number of planned releases."""
        return Fraction(self.event.count * self.count)

    @property
    def quotes(self) -> str:
        """Return the guarantee that holds within the limit, as text."""
        return f"whatever is proven of {self.count} times {self.event}, fixed in advance"

    def cost(self, event: Event, adjacency: Adjacency) -> Fraction:
        """Return the number of releases in `event`; raise ConfigError unless each is dominated by the planned one."""
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
    """Return a key shared by events comparable in rate and noise: plain and Poisson-sampled, or another kind with its size."""
    if isinstance(event, SeenCountGaussian | FixedSampleGaussian):
        return type(event).__name__, event.clients
    return (type(event).__name__, event.records) if isinstance(event, UserRecordsGaussian) else ("", 1)
