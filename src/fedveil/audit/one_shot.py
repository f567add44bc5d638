"""Client canaries in one training run: random unit directions, and how far the models moved along them.

Canary client j uploads C c_j, with c_j uniform on the unit sphere of R^d. An outsider scores the cosine of c_j with w_T - w_0,
one who sees every round scores the largest cosine over rounds. The scores of canaries that never joined are known exactly (or
simulated for the maximum), so one run gives an ESTIMATE of epsilon. It is not a bound: canaries of one run share the noise and
each other's updates. For a bound from one run, let a coin decide which canaries join and use `one_run`.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq
from scipy.special import betainc, ndtr

from fedveil.accounting.types import Adjacency, Audit, Scope, Unit, View
from fedveil.audit.intervals import check_delta, clopper_pearson_upper, epsilon_of_mu
from fedveil.errors import ConfigError

Floats = NDArray[np.float64]
Normal = tuple[float, float]
_HIGHEST = 500.0


def canaries(k: int, d: int, rng: np.random.Generator) -> Floats:
    """[k, d] directions, uniform on the unit sphere."""
    if k < 1 or d < 2:
        raise ConfigError(f"canaries need k >= 1 and d >= 2, got {k} and {d}")
    directions = rng.standard_normal((k, d))
    return np.asarray(directions / np.linalg.norm(directions, axis=1, keepdims=True))


def final_scores(directions: Floats, movement: ArrayLike) -> Floats:
    """Cosines between each canary [k, d] and the movement w_T - w_0 [d]: what the final view gives."""
    step = np.asarray(movement, dtype=np.float64)
    norm = float(np.linalg.norm(step))
    if step.shape != (directions.shape[1],) or not (norm > 0 and math.isfinite(norm)):
        raise ConfigError(f"the movement must be a finite non-zero vector of length {directions.shape[1]}, got norm {norm}")
    return np.asarray(directions @ (step / norm))


def round_scores(directions: Floats, movements: ArrayLike) -> Floats:
    """Largest cosine over rounds between each canary [k, d] and the aggregates [T, d]: what the aggregate view gives."""
    return np.asarray(np.max([final_scores(directions, step) for step in np.asarray(movements, dtype=np.float64)], axis=0))


def null_tail(threshold: float, d: int) -> float:
    """Exact chance that a canary that never joined has cosine >= threshold: density proportional to (1 - t^2)^((d-3)/2).

    Source: Andrew et al. 2024, Theorem 3.1.
    """
    if not -1 <= threshold <= 1 or d < 2:
        raise ConfigError(f"a cosine threshold lies in [-1, 1] and d >= 2, got {threshold} and {d}")
    half = 0.5 * float(betainc((d - 1) / 2, 0.5, 1 - threshold**2))
    return half if threshold >= 0 else 1 - half


def null_threshold(fpr: float, d: int) -> float:
    """The cosine that a canary that never joined reaches with probability `fpr`, in (0, 1)."""
    if not 0 < fpr < 1:
        raise ConfigError(f"fpr must lie in (0, 1), got {fpr}")
    return float(brentq(lambda t: null_tail(t, d) - fpr, -1.0, 1.0, xtol=1e-15))


def delta_between(p: Normal, q: Normal, epsilon: float) -> float:
    """Hockey-stick divergence: sup over sets of P(S) - e^epsilon Q(S), for normals given as (mean, std).

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
    """The epsilon at `delta` between two normals (mean, std), both directions: exact, 500 at most."""
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
    seen = _finite("scores", scores)
    if (d is None) == (unseen is None):
        raise ConfigError("give exactly one of d (final view) and unseen (scores of canaries that never joined)")
    if d is not None:
        null, view = (0.0, 1 / math.sqrt(d)), View.FINAL
    else:
        rest = _finite("unseen", unseen if unseen is not None else [])
        null, view = (float(rest.mean()), float(rest.std(ddof=1))), View.AGGREGATE
    mean, std = float(seen.mean()), float(seen.std(ddof=1))
    epsilon = (
        epsilon_of_mu(max(0.0, (mean - null[0]) / null[1]), delta)
        if equal_variance
        else epsilon_between((mean, std), null, delta)
    )
    fit = "equal variance" if equal_variance else "unequal variance"
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, view)
    note = "normal fit to one run; canaries share its noise: no bound"
    return Audit(epsilon, delta, scope, f"client canaries, one run, {fit}", 0.0, seen.size, rigorous=False, note=note)


def threshold_bound(
    scores: ArrayLike, d: int, delta: float, alpha: float = 0.05, *, fpr: float = 0.01, independent: bool = False
) -> Audit:
    """The bound of a fixed threshold on final-view scores: fpr is exact, the false-negative rate by Clopper-Pearson.

    Args:
        scores: [k] of canaries that joined.
        d: dimension.
        delta: in [0, 1).
        alpha: error probability, all spent on the false-negative rate.
        fpr: of the threshold; fixed beforehand.
        independent: whether every score comes from a run of its own; only then is the bound rigorous.
    """
    seen = _finite("scores", scores)
    threshold = null_threshold(fpr, d)
    fnr = float(clopper_pearson_upper(int(np.sum(seen < threshold)), seen.size, alpha))
    power = 1 - fnr - check_delta(delta)
    epsilon = max(0.0, math.log(power / fpr)) if power > 0 else 0.0
    note = f"threshold at fpr {fpr:g}" + ("" if independent else "; canaries of one run are not independent")
    scope = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.FINAL)
    return Audit(epsilon, delta, scope, "client canaries, fixed threshold", 1 - alpha, seen.size, rigorous=independent, note=note)
