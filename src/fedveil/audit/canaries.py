"""Canaries in one training run: examples included by fair coin flips, and clients that upload random directions.

Guesses are "in" for the k_plus largest scores and "out" for the k_minus smallest; the auditor abstains on the rest. The number of
guesses is fixed before the scores are seen: by a simulation of the claimed mechanism (`choose_guesses`) or by Bonferroni.

Canary client j uploads C c_j, with c_j uniform on the unit sphere of R^d. An adversary who sees only the final model scores the
cosine of c_j with w_T - w_0; one who sees every round scores the largest cosine over rounds. The scores of canaries that never
joined are known exactly (or simulated, for the maximum), so one run gives an ESTIMATE of epsilon. It is not a bound, because
the canaries of one run share the noise and each other's updates. For a bound from one run, let coins decide which canaries join,
and use `audit_one_run`.

The canaries replace clients of the run. Population, sampling, policy, clip, noise, aggregation, the server's optimiser and the
other clients' data stay as configured.
Source: Andrew, Kairouz, Oh, Oprea, McMahan & Suriyakumar 2024, Algorithms 2 and 3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betainc, expit, ndtr, ndtri
from scipy.stats import binom
from torch import Tensor

from fedveil.accounting.types import Adjacency, Audit, Scope, Unit, View, at_least
from fedveil.audit.subject import check_delta, check_level, clopper_pearson_upper, epsilon_of_mu
from fedveil.errors import ConfigError
from fedveil.federation.evaluation import final_model
from fedveil.federation.fit import fit
from fedveil.federation.progress import Federation, Progress, start
from fedveil.federation.round import Context, Engine
from fedveil.mechanism.mechanisms import NoiseMemory
from fedveil.mechanism.plan import LocalDpSgd, Plan, Released
from fedveil.release.noise import Randomness
from fedveil.training.local import Client, HasMetrics, HasPersonalModel, Local, Remembering, State

Floats = NDArray[np.float64]
_HIGHEST_ONE_RUN = 60.0


@dataclass(frozen=True)
class Guesses:
    """Counts of one-run guesses: m canaries, r guesses, v of them right."""

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


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Return the maximal probability of so many right guesses under (epsilon, delta)-DP of each canary's presence.

    Args:
        guesses: the counts.
        epsilon: >= 0.
        delta: in [0, 1).

    Source: Steinke, Nasr & Jagielski 2023, Theorem 5.2.
    """
    m, r, v = guesses.m, guesses.r, guesses.v
    rate = float(expit(epsilon))
    tail = float(binom.sf(v - 1, r, rate))
    if check_delta(delta) == 0 or v == 0:
        return tail
    steps = np.arange(1, v + 1)
    extra = (binom.sf(v - steps - 1, r, rate) - tail) / steps
    return min(1.0, tail + 2 * m * delta * float(np.max(extra)))


@lru_cache(maxsize=65536)
def epsilon_bound(guesses: Guesses, delta: float, alpha: float = 0.05) -> float:
    """Return the largest epsilon that the guesses refute at `delta`, at confidence 1 - alpha."""
    check_level(alpha)
    return _largest(lambda epsilon: p_value(guesses, epsilon, delta) <= alpha)


def _refutes_mu(guesses: Guesses, mu: float, alpha: float) -> bool:
    """Return whether the guesses refute mu-GDP of each canary's presence.

    Walks down from the observed number of right guesses, tracking the shares of wrong and of right guesses that the curve forces.
    Source: Mahloujifar, Melis & Chaudhuri 2024, Algorithm 3.
    """
    m, r, v = guesses.m, guesses.r, guesses.v
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
def mu_bound(guesses: Guesses, alpha: float = 0.05) -> float:
    """Return the largest mu that the guesses refute, by the f-DP test, at confidence 1 - alpha (0 if none)."""
    check_level(alpha)
    return _largest(lambda mu: _refutes_mu(guesses, mu, alpha))


