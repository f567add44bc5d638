"""One run with canaries: each of m canaries enters by a fair coin, and an auditor guesses the coins from the scores.

Guesses are "in" for the k_plus largest scores and "out" for the k_minus smallest; the auditor abstains on the rest. How many
to guess is fixed before the scores are seen: by a simulation of the claimed mechanism (`choose_guesses`) or by Bonferroni.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, ndtr, ndtri
from scipy.stats import binom

from fedveil.accounting.formatting import at_least
from fedveil.accounting.types import Audit, Scope
from fedveil.audit.intervals import check_delta, check_level, epsilon_of_mu
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]
_HIGHEST = 60.0


@dataclass(frozen=True)
class Guesses:
    """m canaries, r guesses, v of them right."""

    m: int
    r: int
    v: int

    def __post_init__(self) -> None:
        if not (self.m >= 1 and 0 <= self.v <= self.r <= self.m):
            raise ConfigError(f"need 0 <= right guesses <= guesses <= canaries, got {self.v}, {self.r}, {self.m}")


def guess(scores: ArrayLike, included: ArrayLike, k_plus: int, k_minus: int) -> Guesses:
    """Guess "in" for the k_plus largest scores and "out" for the k_minus smallest, and count the right ones.

    Args:
        scores: [m], larger for canaries that look included.
        included: [m] booleans, the coins.
        k_plus: guesses "in", >= 0.
        k_minus: guesses "out", >= 0, with k_plus + k_minus <= m.
    """
    s, coins = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if s.ndim != 1 or s.shape != coins.shape or np.any(np.isnan(s)):
        raise ConfigError(f"scores and coins must be two lists of one length without NaN, got shapes {s.shape} and {coins.shape}")
    if min(k_plus, k_minus) < 0 or not 1 <= k_plus + k_minus <= s.size:
        raise ConfigError(f"k_plus + k_minus must lie in 1..{s.size}, both >= 0, got {k_plus} and {k_minus}")
    order = np.argsort(s, kind="stable")
    right = np.sum(~coins[order[:k_minus]]) + np.sum(coins[order[s.size - k_plus :]])
    return Guesses(s.size, k_plus + k_minus, int(right))


def p_value(found: Guesses, epsilon: float, delta: float) -> float:
    """Chance, at most, of so many right guesses under (epsilon, delta)-DP of each canary's presence.

    Args:
        found: the guesses.
        epsilon: >= 0.
        delta: in [0, 1).

    Source: Steinke, Nasr & Jagielski 2023, Theorem 5.2.
    """
    m, r, v = found.m, found.r, found.v
    rate = float(expit(epsilon))
    tail = float(binom.sf(v - 1, r, rate))
    if check_delta(delta) == 0 or v == 0:
        return tail
    steps = np.arange(1, v + 1)
    extra = (binom.sf(v - steps - 1, r, rate) - tail) / steps
    return min(1.0, tail + 2 * m * delta * float(np.max(extra)))


@lru_cache(maxsize=65536)
def epsilon_bound(found: Guesses, delta: float, alpha: float = 0.05) -> float:
    """The largest epsilon that the guesses refute at `delta`, at confidence 1 - alpha."""
    check_level(alpha)
    return _largest(lambda epsilon: p_value(found, epsilon, delta) <= alpha)


def _refutes_mu(found: Guesses, mu: float, alpha: float) -> bool:
    """Whether the guesses refute mu-GDP of each canary's presence.

    Walks down from the observed number of right guesses, carrying the shares of wrong and of right guesses that the curve forces.
    Source: Mahloujifar, Melis & Chaudhuri 2024, Algorithm 3.
    """
    m, r, v = found.m, found.r, found.v
    wrong, right = alpha * (r - v) / m, alpha * v / m
    for i in range(v - 1, -1, -1):
        forced = max(wrong, _curve(right, mu))
        if forced == wrong:
            break
        right = min(1.0, right + i / (r - i) * (forced - wrong))
        wrong = forced
    return right + wrong > r / m


def _curve(x: float, mu: float) -> float:
    return float(ndtr(ndtri(x) - mu)) if x > 0 else 0.0


@lru_cache(maxsize=65536)
def mu_bound(found: Guesses, alpha: float = 0.05) -> float:
    """The largest mu that the guesses refute, by the f-DP test, at confidence 1 - alpha (0 if none)."""
    check_level(alpha)
    return _largest(lambda mu: _refutes_mu(found, mu, alpha))


def _largest(refuted: Callable[[float], bool]) -> float:
    """The largest refuted value on [0, 60] to 1e-4, for a test that refutes a lower set; rounded down."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if low >= _HIGHEST:
            return _HIGHEST
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def audit_one_run(found: Guesses, delta: float, scope: Scope, alpha: float = 0.05, *, note: str = "") -> Audit:
    """The (epsilon, delta) bound of one run as an audit; valid for every mechanism in which canaries are the protected units."""
    text = f"{found.v} of {found.r} guesses right, {found.m} canaries" + (f"; {note}" if note else "")
    return Audit(epsilon_bound(found, delta, alpha), delta, scope, "one run, canaries", 1 - alpha, found.m, note=text)


