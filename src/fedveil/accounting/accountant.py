"""Composition of charged events into one (epsilon, delta), and calibration of the noise for a target.

`auto` uses the exact Gaussian curve if nothing is sampled. With Poisson sampling it computes the Renyi bound, the bound that
ignores sampling and, if its arrays stay short, the bound by privacy loss distributions (PLD), and returns the smallest: each is
an upper bound. A single sampled release has a closed form, which replaces the PLD bound at any delta. For the other kinds of
secret samples the Renyi bound is slow, so it is computed only if the PLD bound is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting import gaussian, pld, secret_samples, subsampled
from fedveil.accounting._numbers import least_below, non_negative, numpy_defaults, open_probability, positive
from fedveil.accounting.gaussian import rdp_epsilon, rdp_log_delta
from fedveil.accounting.types import Adjacency, Event, SampledGaussian, SecretSample, Unbounded, small
from fedveil.errors import ConfigError

AccountantName = Literal["auto", "gdp", "rdp", "pld"]
Events = Sequence[Event]
_NAMES = ("auto", "gdp", "rdp", "pld")


def _unbounded(events: Events) -> bool:
    return any(isinstance(event, Unbounded) for event in events)


@numpy_defaults
def rdp_curve(
    event: Event, orders: Sequence[float] | NDArray[np.float64], *, adjacency: Adjacency | None = None
) -> NDArray[np.float64]:
    """Return the Renyi divergences of one event (all its `count` releases) at the given orders; inf for an unbounded one.

    Args:
        event: the charged event.
        orders: Renyi orders, each > 1; a filter fixes ONE order in advance.
        adjacency: of the event's scope; None is valid for every adjacency.

    Source: Mironov 2017, Corollary 3; Mironov, Talwar & Zhang 2019; see `fedveil.accounting.subsampled.rdp`.
    """
    alphas = np.asarray(orders, dtype=np.float64)
    if isinstance(event, Unbounded):
        return np.full_like(alphas, math.inf)
    mu, sampled = secret_samples.split([event])
    if alphas.ndim != 1 or not np.all((alphas > 1) & np.isfinite(alphas)):
        raise ConfigError(f"Renyi orders must be finite and > 1, got {list(orders)[:5]}")
    total = alphas * (mu * mu / 2)
    for sample, count in sampled.items():
        total = total + count * secret_samples.rdp(sample, alphas, adjacency)
    return np.asarray(total, dtype=np.float64)


def _rdp_total(
    mu: float, sampled: Counter[SecretSample], adjacency: Adjacency | None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return (orders, Renyi divergences) of all events; many distinct sampled events share a coarser grid of orders."""
    stride = 1 if len(sampled) <= 16 else 5
    orders = np.array(subsampled.ORDERS[::stride])
    total = orders * (mu * mu / 2)
    for sample, count in sampled.items():
        total = total + count * _curve(sample, stride, adjacency)
    return orders, np.asarray(total, dtype=np.float64)


@lru_cache(maxsize=4096)
def _curve(sample: SecretSample, stride: int, adjacency: Adjacency | None) -> NDArray[np.float64]:
    """Return the Renyi divergences of one release, cached because calibration, statement and ledger need the same ones."""
    curve = secret_samples.rdp(sample, np.array(subsampled.ORDERS[::stride]), adjacency)
    curve.setflags(write=False)
    return curve


def _unsampled(mu: float, sampled: Counter[SecretSample]) -> float:
    """Return mu without any amplification, a valid bound by joint convexity."""
    return math.sqrt(mu**2 + math.fsum(count * secret_samples.unsampled_mu(sample) ** 2 for sample, count in sampled.items()))


_Ways = dict[str, Callable[[], float]]


def _best(
    ways: _Ways, accountant: AccountantName, sampled: Counter[SecretSample], pld_is_cheap: Callable[[], bool]
) -> tuple[float, str]:
    """Return the bound of the given accountant, or for `auto` the smallest affordable one, with the accountant's name."""
    if accountant not in _NAMES:
        raise ConfigError(f"accountant must be one of {', '.join(_NAMES)}, got {accountant!r}")
    if accountant != "auto":
        return ways[accountant](), accountant
    if not sampled:
        return ways["gdp"](), "gdp"
    by_pld = pld_is_cheap()
    by_rdp = not by_pld or all(isinstance(sample, SampledGaussian) for sample in sampled)  # slow for the other kinds
    names = [*(["rdp"] if by_rdp else []), "gdp", *(["pld"] if by_pld else [])]
    return min((ways[name](), name) for name in names)