def _largest(refuted: Callable[[float], bool]) -> float:
    """Return the largest refuted value on [0, 60] to 1e-4, rounded down, for a test that refutes a lower set."""
    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while refuted(high):
        low, high = high, 2 * high
        if low >= _HIGHEST_ONE_RUN:
            return _HIGHEST_ONE_RUN
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def audit_one_run(guesses: Guesses, delta: float, scope: Scope, alpha: float = 0.05, *, note: str = "") -> Audit:
    """Return the (epsilon, delta) bound of one run as an audit; valid for any mechanism that protects the canaries' unit."""
    text = f"{guesses.v} of {guesses.r} guesses right, {guesses.m} canaries" + (f"; {note}" if note else "")
    return Audit(epsilon_bound(guesses, delta, alpha), delta, scope, "one run, canaries", 1 - alpha, guesses.m, note=text)


def audit_one_run_gdp(guesses: Guesses, delta: float, scope: Scope, alpha: float = 0.05, *, note: str = "") -> Audit:
    """Return the f-DP bound of one run as an audit; it bounds epsilon only if each canary's trade-off curve is Gaussian."""
    mu = mu_bound(guesses, alpha)
    text = f"mu >= {at_least(mu)}; Gaussian trade-off curve; {guesses.v} of {guesses.r} guesses right" + (
        f"; {note}" if note else ""
    )
    return Audit(epsilon_of_mu(mu, delta), delta, scope, "one run, canaries, f-DP", 1 - alpha, guesses.m, note=text)


def simulate_gaussian(m: int, mu: float, rng: np.random.Generator) -> tuple[Floats, NDArray[np.bool_]]:
    """Return scores and coins of m orthogonal canaries in one mu-GDP Gaussian release: coin x mu + N(0, 1)."""
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
    """Return the (k_plus, k_minus) of the grid with the largest mean bound in simulated runs of the claimed mechanism.

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
    """Return (r / 2, r / 2) for each total r that fits m."""
    return [(math.ceil(r / 2), r // 2) for r in totals if r <= m]


def ceiling(r: int, alpha: float = 0.05) -> float:
    """Return the largest epsilon that r guesses, all right, can show (delta = 0): logit(alpha^(1/r))."""
    if r < 1:
        raise ConfigError(f"the number of guesses must be >= 1, got {r}")
    rate = check_level(alpha) ** (1 / r)
    return max(0.0, math.log(rate / (1 - rate)))


Normal = tuple[float, float]
_HIGHEST = 500.0


def canaries(k: int, d: int, rng: np.random.Generator) -> Floats:
    """Return [k, d] directions, uniform on the unit sphere."""
    if k < 1 or d < 2:
        raise ConfigError(f"canaries need k >= 1 and d >= 2, got {k} and {d}")
    directions = rng.standard_normal((k, d))
    return np.asarray(directions / np.linalg.norm(directions, axis=1, keepdims=True))


def final_scores(directions: Floats, movement: ArrayLike) -> Floats:
    """Return the cosines between each canary [k, d] and the movement w_T - w_0 [d], as visible in the final view."""
    step = np.asarray(movement, dtype=np.float64)
    norm = float(np.linalg.norm(step))
    if step.shape != (directions.shape[1],) or not (norm > 0 and math.isfinite(norm)):
        raise ConfigError(f"the movement must be a finite non-zero vector of length {directions.shape[1]}, got norm {norm}")
    return np.asarray(directions @ (step / norm))


def round_scores(directions: Floats, movements: ArrayLike) -> Floats:
    """Return each canary's [k, d] largest cosine over rounds with the aggregates [T, d], as visible in the aggregate view."""
    return np.asarray(np.max([final_scores(directions, step) for step in np.asarray(movements, dtype=np.float64)], axis=0))


