"""Whether the low bits of released integers tell two worlds apart.

A release on the grid is m + K: the contribution as integers, plus noise drawn without looking at it. If K is what it should be,
its low bits are uniform, and so are those of m + K, whatever m is. Noise with a pattern in its low bits (all even, say) would
show the low bits of m.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from fedveil.audit.float_pattern import PatternAudit, judge
from fedveil.errors import ConfigError

Integers = NDArray[np.int64]
Counts = NDArray[np.int64]
DEFAULT_BITS = 8


def audit_integer_bits(
    absent: Sequence[Integers],
    present: Sequence[Integers],
    contribution: Integers,
    bits: int = DEFAULT_BITS,
    alpha: float = 0.05,
    delta: float = 0.0,
) -> PatternAudit:
    """Test the residues of releases modulo 2, 4, ..., 2^bits, alone and after subtracting the known contribution.

    The p-value is that of equal residues in both worlds (chi-square on each table, Bonferroni over all). The bound on epsilon
    comes from a likelihood ratio of residues learnt on the first half of the releases and scored on the other.

    Meaningful where the noise's std is at least 4 2^bits grid steps. Below, the residues show the values themselves, which the
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
    verdict = judge(*scores, alpha, delta)
    return PatternAudit(*scores, p_value=_equal_residues(tables[0].sum(0), tables[1].sum(0), bits), epsilon=verdict.epsilon)


def _counts(released: Integers, contribution: Integers, bits: int) -> Counts:
    """How often each residue modulo 2^bits occurs, in the release and in what is left without the contribution, [2, 2^bits]."""
    modulus = 2**bits
    return np.stack([np.bincount(y % modulus, minlength=modulus) for y in (released, released - contribution)])


def _equal_residues(absent: Counts, present: Counts, bits: int) -> float:
    """The smallest p-value over both kinds of residues and all moduli, times their number."""
    p_values = []
    for worlds in zip(absent, present, strict=True):
        for b in range(1, bits + 1):
            table = np.stack([counts.reshape(-1, 2**b).sum(0) for counts in worlds])
            table = table[:, table.sum(0) > 0]
            p_values.append(float(stats.chi2_contingency(table).pvalue) if table.shape[1] > 1 else 1.0)
    return min(1.0, min(p_values) * len(p_values))


def _scores(absent: Counts, present: Counts) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The log-likelihood ratio of the second half of the releases, with frequencies from the first."""
    halves = len(absent) // 2, len(present) // 2
    learnt = [np.log(world[:half].sum(0) + 1.0) for world, half in zip((absent, present), halves, strict=True)]
    totals = [np.log(np.exp(log).sum(axis=1, keepdims=True)) for log in learnt]
    weights = (learnt[1] - totals[1]) - (learnt[0] - totals[0])
    return (absent[halves[0] :] * weights).sum((1, 2)), (present[halves[1] :] * weights).sum((1, 2))
