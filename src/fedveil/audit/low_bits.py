"""Audits of the low bits of released numbers: whether they reveal more than the values.

Noise that is rounded to float32, scaled and added in float32 reaches only some values, which depend on the number it was added to
(Mironov 2012). The attack counts the coordinates that a hypothesis makes impossible: under the true hypothesis there are none,
however large the noise. It needs a single release. It applies to the server (known contribution: nothing, or the client's clipped
vector) and to observers of a sum (known contribution: the sum of all other clients, or of all).

Releases on a grid (`fedveil.mechanism.grid`) are sums of integers, for which these counts reveal nothing.

A release on the grid is m + K: the contribution m as integers, plus noise K drawn independently of m. If K is correct, its low
bits are uniform, and so are those of m + K for any m. Noise with a pattern in its low bits (all even, say) would reveal the low
bits of m.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats

from fedveil.accounting.types import Audit
from fedveil.audit.adapter import Case, warmed, worst_pair
from fedveil.audit.subject import check_level, clopper_pearson_upper, epsilon_from_rates
from fedveil.errors import ConfigError
from fedveil.mechanism.grid import from_grid
from fedveil.mechanism.plan import Plan
from fedveil.mechanism.plan import Upload as Release

Vector = NDArray[np.float32]
_NEIGHBOURS = 2


@dataclass(frozen=True)
class PatternAudit:
    """Result of an attack on low bits, from releases of two worlds.

    absent, present: score of each release in the world without and with the contribution; higher means present.
    p_value: for equal distributions of the scores. epsilon: lower bound proved by the attack's error rates.
    """

    absent: NDArray[np.float64]
    present: NDArray[np.float64]
    p_value: float
    epsilon: float


def impossible(released: Vector, std: float, known: Vector | None = None, divisor: float = 1.0) -> int:
    """Return the number of coordinates of `released` [n] that float32 noise on `known`, divided by a public number, cannot give.

    Counts y for which float32(float32(known + float32(float32(z) * float32(std))) / float32(divisor)) = y has no float32
    solution z. The only candidates are (y divisor - known) / std and its neighbours.

    Args:
        released: [n], the release. std: of the noise, > 0.
        known: [n], the vector that the noise was added to if the hypothesis is true; zeros by default.
        divisor: such as the batch size in a step of DP-SGD.
    """
    y = released.astype(np.float32)
    base = np.zeros_like(y) if known is None else known.astype(np.float32)
    scale, parts = np.float32(std), np.float32(divisor)
    middle = ((y.astype(np.float64) * float(parts) - base.astype(np.float64)) / float(scale)).astype(np.float32)
    possible = np.zeros(y.shape, dtype=np.bool_)
    for direction in (-np.inf, np.inf):
        candidate = middle
        for _ in range(_NEIGHBOURS + 1):
            possible |= (base + candidate * scale) / parts == y
            candidate = np.nextafter(candidate, np.float32(direction))
    return int(np.count_nonzero(~possible))


def audit_float_pattern(
    absent: Sequence[Vector],
    present: Sequence[Vector],
    std: float,
    known: tuple[Vector, Vector],
    alpha: float = 0.05,
    delta: float = 0.0,
    divisor: float = 1.0,
) -> PatternAudit:
    """Run the float attack on releases of two worlds; its score is the difference of the hypotheses' impossible coordinates.

    Args:
        absent, present: releases [n] of the world without and with the contribution. std: of the noise.
        known: the vector that the noise was added to in each world, [n] each.
        alpha: chance of a wrong bound. delta: at which the bound on epsilon holds.
        divisor: of the noisy sum, public.
    """
    scores = [
        np.array([impossible(y, std, known[0], divisor) - impossible(y, std, known[1], divisor) for y in world], dtype=np.float64)
        for world in (absent, present)
    ]
    return judge(scores[0], scores[1], alpha, delta)


def judge(absent: NDArray[np.float64], present: NDArray[np.float64], alpha: float = 0.05, delta: float = 0.0) -> PatternAudit:
    """Return the result for one score per release; the attack says "present" unless the score is negative.

    Source: Mann & Whitney 1947 (p-value); Clopper & Pearson 1934 on both error rates, Kairouz et al. 2015 (epsilon).
    """
    check_level(alpha)
    equal = len(np.unique(np.concatenate([absent, present]))) == 1
    p_value = 1.0 if equal else float(stats.mannwhitneyu(absent, present, alternative="two-sided").pvalue)
    fpr = clopper_pearson_upper(np.count_nonzero(absent >= 0), len(absent), alpha / 2)
    fnr = clopper_pearson_upper(np.count_nonzero(present < 0), len(present), alpha / 2)
    return PatternAudit(absent, present, p_value, float(epsilon_from_rates(fpr, fnr, delta)))


Integers = NDArray[np.int64]
Counts = NDArray[np.int64]
_DEFAULT_BITS = 8


def audit_integer_bits(
    absent: Sequence[Integers],
    present: Sequence[Integers],
    contribution: Integers,
    bits: int = _DEFAULT_BITS,
    alpha: float = 0.05,
    delta: float = 0.0,
) -> PatternAudit:
    """Test the residues of releases modulo 2, 4, ..., 2^bits, alone and after subtracting the known contribution.

    The p-value is that of equal residues in both worlds (chi-square on each table, Bonferroni over all). The bound on epsilon
    comes from a likelihood ratio of residues learnt on the first half of the releases and scored on the other.

    Meaningful if the noise's std is at least 4 2^bits grid steps. Below, the residues reveal the values themselves, which the
    mechanism's epsilon allows.

    Args:
        absent, present: releases [n] of the world without and with the contribution; at least 2 each.
        contribution: m [n], in grid steps. bits: of the largest modulus, in [1, 16].
        alpha: chance of a wrong bound. delta: at which the bound on epsilon holds.
    """
    if not 1 <= bits <= 16:
        raise ConfigError(f"bits must lie between 1 and 16, got {bits}")
    if min(len(absent), len(present)) < 2:
        raise ConfigError(f"two halves need at least 2 releases in each world, got {len(absent)} and {len(present)}")
    tables = [np.array([_counts(y, contribution, bits) for y in world]) for world in (absent, present)]
    scores = _scores(tables[0], tables[1])
    result = judge(*scores, alpha, delta)
    return PatternAudit(*scores, p_value=_equal_residues(tables[0].sum(0), tables[1].sum(0), bits), epsilon=result.epsilon)


def _counts(released: Integers, contribution: Integers, bits: int) -> Counts:
    """Return the counts of residues modulo 2^bits, of the release and of the release minus the contribution, [2, 2^bits]."""
    modulus = 2**bits
    return np.stack([np.bincount(y % modulus, minlength=modulus) for y in (released, released - contribution)])


def _equal_residues(absent: Counts, present: Counts, bits: int) -> float:
    """Return the smallest p-value over both kinds of residues and all moduli, times their number."""
    p_values = []
    for worlds in zip(absent, present, strict=True):
        for b in range(1, bits + 1):
            table = np.stack([counts.reshape(-1, 2**b).sum(0) for counts in worlds])
            table = table[:, table.sum(0) > 0]
            p_values.append(float(stats.chi2_contingency(table).pvalue) if table.shape[1] > 1 else 1.0)
    return min(1.0, min(p_values) * len(p_values))


def _scores(absent: Counts, present: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the log-likelihood ratios of the second half of the releases, with frequencies from the first half."""
    halves = len(absent) // 2, len(present) // 2
    learnt = [np.log(world[:half].sum(0) + 1.0) for world, half in zip((absent, present), halves, strict=True)]
    totals = [np.log(np.exp(log).sum(axis=1, keepdims=True)) for log in learnt]
    weights = (learnt[1] - totals[1]) - (learnt[0] - totals[0])
    return (absent[halves[0] :] * weights).sum((1, 2)), (present[halves[1] :] * weights).sum((1, 2))