def null_tail(threshold: float, d: int) -> float:
    """Return the exact chance that a canary that never joined has cosine >= threshold.

    The density is proportional to (1 - t^2)^((d-3)/2). Source: Andrew et al. 2024, Theorem 3.1.
    """
    if not -1 <= threshold <= 1 or d < 2:
        raise ConfigError(f"a cosine threshold lies in [-1, 1] and d >= 2, got {threshold} and {d}")
    half = 0.5 * float(betainc((d - 1) / 2, 0.5, 1 - threshold**2))
    return half if threshold >= 0 else 1 - half


def null_threshold(fpr: float, d: int) -> float:
    """Return the cosine that a canary that never joined reaches with probability `fpr`, in (0, 1)."""
    if not 0 < fpr < 1:
        raise ConfigError(f"fpr must lie in (0, 1), got {fpr}")
    return float(brentq(lambda t: null_tail(t, d) - fpr, -1.0, 1.0, xtol=1e-15))


def delta_between(p: Normal, q: Normal, epsilon: float) -> float:
    """Return the hockey-stick divergence, sup over sets of P(S) - e^epsilon Q(S), of normals given as (mean, std).

    The set where log p/q > epsilon is bounded by the roots of a quadratic.
    """
    (m, s), (m0, s0) = p, q
    a = 0.5 * (1 / s0**2 - 1 / s**2)
    b = m / s**2 - m0 / s0**2
    c = 0.5 * (m0**2 / s0**2 - m**2 / s**2) + math.log(s0 / s) - epsilon

    def below(x: float) -> float:
        return float(ndtr((x - m) / s)) - math.exp(epsilon) * float(ndtr((x - m0) / s0))

    def above(x: float) -> float:
        return float(ndtr((m - x) / s)) - math.exp(epsilon) * float(ndtr((m0 - x) / s0))

    if abs(a) * (s0 * s) < 1e-12:
        return max(0.0, above(-c / b) if b > 0 else below(-c / b)) if b else max(0.0, 1 - math.exp(epsilon))
    gap = b * b - 4 * a * c
    if gap <= 0:
        return max(0.0, 1 - math.exp(epsilon)) if a > 0 else 0.0
    low, high = sorted((-b - sign * math.sqrt(gap)) / (2 * a) for sign in (1, -1))
    return max(0.0, below(low) + above(high) if a > 0 else below(high) - below(low))


def epsilon_between(p: Normal, q: Normal, delta: float) -> float:
    """Return the exact epsilon at `delta` between two normals (mean, std), in both directions, at most 500."""
    if min(p[1], q[1]) <= 0 or not 0 < delta < 1:
        raise ConfigError(f"need stds > 0 and delta in (0, 1), got {p}, {q}, {delta}")

    def excess(epsilon: float) -> float:
        return max(delta_between(p, q, epsilon), delta_between(q, p, epsilon)) - delta

    if excess(0.0) <= 0:
        return 0.0
    if excess(_HIGHEST) > 0:
        return _HIGHEST
    return float(brentq(excess, 0.0, _HIGHEST, xtol=1e-9))


def _finite(name: str, scores: ArrayLike) -> Floats:
    array = np.asarray(scores, dtype=np.float64)
    if array.ndim != 1 or array.size < 2 or not np.all(np.isfinite(array)):
        raise ConfigError(f"{name} must be a list of at least 2 finite scores, got shape {array.shape}")
    return array


