"""The float attack: whether the low bits of a released float32 vector show what the noise was added to.

Noise that is rounded to float32, scaled and added in float32 can only take some values, and which these are depends on what it
was added to (Mironov 2012). The attack counts the coordinates that a hypothesis makes impossible: under the true hypothesis it
finds none, however large the noise. It needs a single release, and holds for the server (known contribution: nothing, or the
client's clipped vector) as for those who see a sum (known contribution: the sum of all other clients, or of all).

Releases on a grid (`fedveil.mechanism.grid`) are integers plus integers; there the same counts tell nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedveil.audit.intervals import check_level, clopper_pearson_upper, epsilon_from_rates

Vector = NDArray[np.float32]
_NEIGHBOURS = 2


@dataclass(frozen=True)
class PatternAudit:
    """What an attack on low bits found in releases of two worlds.

    absent, present: its score of each release in the world without and with the contribution; higher means present.
    p_value: of equal distributions of the scores. epsilon: lower bound that the attack's error rates prove.
    """

    absent: NDArray[np.float64]
    present: NDArray[np.float64]
    p_value: float
    epsilon: float


def impossible(released: Vector, std: float, known: Vector | None = None, divisor: float = 1.0) -> int:
    """How many coordinates of `released` [n] no float32 noise can give that was added to `known` and divided by a public number.

    Counts y for which float32(float32(known + float32(float32(z) * float32(std))) / float32(divisor)) = y has no float32
    solution z. The only candidates are (y divisor - known) / std and its neighbours.

    Args:
        released: [n], as it left. std: of the noise, > 0.
        known: [n], what the noise was added to if the hypothesis is true; zeros by default.
        divisor: such as the batch size in a step of DP-SGD.
    """
    y = released.astype(np.float32)
    base = np.zeros_like(y) if known is None else known.astype(np.float32)
    scale, parts = np.float32(std), np.float32(divisor)
    middle = ((y.astype(np.float64) * float(parts) - base.astype(np.float64)) / float(scale)).astype(np.float32)
    found = np.zeros(y.shape, dtype=np.bool_)
    for direction in (-np.inf, np.inf):
        candidate = middle
        for _ in range(_NEIGHBOURS + 1):
            found |= (base + candidate * scale) / parts == y
            candidate = np.nextafter(candidate, np.float32(direction))
    return int(np.count_nonzero(~found))


def audit_float_pattern(
    absent: Sequence[Vector],
    present: Sequence[Vector],
    std: float,
    known: tuple[Vector, Vector],
    alpha: float = 0.05,
    delta: float = 0.0,
    divisor: float = 1.0,
) -> PatternAudit:
    """The float attack on releases of two worlds; its score is the difference of the two hypotheses' impossible coordinates.

    Args:
        absent, present: releases [n] of the world without and with the contribution. std: of the noise.
        known: what the noise was added to in each of the two worlds, [n] each.
        alpha: chance of a wrong bound. delta: at which the bound on epsilon holds.
        divisor: of the noisy sum, public.
    """
    scores = [
        np.array([impossible(y, std, known[0], divisor) - impossible(y, std, known[1], divisor) for y in world], dtype=np.float64)
        for world in (absent, present)
    ]
    return judge(scores[0], scores[1], alpha, delta)


def judge(absent: NDArray[np.float64], present: NDArray[np.float64], alpha: float = 0.05, delta: float = 0.0) -> PatternAudit:
    """The verdict on one score for each release, where the attack says "present" unless the score is negative.

    Source: Mann & Whitney 1947 (p-value); Clopper & Pearson 1934 on both error rates, Kairouz et al. 2015 (epsilon).
    """
    check_level(alpha)
    equal = len(np.unique(np.concatenate([absent, present]))) == 1
    p_value = 1.0 if equal else float(stats.mannwhitneyu(absent, present, alternative="two-sided").pvalue)
    fpr = clopper_pearson_upper(np.count_nonzero(absent >= 0), len(absent), alpha / 2)
    fnr = clopper_pearson_upper(np.count_nonzero(present < 0), len(present), alpha / 2)
    return PatternAudit(absent, present, p_value, float(epsilon_from_rates(fpr, fnr, delta)))
