"""Whether one method is better than another over a few seeds. A sample is one number a seed, never a round of a run."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy.special import stdtr, stdtrit

LEVEL = 0.05
"""Below this a difference counts as one."""


@dataclass(frozen=True)
class Against:
    """One method against the best of its block, paired by seed.

    Args:
        best: the method it is compared with. n: seeds that both have. difference: mean of (this less best).
        t: two-sided p of the paired t-test. wilcoxon: that of the exact signed-rank test. holm: t after Holm's correction.
    """

    best: str
    n: int
    difference: float
    t: float
    wilcoxon: float
    holm: float


def paired_t(differences: Sequence[float]) -> float:
    """Two-sided p of the hypothesis that the mean difference is 0 (Student's t, n - 1 degrees of freedom); n >= 2.

    Differences that are all the same have no spread to compare with: p is 1 where they are 0, else 0.
    """
    n, mean = len(differences), fmean(differences)
    if len(set(differences)) == 1:
        return 1.0 if mean == 0 else 0.0
    t = mean / (stdev(differences) / math.sqrt(n))
    return 2 * float(stdtr(n - 1, -abs(t)))


def signed_rank(differences: Sequence[float]) -> float:
    """Two-sided exact p of Wilcoxon's signed-rank test; zeros are left out, ties share their ranks.

    All 2^n signs are counted by the sum they give, in halves of a rank, so that ties need no approximation.
    """
    from scipy.stats import rankdata  # most of a second, which reports need not wait for

    kept = [d for d in differences if d != 0]
    ranks = [round(2 * r) for r in rankdata([abs(d) for d in kept])] if kept else []
    observed = sum(r for r, d in zip(ranks, kept, strict=True) if d > 0)
    ways = [1] + [0] * sum(ranks)
    for rank in ranks:
        ways = [w + (ways[i - rank] if i >= rank else 0) for i, w in enumerate(ways)]
    tail = min(sum(ways[: observed + 1]), sum(ways[observed:]))
    return min(1.0, 2 * tail / 2.0 ** len(kept))


def smallest_signed_rank(n: int) -> float:
    """The least p that the signed-rank test can give with n pairs: both signs of the most extreme of 2^n outcomes."""
    return min(1.0, 2.0 ** (1 - n))


def smallest_rank_sum(n: int) -> float:
    """The least p that the Mann-Whitney test can give with n numbers on each side."""
    return min(1.0, 2 / math.comb(2 * n, n))


def seeds_needed(comparisons: int) -> int:
    """Seeds from which on the signed-rank test can find a difference, with Holm's correction for so many comparisons."""
    return next(n for n in range(1, 64) if smallest_signed_rank(n) * max(1, comparisons) <= LEVEL)


def holm(p: Sequence[float]) -> list[float]:
    """The p-values after Holm's step-down correction, in the order of `p`."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    corrected, largest = [0.0] * len(p), 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p) - place) * p[i]))
        corrected[i] = largest
    return corrected


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean (Student's t); nan for fewer than two values."""
    n = len(values)
    return float(stdtrit(n - 1, 0.975)) * stdev(values) / math.sqrt(n) if n > 1 else math.nan


def ranks(means: Mapping[str, float]) -> dict[str, int]:
    """1 for the largest mean; equal means share the better rank."""
    return {name: 1 + sum(other > mean for other in means.values()) for name, mean in means.items()}


def against_best(samples: Mapping[str, Mapping[int, float]]) -> dict[str, Against]:
    """Each method against the one with the largest mean: see `against`."""
    return against(samples, max(samples, key=lambda m: fmean(samples[m].values()))) if samples else {}


def against(samples: Mapping[str, Mapping[int, float]], best: str) -> dict[str, Against]:
    """Each method against one of them, paired by seed; those with fewer than two seeds in common are left out.

    Args:
        samples: by method, the number of each seed. best: the method that the others are compared with.
    """
    pairs = {
        method: [values[s] - samples[best][s] for s in sorted(values.keys() & samples[best].keys())]
        for method, values in samples.items()
        if method != best
    }
    tested = {method: d for method, d in pairs.items() if len(d) > 1}
    p = [paired_t(d) for d in tested.values()]
    return {
        method: Against(best, len(d), fmean(d), t, signed_rank(d), corrected)
        for (method, d), t, corrected in zip(tested.items(), p, holm(p), strict=True)
    }