def estimate(
    scores: ArrayLike, delta: float, *, d: int | None = None, unseen: ArrayLike | None = None, equal_variance: bool = True
) -> Audit:
    """Estimate epsilon from canary scores by fitting normals; `rigorous` is False.

    Args:
        scores: [k] of canaries that joined.
        delta: in (0, 1).
        d: dimension, for the final view: unseen scores are N(0, 1/d).
        unseen: [k'] simulated scores of canaries that never joined, for the largest cosine over rounds; give this or d.
        equal_variance: compare means in units of the null's std (unbiased); False fits the std too, as published: over-states.

    Source: Andrew et al. 2024, Algorithms 2 and 3.
    """
    joined = _finite("scores", scores)
    if (d is None) == (unseen is None):
        raise ConfigError("give exactly one of d (final view) and unseen (scores of canaries that never joined)")
    if d is not None:
        null, view = (0.0, 1 / math.sqrt(d)), View.FINAL
    else:
        rest = _finite("unseen", unseen if unseen is not None else [])
        null, view = (float(rest.mean()), float(rest.std(ddof=1))), View.AGGREGATE
    mean, std = float(joined.mean()), float(joined.std(ddof=1))
    epsilon = (
        epsilon_of_mu(max(0.0, (mean - null[0]) / null[1]), delta)
        if equal_variance
        else epsilon_between((mean, std), null, delta)
    )
    fit = "equal variance" if equal_variance else "unequal variance"
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view)
    note = "normal fit to one run; canaries share its noise: no bound"
    return Audit(epsilon, delta, scope, f"client canaries, one run, {fit}", 0.0, joined.size, rigorous=False, note=note)


def threshold_bound(
    scores: ArrayLike, d: int, delta: float, alpha: float = 0.05, *, fpr: float = 0.01, independent: bool = False
) -> Audit:
    """Return the bound of a fixed threshold on final-view scores: fpr is exact, the false-negative rate by Clopper-Pearson.

    Args:
        scores: [k] of canaries that joined.
        d: dimension.
        delta: in [0, 1).
        alpha: error probability, all spent on the false-negative rate.
        fpr: of the threshold; fixed beforehand.
        independent: whether every score comes from a separate run; only then is the bound rigorous.
    """
    values = _finite("scores", scores)
    threshold = null_threshold(fpr, d)
    fnr = float(clopper_pearson_upper(int(np.sum(values < threshold)), values.size, alpha))
    power = 1 - fnr - check_delta(delta)
    epsilon = max(0.0, math.log(power / fpr)) if power > 0 else 0.0
    note = f"threshold at fpr {fpr:g}" + ("" if independent else "; canaries of one run are not independent")
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.FINAL)
    return Audit(
        epsilon, delta, scope, "client canaries, fixed threshold", 1 - alpha, values.size, rigorous=independent, note=note
    )


_UNSEEN = 1000
"""Number of directions of canaries that never join, which give the distribution of the largest cosine over rounds."""
_AT_ONCE = 50


@dataclass(frozen=True)
class Canaries(Remembering):
    """Objective that wraps another one: a client whose private state has `canary` uploads that canary's direction instead.

    Args:
        seed: of the directions. norm: of a canary's update, far above every clip.
    """

    inner: Client
    seed: int
    norm: float

    def direction(self, canary: int, d: int) -> Tensor:
        """Return the canary's direction [d], uniform on the unit sphere; `canary` is any whole number from 0."""
        drawn: Tensor = torch.randn(d, generator=Randomness(self.seed).generator("canary", canary))
        return drawn.div_(drawn.norm())

    def begin(self, local: Local) -> None:
        self.inner.begin(local)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        return self.inner.step(local, x, y)

    def finish(self, local: Local) -> Tensor:
        """Return the inner objective's update, or a canary's direction scaled to `norm`."""
        update = self.inner.finish(local)
        canary = local.state.get("canary")
        return update if canary is None else self.norm * self.direction(canary, len(update)).to(update.device)

    def personal(self, model: Tensor, state: State) -> Tensor:
        """Return the inner objective's personal model, or the global model if it has none."""
        return self.inner.personal(model, state) if isinstance(self.inner, HasPersonalModel) else model

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        return self.inner.measures(state) if isinstance(self.inner, HasMetrics) else {}