def audit_one_run_gdp(found: Guesses, delta: float, scope: Scope, alpha: float = 0.05, *, note: str = "") -> Audit:
    """The f-DP bound of one run as an audit: a bound on epsilon only where each canary's trade-off curve is Gaussian."""
    mu = mu_bound(found, alpha)
    text = f"mu >= {at_least(mu)}; Gaussian trade-off curve; {found.v} of {found.r} guesses right" + (f"; {note}" if note else "")
    return Audit(epsilon_of_mu(mu, delta), delta, scope, "one run, canaries, f-DP", 1 - alpha, found.m, note=text)


def simulate_gaussian(m: int, mu: float, rng: np.random.Generator) -> tuple[Floats, NDArray[np.bool_]]:
    """Scores and coins of m orthogonal canaries in one mu-GDP Gaussian release: coin x mu + N(0, 1)."""
    coins = rng.random(m) < 0.5
    return mu * coins + rng.standard_normal(m), coins


def choose_guesses(
    simulate: Callable[[np.random.Generator], tuple[ArrayLike, ArrayLike]],
    grid: Sequence[tuple[int, int]],
    bound: Callable[[Guesses], float],
    rng: np.random.Generator,
    *,
    runs: int = 20,
) -> tuple[int, int]:
    """The (k_plus, k_minus) of the grid with the largest mean bound in simulated runs of the claimed mechanism.

    Args:
        simulate: rng -> (scores, coins) of one simulated run; never the audited one.
        grid: candidates.
        bound: guesses -> bound to maximise, such as `epsilon_bound` or `mu_bound` at fixed delta and alpha.
        rng: source of randomness.
        runs: simulated runs, >= 1.
    """
    if runs < 1 or not grid:
        raise ConfigError(f"need runs >= 1 and a non-empty grid, got {runs} and {len(grid)}")
    total = np.zeros(len(grid))
    for _ in range(runs):
        scores, coins = simulate(rng)
        total += [bound(guess(scores, coins, *k)) for k in grid]
    return grid[int(np.argmax(total))]


def symmetric_grid(m: int, totals: Sequence[int] = (25, 50, 75, 100, 150, 200, 300, 500, 1000)) -> list[tuple[int, int]]:
    """(r / 2, r / 2) for each total r that fits m."""
    return [(math.ceil(r / 2), r // 2) for r in totals if r <= m]


def ceiling(r: int, alpha: float = 0.05) -> float:
    """The largest epsilon that r guesses, all right, can show (delta = 0): logit(alpha^(1/r))."""
    if r < 1:
        raise ConfigError(f"the number of guesses must be >= 1, got {r}")
    rate = check_level(alpha) ** (1 / r)
    return max(0.0, math.log(rate / (1 - rate)))
