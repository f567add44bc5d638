"""Two-world audits: many runs on two neighbouring inputs refute an epsilon by a guess's error rates.

The threshold is fixed before the tested scores are drawn (from other draws, or from the claimed mechanism) and never tuned on
them. The score should be large in world 1; several rounds of one run enter as the sum of their log-likelihood ratios.

For a composition of sampled Gaussian releases with unknown noise, refuting the curve of noise multiplier z shows that the noise
is less than z. This is far sharper than counting, as Gaussian DP is for plain Gaussians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedveil.accounting import pld
from fedveil.accounting.attack_power import epsilon_at_least
from fedveil.accounting.types import Adjacency, Audit, SampledGaussian, Scope, at_least, at_most
from fedveil.audit.subject import check_level, clopper_pearson_upper, epsilon_from_rates, epsilon_of_mu, mu_from_rates
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]
Run = Callable[[int, np.random.Generator], float]
Tradeoff = Callable[[float], float]


@dataclass(frozen=True)
class Rates:
    """Error counts of a fixed threshold test: `fp` of `n0` runs of world 0 above it, `fn` of `n1` runs of world 1 not above."""

    fp: int
    n0: int
    fn: int
    n1: int

    def upper(self, alpha: float) -> tuple[float, float]:
        """Return Clopper-Pearson upper bounds on (fpr, fnr), jointly right with probability >= 1 - alpha."""
        half = check_level(alpha) / 2
        return float(clopper_pearson_upper(self.fp, self.n0, half)), float(clopper_pearson_upper(self.fn, self.n1, half))

    def epsilon(self, delta: float, alpha: float = 0.05) -> float:
        """Return a lower bound on epsilon at `delta`, valid for any mechanism."""
        return float(epsilon_from_rates(*self.upper(alpha), delta))

    def mu(self, alpha: float = 0.05) -> float:
        """Return a lower bound on mu, valid for any mechanism: every smaller mu-GDP claim is refuted."""
        return float(mu_from_rates(*self.upper(alpha)))

    def refutes(self, tradeoff: Tradeoff, alpha: float = 0.05) -> bool:
        """Return whether the claim "fnr >= tradeoff(fpr) for every test" is refuted; `tradeoff` is decreasing on [0, 1]."""
        fpr, fnr = self.upper(alpha)
        return fnr < tradeoff(fpr)


def _scores(name: str, scores: ArrayLike) -> Floats:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 1 or array.size == 0 or np.any(np.isnan(array)):
        raise ConfigError(f"{name} must be a non-empty list of scores without NaN, got shape {array.shape}")
    return array


def rates(scores_0: ArrayLike, scores_1: ArrayLike, threshold: float) -> Rates:
    """Return the error counts of the test "score > threshold means world 1", with a threshold fixed beforehand."""
    s0, s1 = _scores("scores_0", scores_0), _scores("scores_1", scores_1)
    return Rates(int(np.sum(s0 > threshold)), s0.size, int(np.sum(s1 <= threshold)), s1.size)


def choose_threshold(pilot_0: ArrayLike, pilot_1: ArrayLike, n: int, delta: float, alpha: float = 0.05) -> float:
    """Return the threshold with the largest expected bound for n runs per world, judged on separate pilot scores.

    Args:
        pilot_0: scores of world 0, not used in the test.
        pilot_1: scores of world 1, not used in the test.
        n: runs per world in the coming test.
        delta: of the coming test.
        alpha: of the coming test.
    """
    s0, s1 = np.sort(_scores("pilot_0", pilot_0)), np.sort(_scores("pilot_1", pilot_1))
    points = np.unique(np.concatenate([s0, s1]))
    cuts = np.concatenate([points[:1] - 1, (points[:-1] + points[1:]) / 2, points[-1:] + 1])
    return float(cuts[int(np.argmax(epsilon_from_rates(*_expected_bounds(s0, s1, cuts, n, alpha), delta)))])


def _expected_bounds(s0: Floats, s1: Floats, cuts: Floats, n: int, alpha: float) -> tuple[Floats, Floats]:
    """Return upper bounds on both error rates that n runs per world should give at each cut, judged on sorted pilot scores."""
    fpr = (s0.size - np.searchsorted(s0, cuts, side="right") + 0.5) / (s0.size + 1)
    fnr = (np.searchsorted(s1, cuts, side="right") + 0.5) / (s1.size + 1)
    return clopper_pearson_upper(n * fpr, n, alpha / 2), clopper_pearson_upper(n * fnr, n, alpha / 2)


def midpoint(pilot_0: ArrayLike, pilot_1: ArrayLike) -> float:
    """Return the threshold half-way between the median pilot scores: best for a Gaussian trade-off curve at equal error rates."""
    return float((np.median(_scores("pilot_0", pilot_0)) + np.median(_scores("pilot_1", pilot_1))) / 2)


def audit_dp(
    counts: Rates, delta: float, scope: Scope, alpha: float = 0.05, *, note: str = "", test: str = "two worlds"
) -> Audit:
    """Return the (epsilon, delta) bound of a threshold test as an audit; valid for any mechanism."""
    name = f"{test}, Clopper-Pearson"
    return Audit(counts.epsilon(delta, alpha), delta, scope, name, 1 - alpha, counts.n0 + counts.n1, note=note)


def audit_gdp(
    counts: Rates, delta: float, scope: Scope, alpha: float = 0.05, *, note: str = "", test: str = "two worlds"
) -> Audit:
    """Return the bound through mu as an audit; it bounds epsilon ONLY if the mechanism's trade-off curve is Gaussian."""
    mu = counts.mu(alpha)
    remark = f"mu >= {at_least(mu)}; the trade-off curve is Gaussian" + (f"; {note}" if note else "")
    name = f"{test}, Gaussian DP"
    return Audit(epsilon_of_mu(mu, delta), delta, scope, name, 1 - alpha, counts.n0 + counts.n1, note=remark)