@dataclass(frozen=True)
class Seen:
    """Scores of a run with k canaries: cosines with the whole movement [k], and the largest over rounds [k].

    unseen: the latter for canaries that never joined. d: number of coordinates. trained: number of rounds.
    """

    final: Floats
    rounds: Floats
    unseen: Floats
    d: int
    canaries: int
    trained: int

    def audits(self, delta: float) -> list[Audit]:
        """Return the estimates for an adversary who sees only the last model, and for one who sees every round's model."""
        note = f"{self.canaries} canaries among the clients of a real run of {self.trained} rounds, d = {self.d}"
        estimates = [estimate(self.final, delta, d=self.d), estimate(self.rounds, delta, unseen=self.unseen)]
        return [replace(audit, note=f"{note}; {audit.note}") for audit in estimates]


def run_with_canaries(
    federation: Federation,
    make: Callable[[Context], Engine],
    k: int,
    rng: np.random.Generator,
    on_round: Callable[[int], None] | None = None,
) -> Seen:
    """Train a federation to its end with k random clients replaced by canaries.

    Args:
        federation: not yet started. make: returns the engine of a context. k: canaries, from 2 to the number of clients.
        rng: draws the canaries and their directions. on_round: called with the number of completed rounds.

    Raises:
        ConfigError: too few clients, records are protected, or the method's clip and noise depend on the private update.
    """
    check(federation, k)
    context = federation.context
    marked = Canaries(context.objective, int(rng.integers(2**31)), 0.5 * context.door.max_norm)
    door = replace(context.door, memory=NoiseMemory())  # correlated noise starts anew with each run
    context = replace(context, objective=marked, door=door)
    federation = replace(federation, context=context, evaluate_every=federation.setting.rounds)
    progress = start(federation)
    for canary, client in enumerate(rng.choice(federation.setting.clients, size=k, replace=False)):
        progress.privates[int(client)] = {"canary": canary}
    models = [progress.model]

    def after(done: Progress) -> None:
        models.append(done.model)
        if on_round is not None:
            on_round(done.round)

    fit(federation, make(federation.context), progress, after)
    steps = [(after - before).double().numpy() for before, after in pairwise(models) if not torch.equal(before, after)]
    if not steps:
        raise ConfigError("no round of this run moved the model, so there is nothing to search for canaries")
    moved = np.stack(steps)
    d = moved.shape[1]

    def largest(canaries: range) -> Floats:
        parts = [range(i, min(i + _AT_ONCE, canaries.stop)) for i in range(canaries.start, canaries.stop, _AT_ONCE)]
        return np.concatenate([round_scores(directions(marked, part, d), moved) for part in parts])

    whole = (final_model(progress) - models[0]).double().numpy()
    final = final_scores(directions(marked, range(k), d), whole)
    return Seen(final, largest(range(k)), largest(range(k, k + _UNSEEN)), d, k, progress.round)


def directions(marked: Canaries, canaries: range, d: int) -> Floats:
    """Return the directions [k, d] of these canaries."""
    return np.stack([marked.direction(canary, d).double().numpy() for canary in canaries])


def check(federation: Federation, k: int) -> None:
    """Check that client canaries can be used with this run."""
    s, context = federation.setting, federation.context
    if not 2 <= k <= s.clients:
        raise ConfigError(f"from 2 to {s.clients} of this run's {s.clients} clients can be canaries, got {k}")
    if s.scope.unit is not Unit.CLIENT:
        raise ConfigError("client canaries estimate what protects clients: set privacy.unit = 'client', or leave --canaries out")
    plan = context.plan(Released(0, context.model.vector.cpu(), None, 0.5), context.policy.start())
    if (
        not isinstance(plan, Plan)
        or isinstance(plan, LocalDpSgd)
        or not (math.isfinite(plan.clip) or plan.layer_clip is not None)
    ):
        raise ConfigError(
            f"client canaries upload at the clip; {federation.method.name} fixes no clip before it sees the update: "
            "leave --canaries out, or audit a variant that is proven"
        )