_MOST = 200
"""Largest number of releases tested per world: one is enough to reveal a pattern."""


@dataclass(frozen=True)
class _World:
    integers: list[np.ndarray]
    floats: list[np.ndarray]


def audit_released_bits(case: Case, rng: np.random.Generator, *, n: int, delta: float, alpha: float) -> Audit | None:
    """Attack the low bits of the releases of two neighbours; None if releases are floats, because nothing is promised.

    There are two tests, each at half of alpha: the residues of the integers, and floats that the noise could not have given. Both
    use the two known contributions.

    Args:
        n: releases of each world, of which at most `_MOST` are drawn. alpha: chance of a wrong bound.
    """
    plan = case.policy.plan(case.released(0), warmed(case, rng))
    if not isinstance(plan, Plan):
        return None
    pair, count = worst_pair(plan, case), max(min(n, _MOST), 4)
    absent = torch.zeros_like(case.model)

    def release(world: int) -> Release:
        return case.release(pair[world] if case.joins(rng) else absent, plan, 0, rng)

    drawn = [[release(world) for _ in range(count)] for world in (0, 1)]
    if drawn[0][0].integers is None:
        return None
    worlds = [_World([_integers(r) for r in each], [r.vector.numpy() for r in each]) for each in drawn]
    door = case.door(rng)
    extras, finer = torch.zeros(door.parts.dimension - len(absent)), 2**plan.mechanism.shift
    m0, m1 = (door.gridded(torch.cat([u, extras]), door.compile(plan)) * finer for u in pair)
    bits = audit_integer_bits(worlds[0].integers, worlds[1].integers, m1 - m0, alpha=alpha / 2, delta=delta)
    known = [from_grid(m, door.parts.grid(plan))[: len(absent)] for m in (m0, m1)]
    std = float(drawn[0][0].noise_std[drawn[0][0].noise_std > 0].min())
    floats = audit_float_pattern(worlds[0].floats, worlds[1].floats, std, (known[0], known[1]), alpha / 2, delta)
    epsilon = max(bits.epsilon, floats.epsilon)
    note = f"p = {min(1.0, 2 * min(bits.p_value, floats.p_value)):.2g} that the two worlds' bits have one law"
    return Audit(epsilon, delta, case.scope, "float pattern and low bits of what left", 1 - alpha, 2 * count, note=note)


def _integers(release: Release) -> np.ndarray:
    assert release.integers is not None
    return release.integers.numpy()