@numpy_defaults
def bound(
    events: Events, delta: float, *, accountant: AccountantName = "auto", adjacency: Adjacency | None = None
) -> tuple[float, str]:
    """Return the proven epsilon at `delta` of all events together (adaptively composed), and the name of the accountant.

    Args:
        events: all releases in one scope; an `Unbounded` one makes epsilon infinite.
        delta: in (0, 1).
        accountant: auto, or one of gdp (ignores sampling), rdp, pld (needs delta >= 1e-10 except for a single release).
        adjacency: of the events' scope, which sharpens sampled events; None is valid for every adjacency.

    Raises:
        ConfigError: unknown event or accountant, delta out of range.
    """
    delta = open_probability("delta", delta)
    if _unbounded(events):
        return math.inf, "none"
    mu, sampled = secret_samples.split(events)
    return _bound(mu, tuple(sampled.items()), delta, accountant, adjacency)


@lru_cache(maxsize=1024)
def _bound(
    mu: float, counts: tuple[tuple[SecretSample, int], ...], delta: float, accountant: AccountantName, adjacency: Adjacency | None
) -> tuple[float, str]:
    """Return `bound`, cached because calibration, statement, budget and advice need the same values."""
    tail, sampled = min(1e-3, 1e-5 * delta), Counter(dict(counts))
    single = _single(mu, sampled)

    def by_rdp() -> float:
        if mu == 0 and not sampled:
            return 0.0
        return rdp_epsilon(*_rdp_total(mu, sampled, adjacency), delta)

    def by_pld() -> float:
        if mu == 0 and not sampled:
            return 0.0
        if single is not None:
            return least_below(
                lambda e: secret_samples.one_release_delta(single, e, adjacency),
                delta,
                gaussian.epsilon_of(secret_samples.unsampled_mu(single), delta),
            )
        if delta < 1e-10:
            raise ConfigError(f"the pld accountant works to about 1e-12 and needs delta >= 1e-10, got {delta}; use rdp")
        return max(pld.epsilon(total, delta) for total in pld.composed(secret_samples.releases(mu, sampled), tail, adjacency))

    ways: _Ways = {"gdp": lambda: gaussian.epsilon_of(_unsampled(mu, sampled), delta), "rdp": by_rdp, "pld": by_pld}

    def by_pld_is_cheap() -> bool:
        return single is not None or (delta >= 1e-10 and pld.is_cheap(secret_samples.releases(mu, sampled), tail))

    return _best(ways, accountant, sampled, by_pld_is_cheap)


def _single(mu: float, sampled: Counter[SecretSample]) -> SecretSample | None:
    """Return the only release if it is on a secret sample, else None; delta of a single release has a closed form."""
    return next(iter(sampled)) if mu == 0 and sampled.total() == 1 else None


def delta_bound(
    events: Events, epsilon: float, *, accountant: AccountantName = "auto", adjacency: Adjacency | None = None
) -> tuple[float, str]:
    """Return the proven delta at `epsilon` of all events together, and the accountant's name; arguments as in `bound`."""
    return delta_curve(events, accountant=accountant, adjacency=adjacency)(epsilon)


def delta_curve(
    events: Events, *, accountant: AccountantName = "auto", adjacency: Adjacency | None = None
) -> Callable[[float], tuple[float, str]]:
    """Return `delta_bound` as a function of epsilon that composes loss distributions only once."""
    if _unbounded(events):
        return lambda _: (1.0, "none")
    mu, sampled = secret_samples.split(events)
    single, any_cost = _single(mu, sampled), mu > 0 or bool(sampled)

    @cache
    def distributions() -> tuple[pld.Pld, ...]:
        return pld.composed(secret_samples.releases(mu, sampled), 1e-13, adjacency)

    @cache
    def pld_is_cheap() -> bool:
        return single is not None or pld.is_cheap(secret_samples.releases(mu, sampled), 1e-13)

    def by_rdp(epsilon: float) -> float:
        return math.exp(rdp_log_delta(*_rdp_total(mu, sampled, adjacency), epsilon)) if any_cost else 0.0

    def by_pld(epsilon: float) -> float:
        if single is not None:
            return secret_samples.one_release_delta(single, epsilon, adjacency)
        return max(pld.delta(total, epsilon) for total in distributions()) if any_cost else 0.0

    @numpy_defaults
    def proven(epsilon: float) -> tuple[float, str]:
        epsilon = non_negative("epsilon", epsilon)
        ways: _Ways = {"gdp": lambda: gaussian.delta_of(_unsampled(mu, sampled), epsilon)}
        ways |= {"rdp": lambda: by_rdp(epsilon), "pld": lambda: by_pld(epsilon)}
        return _best(ways, accountant, sampled, pld_is_cheap)

    return proven


