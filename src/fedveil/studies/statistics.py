"""Statistics over seeds: whether one method is better than another, and curves averaged over runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev
from typing import Any

from scipy.special import stdtr, stdtrit

from fedveil.experiment.recorded_run import RunData
from fedveil.federation.history import Row

LEVEL = 0.05
"""The significance level."""


@dataclass(frozen=True)
class Against:
    """A test of one method against the best of its block, paired by seed.

    Args:
        best: the other method. n: number of common seeds. difference: mean of (this - best).
        t: two-sided p of the paired t-test. wilcoxon: p of the exact signed-rank test. holm: t after Holm's correction.
        half: half the width of the 95 % confidence interval of the difference (Student's t).
    """

    best: str
    n: int
    difference: float
    t: float
    wilcoxon: float
    holm: float
    half: float = math.nan


def paired_t(differences: Sequence[float]) -> float:
    """Return the two-sided p of the hypothesis that the mean difference is 0 (Student's t, n - 1 degrees of freedom); n >= 2.

    If all differences are equal, there is no spread: p is 1 if they are 0, else 0.
    """
    n, mean = len(differences), fmean(differences)
    if len(set(differences)) == 1:
        return 1.0 if mean == 0 else 0.0
    t = mean / (stdev(differences) / math.sqrt(n))
    return 2 * float(stdtr(n - 1, -abs(t)))


def signed_rank(differences: Sequence[float]) -> float:
    """Return the exact two-sided p of Wilcoxon's signed-rank test; zeros are left out, ties share their ranks.

    All 2^n sign patterns are counted by their sum in half ranks, so ties need no approximation.
    """
    from scipy.stats import rankdata  # imported here: it takes most of a second, which reports do not need

    nonzero = [d for d in differences if d != 0]
    ranks = [round(2 * r) for r in rankdata([abs(d) for d in nonzero])] if nonzero else []
    observed = sum(r for r, d in zip(ranks, nonzero, strict=True) if d > 0)
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        ways = [w + (ways[i - rank] if i >= rank else 0) for i, w in enumerate(ways)]
    tail = min(sum(ways[: observed + 1]), sum(ways[observed:]))
    return min(1.0, 2 * tail / 2.0 ** len(nonzero))


def smallest_signed_rank(n: int) -> float:
    """Return the smallest possible p of the signed-rank test with n pairs: the two most extreme of 2^n outcomes."""
    return min(1.0, 2.0 ** (1 - n))


def smallest_rank_sum(n: int) -> float:
    """Return the smallest possible p of the Mann-Whitney test with n numbers on each side."""
    return min(1.0, 2 / math.comb(2 * n, n))


def seeds_needed(comparisons: int) -> int:
    """Return the seeds that the signed-rank test needs for significance, with Holm's correction for that many comparisons."""
    return next(n for n in range(1, 64) if smallest_signed_rank(n) * max(1, comparisons) <= LEVEL)


def holm(p: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's step-down correction, in the order of `p`."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, largest = [0.0] * len(p), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        corrected[i] = largest
    return corrected


def interval(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of the mean (Student's t); nan for fewer than two values."""
    n = len(values)
    return float(stdtrit(n - 1, 0.975)) * stdev(values) / math.sqrt(n) if n > 1 else math.nan


def ranks(means: Mapping[str, float]) -> dict[str, int]:
    """Return ranks, 1 for the largest mean; equal means share the better rank."""
    return {name: 1 + sum(other > mean for other in means.values()) for name, mean in means.items()}


def against_best(samples: Mapping[str, Mapping[int, float]]) -> dict[str, Against]:
    """Test each method against the one with the largest mean: see `against`."""
    return against(samples, max(samples, key=lambda m: fmean(samples[m].values()))) if samples else {}


def against(samples: Mapping[str, Mapping[int, float]], best: str) -> dict[str, Against]:
    """Test each method against one of them, paired by seed; methods with fewer than two common seeds are left out.

    Args:
        samples: for each method, the value of each seed. best: the method that the others are compared with.
    """
    pairs = {
        method: [values[s] - samples[best][s] for s in sorted(values.keys() & samples[best].keys())]
        for method, values in samples.items()
        if method != best
    }
    tested = {method: d for method, d in pairs.items() if len(d) > 1}
    p = [paired_t(d) for d in tested.values()]
    return {
        method: Against(best, len(d), fmean(d), t, signed_rank(d), corrected, interval(d))
        for (method, d), t, corrected in zip(tested.items(), p, holm(p), strict=True)
    }


POINTS = 400
"""The most points of a curve; longer curves have every k-th round and the last."""


def curve(runs: list[list[tuple[float, Any]]]) -> dict[str, Any]:
    """Return the mean over the runs at their common rounds (from 1); for several runs, with a 95 % confidence interval."""
    tables = [{int(t) + 1: v for t, v in run if isinstance(v, float)} for run in runs]
    shared = [t for t in tables[0] if all(t in table for table in tables[1:])]
    drawn_rounds = thinned(shared)
    values = {t: [table[t] for table in tables] for t in drawn_rounds}
    curve: dict[str, Any] = {"points": [[t, fmean(v)] for t, v in values.items()]}
    if len(runs) > 1:
        half = {t: interval(v) if all(map(math.isfinite, v)) else math.nan for t, v in values.items()}
        curve["band"] = [[t, fmean(v) - half[t], fmean(v) + half[t]] for t, v in values.items()]
    return curve


def thinned(rounds: Sequence[int]) -> list[int]:
    """Return about `POINTS` of the rounds: every k-th, and the last."""
    step = max(1, math.ceil(len(rounds) / POINTS))
    return [t for i, t in enumerate(rounds) if i % step == 0 or i == len(rounds) - 1]


def constant(runs: Iterable[RunData], column: str) -> bool:
    """Return whether a column of the history has one value in all rounds of all runs (up to rounding)."""
    values = [row[column] for run in runs for row in run.history if isinstance(row.get(column), float)]
    return len(values) > 1 and (min(values) == max(values) or max(values) - min(values) <= 1e-6 * max(map(abs, values)))


def last(rows: Sequence[Row], column: str) -> float | None:
    return next((float(r[column]) for r in reversed(rows) if isinstance(r.get(column), float)), None)


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Return mean, smallest, largest and sample standard deviation of the known values."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    return {
        "mean": fmean(known),
        "min": min(known),
        "max": max(known),
        "sd": stdev(known) if len(known) > 1 else 0.0,
        "n": len(known),
    }


def layers(runs: list[RunData]) -> dict[str, list[dict[str, Any]]]:
    """Return curves of the layers for each column of layers.csv, equal ones merged; beyond 12, smallest, median and largest."""
    rows = runs[0].layers
    by_column: dict[str, list[dict[str, Any]]] = {}
    for column in dict.fromkeys(k for row in rows for k in row if k not in ("round", "layer")):
        table: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if isinstance(row.get(column), float):
                table.setdefault(str(row["layer"]), []).append((row["round"], row[column]))
        merged: dict[tuple[tuple[float, float], ...], list[str]] = {}
        for layer, points in table.items():
            merged.setdefault(tuple((t, float(f"{v:.6g}")) for t, v in points), []).append(layer)
        curves = [{"name": _layer_name(names, len(table)), **curve([list(points)])} for points, names in merged.items()]
        by_column[column] = curves if len(curves) <= 12 else _summarised(list(table.values()))
    return by_column


def _layer_name(names: list[str], total: int) -> str:
    if len(names) == total > 1:
        return f"all {total} layers"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _summarised(each: list[list[tuple[float, float]]]) -> list[dict[str, Any]]:
    at: dict[float, list[float]] = {}
    for points in each:
        for t, v in points:
            at.setdefault(t, []).append(v)
    kinds = (("least of the layers", min), ("median layer", median), ("largest of the layers", max))
    return [{"name": name, **curve([[(t, float(of(v))) for t, v in at.items()]])} for name, of in kinds]
