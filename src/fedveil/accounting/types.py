"""Types of privacy statements, and the formatting of their numbers.

An epsilon means nothing without its unit, adjacency, view and delta. `Guarantee`, `Claim` and `Audit` therefore require a
`Scope` and a delta.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from enum import StrEnum
from typing import TypeVar

from fedveil.errors import ConfigError


def number(value: float, digits: int = 4) -> str:
    """Format a number, rounded to the nearest with `digits` significant digits; use `at_most` and `at_least` for bounds.

    Print an epsilon only together with its unit, adjacency, view and delta.
    """
    return f"{value:.{digits}g}"


_SLACK = 1e-9
"""Relative floating-point error of a bound that printing ignores, so that a target which is met is printed exactly."""


def count(value: int) -> str:
    """Format a whole number with commas: 3,175."""
    return f"{value:,}"


def small(value: float) -> str:
    """Format a probability such as delta: 1e-4, 0.01, 2.5e-6."""
    if not 0 < value < 0.01:
        return f"{value:g}"
    mantissa, _, exponent = f"{value:.5e}".partition("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def at_most(value: float, digits: int = 4) -> str:
    """Format an upper bound, rounded up in its last digit."""
    return _rounded(value * (1 - _SLACK), digits, ROUND_CEILING)


def at_least(value: float, digits: int = 4) -> str:
    """Format a lower bound, rounded down in its last digit."""
    return _rounded(value * (1 + _SLACK), digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    return number(float(Context(prec=digits, rounding=rounding).create_decimal(Decimal(value))), digits)


def epsilon(value: float, unbounded: str = "inf", shown: Callable[[float], str] = at_most) -> str:
    """Format an epsilon in four digits, or return `unbounded` if it is infinite.

    Args:
        shown: the format: `at_most` for proven or spent, `at_least` for audited, `number` for claimed values.
    """
    return unbounded if math.isinf(value) else shown(value)


def percent(share: float, digits: int = 1) -> str:
    """Format a share as a percentage, NaN as a dash."""
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def percent_at_most(share: float) -> str:
    """Format a share as a percentage, rounded up so that an upper bound stays valid."""
    if share >= 1:
        return "100 %"
    digits = 1 if share < 0.999 else min(12, -math.floor(math.log10(100 * (1 - share)) + 1e-9))
    scale = 10**digits
    return f"{math.ceil(100 * share * scale - 1e-9) / scale:.{digits}f} %"


def percent_at_least(share: float) -> str:
    """Format a confidence as a percentage, rounded down to two decimals, or to as many as distinguish it from 100 %."""
    digits = 2 if not 0.9999 < share < 1 else math.ceil(-math.log10(100 * (1 - share)) - 1e-9)
    return f"{math.floor(100 * share * 10**digits + 1e-6) / 10**digits:.15g}%"


def joined(names: Sequence[str]) -> str:
    """Join names as in `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


class Unit(StrEnum):
    """Unit of protection: one example, or all data of one client."""

    RECORD = "record"
    CLIENT = "client"


class Adjacency(StrEnum):
    """Relation between neighbouring inputs.

    `zero_out`: a contribution is replaced by zero; noise, denominator and number of participants stay the same.
    `replace_one`: a contribution is replaced by any other admissible one.
    """

    ZERO_OUT = "zero_out"
    REPLACE_ONE = "replace_one"

    @property
    def factor(self) -> int:
        """Return the sensitivity of a clipped contribution in units of its clip norm: 1 or 2."""
        return 1 if self is Adjacency.ZERO_OUT else 2


class View(StrEnum):
    """Adversary's view: each upload, each round's aggregate (and so every global model), or only the last model."""

    SERVER = "server"
    AGGREGATE = "aggregate"
    FINAL = "final"


_Member = TypeVar("_Member", bound=StrEnum)


def member(kind: type[_Member], name: str, value: _Member | str) -> _Member:
    """Convert a value or its name to the enumeration member, so that it can be compared by `is`.

    Raises:
        ConfigError: `value` is not a member.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} = {value!r}: it must be one of {', '.join(kind)}") from None


@dataclass(frozen=True)
class Scope:
    """Scope of an epsilon: unit, adjacency and view; names given as strings are converted.

    Raises:
        ConfigError: an unknown unit, adjacency or view.
    """

    unit: Unit
    adjacency: Adjacency
    view: View

    def __post_init__(self) -> None:
        for name, kind in (("unit", Unit), ("adjacency", Adjacency), ("view", View)):
            object.__setattr__(self, name, member(kind, name, getattr(self, name)))

    @property
    def update_factor(self) -> int:
        """Return the sensitivity of a client's clipped update in units of its clip norm.

        At record level it is 2 under either adjacency: without the record the update may point in any other direction.
        """
        return 2 if self.unit is Unit.RECORD else self.adjacency.factor

    def __str__(self) -> str:
        return f"{self.unit} level, {self.adjacency.replace('_', '-')}, {self.view} view"


# --- events: the cost of a release -----------------------------------------------------------------------------------

LARGEST = 1e100
"""Largest mu and noise multiplier; the smallest multiplier is 1e-100. Their fourth powers, and epsilon, fit into a float."""


def _check_noise(noise_multiplier: float, count: int) -> None:
    if not 1 / LARGEST <= noise_multiplier <= LARGEST:
        raise ConfigError(f"noise_multiplier must lie between 1e-100 and 1e100, got {noise_multiplier}")
    if count != int(count) or count < 0:
        raise ConfigError(f"count must be an integer >= 0, got {count}")


@dataclass(frozen=True)
class Gaussian:
    """`count` Gaussian releases, each exactly mu-GDP in its scope (mu = sensitivity / noise std)."""

    mu: float
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.mu <= LARGEST:
            raise ConfigError(f"mu must lie between 0 and 1e100, got {self.mu}")
        if self.count < 0:
            raise ConfigError(f"count must be >= 0, got {self.count}")


@dataclass(frozen=True)
class SampledGaussian:
    """`count` Gaussian releases on a Poisson sample: each unit joins with probability `rate`, independently and secretly.

    `noise_multiplier` is noise std / sensitivity, for the sensitivity under the scope's adjacency.
    """

    rate: float
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"sampling rate must lie in [0, 1], got {self.rate}")
        _check_noise(self.noise_multiplier, self.count)


@dataclass(frozen=True)
class SeenCountGaussian:
    """`count` Gaussian releases on a Poisson sample of clients whose size is public and whose members are secret.

    Each of `clients` clients (excluding those who collude with the adversary) joins a round with probability `rate`. A client
    with a zeroed contribution still counts. `noise_multiplier`: as in `SampledGaussian`, a lower bound for every released round.
    """

    clients: int
    rate: float
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        if self.clients != int(self.clients) or self.clients < 1:
            raise ConfigError(f"clients must be an integer >= 1, got {self.clients}")
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"sampling rate must lie in [0, 1], got {self.rate}")
        _check_noise(self.noise_multiplier, self.count)


@dataclass(frozen=True)
class FixedSampleGaussian:
    """`count` Gaussian releases on a secret sample of exactly `cohort` of `clients` clients, drawn afresh without replacement.

    `noise_multiplier`: as in `SampledGaussian`.
    """

    clients: int
    cohort: int
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        if self.clients != int(self.clients) or self.clients < 1:
            raise ConfigError(f"clients must be an integer >= 1, got {self.clients}")
        if self.cohort != int(self.cohort) or not 0 <= self.cohort <= self.clients:
            raise ConfigError(f"cohort must be an integer from 0 to {self.clients} (clients), got {self.cohort}")
        _check_noise(self.noise_multiplier, self.count)


@dataclass(frozen=True)
class UserRecordsGaussian:
    """`count` Gaussian releases on a Poisson sample of records, for a user who holds up to `records` records.

    Each record joins with probability `rate`, independently and secretly. `noise_multiplier` is noise std / sensitivity to ONE
    record, for the sensitivity under the scope's adjacency.
    """

    records: int
    rate: float
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        if self.records != int(self.records) or not 1 <= self.records <= 1000:
            raise ConfigError(f"records must be an integer from 1 to 1000, got {self.records}")
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"sampling rate must lie in [0, 1], got {self.rate}")
        _check_noise(self.noise_multiplier, self.count)


@dataclass(frozen=True)
class Unbounded:
    """Release without a provable cost, and the reason."""

    reason: str


@dataclass(frozen=True)
class OneOrder(Unbounded):
    """Releases with a proven Renyi divergence at a single order; only a budget of that order can count them."""

    order: float
    divergence: float

    def __post_init__(self) -> None:
        if not (1 < self.order < math.inf and 0 <= self.divergence < math.inf):
            raise ConfigError(f"need an order > 1 and a finite divergence >= 0, got {self.order} and {self.divergence}")


SecretSample = SampledGaussian | SeenCountGaussian | FixedSampleGaussian | UserRecordsGaussian
"""Releases whose cost is amplified by a sample that the adversary does not see."""

Event = Gaussian | SecretSample | Unbounded


# --- the three numbers ----------------------------------------------------------------------------------------------


def _check(epsilon: float, delta: float) -> None:
    if math.isnan(epsilon) or epsilon < 0:
        raise ConfigError(f"epsilon must be >= 0 (or inf), got {epsilon}")
    if not 0 <= delta < 1:
        raise ConfigError(f"delta must lie in [0, 1), got {delta}")


@dataclass(frozen=True)
class Guarantee:
    """Proven upper bound on epsilon under the listed assumptions; `inf` requires a reason."""

    epsilon: float
    delta: float
    scope: Scope
    accountant: str
    assumptions: tuple[str, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        _check(self.epsilon, self.delta)
        if math.isinf(self.epsilon) and not self.reason:
            raise ConfigError("a guarantee of epsilon = inf must say why (reason)")

    def __str__(self) -> str:
        return f"epsilon = {at_most(self.epsilon)} at delta = {small(self.delta)} ({self.scope})"


@dataclass(frozen=True)
class Claim:
    """Claimed epsilon: the value of a paper's theorem for this configuration, right or wrong."""

    epsilon: float
    delta: float
    scope: Scope
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        _check(self.epsilon, self.delta)

    def __str__(self) -> str:
        return f"epsilon = {number(self.epsilon)} at delta = {small(self.delta)} ({self.scope}; {self.source})"


@dataclass(frozen=True)
class Audit:
    """Audited lower bound on epsilon from an attack, at the given confidence; `inf` for a structural leak.

    If not `rigorous`, it is an estimate without a confidence.
    """

    epsilon: float
    delta: float
    scope: Scope
    test: str
    confidence: float
    n: int
    rigorous: bool = True
    note: str = ""

    def __post_init__(self) -> None:
        _check(self.epsilon, self.delta)

    @property
    def how(self) -> str:
        """Return the test, the confidence (of a bound) and the number of samples as text."""
        confidence = f"{percent_at_least(self.confidence)} confidence, " if self.rigorous else ""
        return f"{self.test}, {confidence}n = {self.n}"

    def __str__(self) -> str:
        kind = "at least" if self.rigorous else "estimated"
        return f"{kind} epsilon = {at_least(self.epsilon)} at delta = {small(self.delta)} ({self.scope}; {self.how})"
