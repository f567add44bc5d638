"""Tests over seeds: against scipy, against hand values, and at the edges."""

from __future__ import annotations

import math
from statistics import stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedveil.studies.statistics import (
    against_best,
    holm,
    interval,
    paired_t,
    ranks,
    seeds_needed,
    signed_rank,
    smallest_rank_sum,
    smallest_signed_rank,
)

DRAWS = [np.random.default_rng(seed).normal(0.3, 1, n).tolist() for seed in range(8) for n in (2, 3, 5, 9)]


@pytest.mark.parametrize("differences", DRAWS)
def test_paired_t_is_scipys(differences: list[float]) -> None:
    theirs = stats.ttest_rel(differences, [0.0] * len(differences)).pvalue
    assert paired_t(differences) == pytest.approx(float(theirs), rel=1e-9)


def test_paired_t_by_hand() -> None:
    # mean 2, sd 1, n = 3: t = 2 sqrt 3 with 2 degrees of freedom, whose distribution is closed: p = 1 - t / sqrt(t^2 + 2)
    t = 2 * math.sqrt(3)
    assert paired_t([1.0, 2.0, 3.0]) == pytest.approx(1 - t / math.sqrt(t**2 + 2), rel=1e-12)
    assert paired_t([0.0, 0.0]) == 1.0
    assert paired_t([0.5, 0.5, 0.5]) == 0.0


@pytest.mark.parametrize("differences", DRAWS)
def test_signed_rank_is_scipys_exact_one(differences: list[float]) -> None:
    theirs = stats.wilcoxon(differences, method="exact").pvalue
    assert signed_rank(differences) == pytest.approx(float(theirs), rel=1e-12)


@given(st.lists(st.integers(-4, 4), min_size=1, max_size=9))
def test_signed_rank_with_ties_and_zeros_counts_every_sign(differences: list[int]) -> None:
    kept = [d for d in differences if d]
    sizes = stats.rankdata([abs(d) for d in kept]) if kept else np.empty(0)
    signs = np.array(np.meshgrid(*[[0, 1]] * len(kept))).reshape(len(kept), -1) if kept else np.zeros((0, 1))
    sums, observed = sizes @ signs, sum(r for r, d in zip(sizes, kept, strict=True) if d > 0)
    tail = min((sums <= observed + 1e-9).mean(), (sums >= observed - 1e-9).mean())
    assert signed_rank([float(d) for d in differences]) == pytest.approx(min(1.0, 2 * float(tail)), rel=1e-12)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 8])
def test_the_smallest_p_is_that_of_the_most_extreme_sample(n: int) -> None:
    extreme = [float(i + 1) for i in range(n)]
    assert smallest_signed_rank(n) == pytest.approx(signed_rank(extreme), rel=1e-12)
    above, below = extreme, [-x for x in extreme]
    assert smallest_rank_sum(n) == pytest.approx(float(stats.mannwhitneyu(above, below, method="exact").pvalue), rel=1e-12)


def test_three_seeds_cannot_reach_the_level_and_six_can() -> None:
    assert smallest_signed_rank(3) == 0.25
    assert smallest_rank_sum(3) == pytest.approx(0.1)
    assert (seeds_needed(1), seeds_needed(2), seeds_needed(4)) == (6, 7, 8)


def test_holm_by_hand() -> None:
    # ordered 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, made monotone
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


def test_interval_is_students() -> None:
    values = [0.5, 0.7, 0.6, 0.9]
    low, high = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stdev(values) / 2)
    assert interval(values) == pytest.approx(float(high - low) / 2, rel=1e-9)
    assert math.isnan(interval([0.5]))


def test_ranks_share_the_better_place() -> None:
    assert ranks({"a": 0.5, "b": 0.9, "c": 0.5, "d": 0.1}) == {"a": 2, "b": 1, "c": 2, "d": 4}


def test_against_the_best_pairs_by_seed() -> None:
    samples = {
        "low": {1: 0.50, 2: 0.62, 3: 0.55},
        "best": {3: 0.75, 2: 0.80, 1: 0.70, 4: 0.90},
        "one": {1: 0.6},
        "near": {1: 0.71, 2: 0.70, 4: 0.60},
    }
    found = against_best(samples)
    assert set(found) == {"low", "near"}  # the best itself, and what shares one seed with it, have no test
    assert {f.best for f in found.values()} == {"best"}
    theirs = float(stats.ttest_rel([0.50, 0.62, 0.55], [0.70, 0.80, 0.75]).pvalue)
    assert found["low"].t == pytest.approx(theirs, rel=1e-9)
    assert found["low"].holm == pytest.approx(2 * theirs, rel=1e-9)  # the smaller of two
    assert found["near"].holm == pytest.approx(max(found["near"].t, 2 * theirs), rel=1e-9)
    assert (found["low"].n, found["low"].difference) == (3, pytest.approx(-58 / 300))
    assert found["low"].wilcoxon == 0.25
    assert against_best({}) == {}
