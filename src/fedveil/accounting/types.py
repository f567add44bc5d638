"""The vocabulary of every privacy statement, and how its numbers are written.

An epsilon without its unit, adjacency, view and delta says nothing, so `Guarantee`, `Claim` and `Audit` cannot be built,
and therefore cannot be printed, without a `Scope` and a delta.
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
    """A number to the nearest in so many significant digits; bounds are shown by `at_most` and `at_least`.

    An epsilon is only ever shown beside its unit, adjacency, view and delta.
    """
    return f"{value:.{digits}g}"


SLACK = 1e-9
"""What floating-point error may add to a bound, relatively, without moving its last printed digit: a target that is met shows."""


def at_most(value: float, digits: int = 4) -> str:
    """An upper bound, rounded up in its last digit."""
    return _rounded(value * (1 - SLACK), digits, ROUND_CEILING)


def at_least(value: float, digits: int = 4) -> str:
    """A lower bound, rounded down in its last digit."""
    return _rounded(value * (1 + SLACK), digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    return number(float(Context(prec=digits, rounding=rounding).create_decimal(Decimal(value))), digits)


def epsilon(value: float, unbounded: str = "inf", shown: Callable[[float], str] = at_most) -> str:
    """An epsilon in four digits, or the word for one that is not bounded.

    Args:
        shown: `at_most` for what is proven or spent, `at_least` for what an audit found, `number` for what is claimed.
    """
    return unbounded if math.isinf(value) else shown(value)


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage; a dash where there is none."""
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def percent_at_most(share: float) -> str:
    """A share as a percentage, rounded up so that a bound stays a bound."""
    if share >= 1:
        return "100 %"
    digits = 1 if share < 0.999 else min(12, -math.floor(math.log10(100 * (1 - share)) + 1e-9))
    scale = 10**digits
    return f"{math.ceil(100 * share * scale - 1e-9) / scale:.{digits}f} %"


def percent_at_least(share: float) -> str:
    """A confidence as a percentage, rounded down: two decimals, or as many as tell it from certainty."""
    digits = 2 if not 0.9999 < share < 1 else math.ceil(-math.log10(100 * (1 - share)) - 1e-9)
    return f"{math.floor(100 * share * 10**digits + 1e-6) / 10**digits:.15g}%"


def joined(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


class Unit(StrEnum):
    """Whose presence is protected: one example, or everything one client holds."""

    RECORD = "record"
    CLIENT = "client"


class Adjacency(StrEnum):
    """Which neighbouring inputs are compared.

    `zero_out`: a contribution is replaced by zero; noise, denominator and number of participants stay.
    `replace_one`: a contribution is replaced by any other admissible one.
    """

    ZERO_OUT = "zero_out"
    REPLACE_ONE = "replace_one"

    @property
    def factor(self) -> int:
        """Sensitivity of a clipped contribution in units of its clip norm: 1 or 2."""
        return 1 if self is Adjacency.ZERO_OUT else 2


class View(StrEnum):
    """What the adversary sees: each upload, each round's aggregate (and so every global model), or the last model only."""

    SERVER = "server"
    AGGREGATE = "aggregate"
    FINAL = "final"


_Member = TypeVar("_Member", bound=StrEnum)


def member(kind: type[_Member], name: str, value: _Member | str) -> _Member:
    """The member of an enumeration that `value` is or names; code that compares by `is` needs the member itself.

    Raises:
        ConfigError: it is none of them.
    """
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} = {value!r}: it must be one of {', '.join(kind)}") from None


@dataclass(frozen=True)
class Scope:
    """What an epsilon speaks of: unit, adjacency and view together; their names, as strings, are converted.

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
        """Sensitivity of a client's clipped update in units of its clip norm.

        Taking one record away still leaves an update, which may point anywhere: 2 at record level under either adjacency.
        """
        return 2 if self.unit is Unit.RECORD else self.adjacency.factor

    def __str__(self) -> str:
        return f"{self.unit} level, {self.adjacency.replace('_', '-')}, {self.view} view"


# --- events: what a release costs -----------------------------------------------------------------------------------

LARGEST = 1e100
"""The largest mu and noise multiplier; the least multiplier is 1e-100. Their fourth powers, and epsilon, fit into floats."""


def _check_noise(noise_multiplier: float, count: int) -> None:
    if not 1 / LARGEST <= noise_multiplier <= LARGEST:
        raise ConfigError(f"noise_multiplier must lie between 1e-100 and 1e100, got {noise_multiplier}")
    if count != int(count) or count < 0:
        raise ConfigError(f"count must be an integer >= 0, got {count}")


@dataclass(frozen=True)
class Gaussian:
    """`count` Gaussian releases, each exactly mu-GDP for the scope at hand (mu = sensitivity / noise std)."""

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

    `noise_multiplier` is noise std / sensitivity, with the sensitivity of the scope's adjacency already in it.
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
    """`count` Gaussian releases on a Poisson sample of clients whose size everybody sees; who is in it stays secret.

    Of `clients` clients (less those who collude with the adversary) each joins a round with probability `rate`. A client with a
    zeroed contribution still counts. `noise_multiplier`: as `SampledGaussian`, at least this in every round that is released.
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

    `noise_multiplier`: as `SampledGaussian`.
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
    """`count` Gaussian releases on a Poisson sample of records, for a user who holds up to `records` of them.

    Each record joins with probability `rate`, independently and secretly. `noise_multiplier` is noise std / sensitivity to ONE
    record, with the sensitivity of the scope's adjacency already in it.
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
    """A release from which nothing can be proven, and why."""

    reason: str


@dataclass(frozen=True)
class OneOrder(Unbounded):
    """Releases of which a Renyi divergence is proven at one order; a budget of that order counts them, and nothing else can."""

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
    """Proven: an upper bound that holds under the listed assumptions; `inf` always carries its reason."""

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
        return f"epsilon = {at_most(self.epsilon)} at delta = {self.delta:g} ({self.scope})"


@dataclass(frozen=True)
class Claim:
    """Claimed: what a paper's theorem says of this configuration, right or wrong."""

    epsilon: float
    delta: float
    scope: Scope
    source: str
    note: str = ""

    def __post_init__(self) -> None:
        _check(self.epsilon, self.delta)

    def __str__(self) -> str:
        return f"epsilon = {number(self.epsilon)} at delta = {self.delta:g} ({self.scope}; {self.source})"


@dataclass(frozen=True)
class Audit:
    """Audited: a lower bound on epsilon from attacking, at the given confidence; `inf` for a structural leak.

    Not `rigorous`: an estimate, of which no confidence is said.
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
        """Test, confidence (of a bound) and number of samples."""
        confidence = f"{percent_at_least(self.confidence)} confidence, " if self.rigorous else ""
        return f"{self.test}, {confidence}n = {self.n}"

    def __str__(self) -> str:
        kind = "at least" if self.rigorous else "estimated"
        return f"{kind} epsilon = {at_least(self.epsilon)} at delta = {self.delta:g} ({self.scope}; {self.how})"