def audit_curve(counts: Rates, family: Callable[[float], Tradeoff], delta: float, scope: Scope, alpha: float = 0.05) -> Audit:
    """Return the largest epsilon up to 100 whose claimed trade-off curve is refuted, for mechanisms of a known family.

    Args:
        counts: of the test.
        family: epsilon (at `delta`) -> trade-off curve of the family's member with that epsilon; curves fall as epsilon grows.
        delta: at which epsilon labels the family.
        scope: of the two worlds.
        alpha: error probability.
    """
    low, high = 0.0, 100.0
    if counts.refutes(family(high), alpha):
        low = high
    while high - low > 1e-6 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if counts.refutes(family(middle), alpha) else (low, middle)
    return Audit(low, delta, scope, "two worlds, claimed trade-off curve", 1 - alpha, counts.n0 + counts.n1)


def tradeoff_of_profile(epsilons: ArrayLike, deltas: ArrayLike) -> Tradeoff:
    """Return the trade-off curve implied by a privacy profile (delta at each epsilon >= 0), such as that of an accountant's PLD.

    Args:
        epsilons: [k], >= 0.
        deltas: [k], an upper bound on delta at each; for both directions of the adjacency.

    Source: Dong, Roth & Su 2022, Proposition 2.5; a finite list gives a curve below the true one, so refutations hold.
    """
    eps, delta = np.asarray(epsilons, dtype=np.float64), np.asarray(deltas, dtype=np.float64)
    if eps.shape != delta.shape or eps.ndim != 1 or eps.size == 0 or np.any(eps < 0):
        raise ConfigError(f"a profile needs equally many epsilons >= 0 and deltas, got shapes {eps.shape} and {delta.shape}")
    slope = np.exp(np.minimum(eps, 700.0))

    def tradeoff(fpr: float) -> float:
        return float(max(0.0, np.max(1 - delta - slope * fpr), np.max((1 - delta - fpr) / slope)))

    return tradeoff


def draw(run: Run, world: int, n: int, rng: np.random.Generator) -> Floats:
    """Return the scores of n independent runs of one world."""
    return np.array([run(world, rng) for _ in range(n)], dtype=np.float64)