@numpy_defaults
def calibrate(
    epsilon: float,
    delta: float,
    make_events: Callable[[float], Events],
    *,
    accountant: AccountantName = "auto",
    adjacency: Adjacency | None = None,
    tolerance: float | None = None,
) -> float:
    """Return the smallest noise multiplier z, rounded up by at most `tolerance`, whose events cost at most epsilon at delta.

    Args:
        epsilon: target, > 0.
        delta: in (0, 1).
        make_events: the events at a noise multiplier; their cost must fall as it grows.
        accountant, adjacency: as in `bound`.
        tolerance: relative, in (0, 0.1]; None is 1e-6 for the exact Gaussian curve and 1e-4 with sampling.

    Raises:
        ConfigError: the events cost nothing, or no noise multiplier up to 1e9 meets the target.
    """
    epsilon, planned = positive("epsilon", epsilon), make_events(1.0)
    precision = calibration_precision(planned, tolerance)

    def cost_by(name: AccountantName) -> Callable[[float], float]:
        return lambda z: bound(make_events(z), delta, accountant=name, adjacency=adjacency)[0]

    sampled = [event for event in planned if secret_samples.is_amplified(event)]
    if not sampled or accountant != "auto" or not all(isinstance(event, SampledGaussian) for event in sampled):
        return least_noise(cost_by(accountant), epsilon, delta, precision)
    start = _log_noise(cost_by("rdp"), epsilon, delta, 0.02, (0.0, 0.5))  # the Renyi bound is quick
    return math.exp(_log_noise(cost_by("auto"), epsilon, delta, precision, (start, 0.03)))


def calibration_precision(events: Events, tolerance: float | None) -> float:
    """Return the relative precision of a calibrated noise multiplier: `tolerance`, or the default for these events."""
    if tolerance is not None:
        return min(positive("tolerance", tolerance), 0.1)
    return 1e-4 if any(map(secret_samples.is_amplified, events)) else 1e-6


@numpy_defaults
def least_noise(cost: Callable[[float], float], epsilon: float, delta: float, precision: float) -> float:
    """Return the smallest noise multiplier whose cost at delta is at most epsilon, rounded up by at most `precision` relatively.

    Args:
        cost: epsilon at a noise multiplier; it must fall as the multiplier grows.

    Raises:
        ConfigError: the events cost nothing, or no noise multiplier up to 1e9 meets the target.
    """
    return math.exp(_log_noise(cost, epsilon, delta, precision, (0.0, 0.5)))


def _log_noise(
    cost: Callable[[float], float], epsilon: float, delta: float, precision: float, first: tuple[float, float]
) -> float:
    """Return the logarithm of `least_noise`; `first` is the starting point and the first stride of the search."""

    def excess(log_z: float) -> float:
        value = cost(math.exp(log_z))
        return math.log(value / epsilon) if 0 < value < math.inf else (-50.0 if value == 0 else 50.0)

    return _shrink(excess, *_bracket(excess, *first, epsilon, delta), precision)


_Point = tuple[float, float]


def _bracket(
    excess: Callable[[float], float], start: float, stride: float, epsilon: float, delta: float
) -> tuple[_Point, _Point]:
    """Return two points (ln z, excess) around the sign change of a decreasing function."""
    low = high = (start, excess(start))
    while high[1] > 0:
        low, place = high, high[0] + max(stride, min(1.2 * high[1], 6.0))
        if place > math.log(1e9):
            raise ConfigError(
                f"no noise multiplier up to 1e9 reaches epsilon = {epsilon:g} at delta = {small(delta)}: "
                "take fewer rounds or a larger epsilon"
            )
        high = (place, excess(place))
    while low[1] <= 0:
        high, place = low, low[0] - max(stride, min(-1.2 * low[1], 6.0))
        if place < math.log(1e-9):
            raise ConfigError(
                "these events cost nothing at any noise, so no noise can be calibrated: give at least one Gaussian release"
            )
        low = (place, excess(place))
    return low, high


def _shrink(excess: Callable[[float], float], low: _Point, high: _Point, tolerance: float) -> float:
    """Return the upper end of a decreasing function's sign change, narrowed by regula falsi (Illinois) and bisection."""
    (a, fa), (b, fb) = low, high
    best, side = b, 0
    for iteration in range(200):
        if b - a <= tolerance:
            break
        guess = (a * fb - b * fa) / (fb - fa) if iteration % 4 < 3 else 0.5 * (a + b)
        guess = min(max(guess + 0.25 * tolerance, a + 0.25 * tolerance), b - 0.25 * tolerance)
        value = excess(guess)
        if value > 0:
            a, fa = guess, value
            fb = fb / 2 if side == 1 else fb
            side = 1
        else:
            b, fb, best = guess, value, guess
            fa = fa / 2 if side == -1 else fa
            side = -1
    return best