@dataclass(frozen=True)
class Repeats:
    """Numbers of runs, and the parameters of the resulting bound.

    Args:
        n: tested runs per world. pilot: runs per world that choose the threshold, never tested. delta: in [0, 1).
        alpha: error probability.
    """

    n: int = 1000
    pilot: int = 500
    delta: float = 1e-5
    alpha: float = 0.05

    def __post_init__(self) -> None:
        if self.n < 1 or self.pilot < 1 or not math.isfinite(self.delta):
            raise ConfigError(f"n and pilot must be >= 1 and delta finite, got {self.n}, {self.pilot} and {self.delta}")

    @classmethod
    def of(cls, n: int, delta: float, alpha: float) -> Repeats:
        """Return repeats with a quarter as many pilot runs, and at least 20."""
        return cls(n, max(n // 4, 20), delta, alpha)

    @property
    def total(self) -> int:
        """The number of runs in both worlds."""
        return 2 * (self.n + self.pilot)

    def pilots(self, run: Run, rng: np.random.Generator) -> tuple[Floats, Floats]:
        """Return the scores that choose the threshold, in each world."""
        return draw(run, 0, self.pilot, rng), draw(run, 1, self.pilot, rng)

    def rates(self, run: Run, threshold: float, rng: np.random.Generator) -> Rates:
        """Return the error counts of the tested runs."""
        return rates(draw(run, 0, self.n, rng), draw(run, 1, self.n, rng), threshold)


def many_runs(
    run: Run, scope: Scope, rng: np.random.Generator, repeats: Repeats, *, gaussian: bool = False, note: str = ""
) -> Audit:
    """Audit a whole run by repeating it in two worlds; the threshold comes from separate runs.

    Args:
        run: (world, rng) -> score of one complete run, large in world 1.
        scope: of the two worlds.
        rng: source of all randomness.
        repeats: number of runs in each world.
        gaussian: whether the trade-off curve of the worlds is Gaussian; chosen beforehand.
        note: added to the audit.

    Source: Nasr et al. 2021; Nasr et al. 2023 for Gaussian DP.
    """
    pilots = repeats.pilots(run, rng)
    threshold = midpoint(*pilots) if gaussian else choose_threshold(*pilots, repeats.n, repeats.delta, repeats.alpha)
    counts = repeats.rates(run, threshold, rng)
    return (audit_gdp if gaussian else audit_dp)(counts, repeats.delta, scope, repeats.alpha, note=note)


def curve_of(event: SampledGaussian, delta: float, adjacency: Adjacency) -> Tradeoff:
    """Return the trade-off curve that the accountant proves for this event: refuting it refutes the charged noise."""
    releases = [pld.Sampled(event.rate, event.noise_multiplier, event.count)]
    distributions = pld.composed(releases, 1e-3 * delta, adjacency)
    top = max(pld.epsilon(one, 1e-3) for one in distributions)
    grid = np.linspace(0.0, 20.0 if math.isinf(top) else 2 * top + 0.1, 200)
    return tradeoff_of_profile(grid, [max(pld.delta(one, e) for one in distributions) for e in grid])


def largest_noise(counts: Rates, event: SampledGaussian, delta: float, adjacency: Adjacency, alpha: float = 0.05) -> float:
    """Return an upper confidence bound on the noise multiplier: the least one whose proven curve the counts refute; inf if none.

    Args:
        counts: of a test of runs whose cost is `event` except for its noise multiplier.
        delta: sets the accuracy of the curves. adjacency: of the two worlds. alpha: error probability.
    """

    def refuted(z: float) -> bool:
        return counts.refutes(curve_of(replace(event, noise_multiplier=z), delta, adjacency), alpha)

    low, high = 0.1 * event.noise_multiplier, 100 * event.noise_multiplier
    if not refuted(high):
        return math.inf
    while high > low * 1.002:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if refuted(middle) else (middle, high)
    return high


def choose_cut(
    pilots: Sequence[Floats], event: SampledGaussian, n: int, delta: float, adjacency: Adjacency, alpha: float
) -> float:
    """Return the threshold expected to refute the least noise in n runs per world, judged on pilot scores."""
    s0, s1 = (np.sort(scores) for scores in pilots)
    points = np.unique(np.concatenate([s0, s1]))
    cuts = (points[:-1] + points[1:]) / 2
    upper = _expected_bounds(s0, s1, cuts, n, alpha)
    for factor in np.geomspace(0.3, 100.0, 30):
        curve = curve_of(replace(event, noise_multiplier=factor * event.noise_multiplier), delta, adjacency)
        margins = [curve(p) - q for p, q in zip(*upper, strict=True)]
        if max(margins) > 0:
            return float(cuts[int(np.argmax(margins))])
    return midpoint(s0, s1)


def audit_sampled(
    counts: Rates,
    event: SampledGaussian,
    delta: float,
    scope: Scope,
    alpha: float = 0.05,
    *,
    note: str = "",
    test: str = "two worlds",
) -> Audit:
    """Return the bound through the largest noise that the counts allow, for a mechanism that costs `event` except for its noise.

    That noise is converted to epsilon from below: the accountant's charge for it is an upper bound, and may exceed the truth.
    """
    z = largest_noise(counts, event, delta, scope.adjacency, alpha)
    epsilon = 0.0 if math.isinf(z) else epsilon_at_least(replace(event, noise_multiplier=z), delta, scope.adjacency)
    finding = "no noise is refuted" if math.isinf(z) else f"noise multiplier at most {at_most(z)}"
    remark = f"{finding} (charged: {event.noise_multiplier:.4g})" + (f"; {note}" if note else "")
    return Audit(epsilon, delta, scope, f"{test}, sampled Gaussian curve", 1 - alpha, counts.n0 + counts.n1, note=remark)


def many_sampled_runs(
    run: Run, event: SampledGaussian, scope: Scope, rng: np.random.Generator, repeats: Repeats, *, note: str = ""
) -> Audit:
    """Run `many_runs` for runs that cost `event` except for their noise."""
    delta, alpha = repeats.delta, repeats.alpha
    cut = choose_cut(repeats.pilots(run, rng), event, repeats.n, delta, scope.adjacency, alpha)
    return audit_sampled(repeats.rates(run, cut, rng), event, delta, scope, alpha, note=note)
