"""The grid: no norm grows, truncation goes towards zero, clips hold exactly, and what cannot be represented is refused."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedveil.errors import ConfigError, UpdateRefused
from fedveil.mechanism import grid
from fedveil.mechanism.grid import exponent_for, from_grid, to_grid
from fedveil.mechanism.sampler import MAX_STD

float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
lengths = st.integers(min_value=0, max_value=5)


def power(integers: NDArray[np.int64], exponent: int) -> Fraction:
    """The exact sum of squares of m 2^k."""
    return sum(m * m for m in integers.tolist()) * Fraction(4) ** exponent


def laid_out(sizes: list[int], exponents: list[int]) -> list[tuple[slice, int]]:
    ends = np.cumsum([0, *sizes]).tolist()
    return [(slice(a, b), k) for a, b, k in zip(ends[:-1], ends[1:], exponents, strict=True)]


# --- the step ---


@given(st.floats(min_value=1e-40, max_value=1e40), st.integers(min_value=0, max_value=32))
def test_std_in_grid_steps(std: float, bits: int) -> None:
    steps = Fraction(std) / Fraction(2) ** exponent_for(std, bits)
    assert 2**bits <= steps < 2 ** (bits + 1) <= MAX_STD


@pytest.mark.parametrize(("std", "exponent"), [(1.0, -24), (math.nextafter(1.0, 0), -25), (2.0, -23), (1.86, -24), (100.0, -18)])
def test_exponents(std: float, exponent: int) -> None:
    assert exponent_for(std) == exponent


@pytest.mark.parametrize("std", [0.0, -1.0, math.nan, math.inf, 1e-60, 1e80])
def test_no_grid_for_such_a_std(std: float) -> None:
    with pytest.raises(ConfigError):
        exponent_for(std)


@pytest.mark.parametrize("bits", [-1, 33])
def test_no_such_bits(bits: int) -> None:
    with pytest.raises(ConfigError, match="between 0 and 32"):
        exponent_for(1.0, bits)


# --- clipping, exactly ---


@given(st.data(), st.lists(st.tuples(lengths, st.integers(min_value=-40, max_value=-10)), min_size=1, max_size=4))
def test_norms_are_within_the_clips(data: st.DataObject, shapes: list[tuple[int, int]]) -> None:
    sizes, exponents = [list(column) for column in zip(*shapes, strict=True)]
    groups = laid_out(sizes, exponents)
    vector = torch.tensor(data.draw(st.lists(float32, min_size=sum(sizes), max_size=sum(sizes))), dtype=torch.float32)
    bound = st.floats(min_value=1e-3, max_value=1e3)
    clip = data.draw(bound)
    group_clips = data.draw(st.none() | st.lists(bound | st.just(math.inf), min_size=len(sizes), max_size=len(sizes)))
    m = to_grid(vector, groups, clip, group_clips)
    assert m.dtype == np.int64
    powers = [power(m[part], k) for part, k in groups]
    assert sum(powers) <= Fraction(clip) ** 2
    for total, limit in zip(powers, group_clips or [], strict=group_clips is not None):
        assert math.isinf(limit) or total <= Fraction(limit) ** 2
    for part, k in groups:
        for value, x in zip(m[part].tolist(), vector[part].tolist(), strict=True):
            assert abs(value) * Fraction(2) ** k <= abs(Fraction(x))
            assert value * x >= 0


@given(st.lists(st.floats(min_value=-1000, max_value=1000, width=32), max_size=8), st.integers(min_value=-30, max_value=9))
def test_truncation_towards_zero(values: list[float], exponent: int) -> None:
    m = to_grid(torch.tensor(values, dtype=torch.float32), [(slice(0, len(values)), exponent)], math.inf)
    assert m.tolist() == [math.trunc(Fraction(x) / Fraction(2) ** exponent) for x in values]


@given(st.lists(float32, min_size=1, max_size=20))
def test_a_clipped_vector_has_nearly_the_norm_of_the_clip(values: list[float]) -> None:
    """What is lost is at most one grid step a coordinate."""
    vector = torch.tensor(values, dtype=torch.float32)
    k = -40
    kept = math.sqrt(power(to_grid(vector, [(slice(0, len(values)), k)], 1.0), k))
    wanted = min(1.0, float(torch.linalg.vector_norm(vector, dtype=torch.float64)))
    assert wanted * (1 - 1e-9) - math.sqrt(len(values)) * 2.0**k <= kept <= wanted


@pytest.mark.parametrize("n", [1, 7, 61_706, 300_001])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e30])
def test_honest_vectors_pass(n: int, scale: float) -> None:
    """Also those whose norm is the clip, to the last bit."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).mul_(scale)
    norm = float(torch.linalg.vector_norm(x, dtype=torch.float64))
    for clip in (norm, math.nextafter(norm, 0), math.nextafter(norm, math.inf), norm / 2, norm * 2):
        k = exponent_for(clip)
        m = to_grid(x, [(slice(0, n), k)], clip)
        assert power(m, k) <= Fraction(clip) ** 2


def test_group_clip_and_whole_clip() -> None:
    m = to_grid(torch.tensor([3.0, 4.0, 0.6, 12.0]), laid_out([2, 1, 1], [-10, -20, -30]), 2.0, [1.0, math.inf, 3.0])
    back = from_grid(m, laid_out([2, 1, 1], [-10, -20, -30]))
    factor = 2 / math.sqrt(1 + 0.36 + 9)
    assert back.tolist() == pytest.approx([0.6 * factor, 0.8 * factor, 0.6 * factor, 3.0 * factor], abs=2**-10)


def test_the_vector_is_left_as_it_is() -> None:
    x = torch.full((10,), 5.0)
    to_grid(x, [(slice(0, 10), -20)], 1.0)
    assert x.tolist() == [5.0] * 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("clip", "group_clips"), [(1.0, None), (math.inf, None), (1.0, [1.0, 1.0]), (math.inf, [math.inf, 1.0])])
def test_what_is_not_finite_is_refused(value: float, clip: float, group_clips: list[float] | None) -> None:
    x = torch.tensor([0.1, 0.2, value, 0.3])
    with pytest.raises(UpdateRefused, match="NaN or infinite"):
        to_grid(x, laid_out([2, 2], [-20, -24]), clip, group_clips)


def test_tiny_and_huge_values() -> None:
    x = torch.tensor([1e-45, -1e-40, 3.4e38, -3.4e38])
    m = to_grid(x, [(slice(0, 4), -24)], 1.0)
    assert m[:2].tolist() == [0, 0]
    assert m[2:].tolist() == [math.trunc(2**23.5), -math.trunc(2**23.5)]
    assert to_grid(x[:2], [(slice(0, 2), -149)], math.inf).tolist() == [1, -71362]
    assert to_grid(torch.full((200_000,), 3.4e38), [(slice(0, 200_000), -24)], 1e3).max() == math.trunc(
        2**24 * 1e3 / 200_000**0.5
    )


def test_a_norm_that_cannot_be_proven_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_factor", lambda norm, bound, slack: min(1.0, bound / norm))
    with pytest.raises(UpdateRefused, match="provably"):
        to_grid(torch.tensor([2.0]), [(slice(0, 1), -24)], 1.0)


def test_a_wrong_factor_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_factor", lambda norm, bound, slack: 1.0)
    for clip, group_clips in ((1.0, None), (math.inf, [1.0, 9.0])):
        with pytest.raises(UpdateRefused, match="provably"):
            to_grid(torch.tensor([2.0, 0.1]), laid_out([1, 1], [-24, -23]), clip, group_clips)
    monkeypatch.setattr(grid, "_factor", lambda norm, bound, slack: math.nan)
    with pytest.raises(UpdateRefused):
        to_grid(torch.tensor([2.0, 0.1]), laid_out([1, 1], [-24, -23]), 1.0)


@pytest.mark.parametrize("clip", [math.inf, 1e30])
def test_values_that_do_not_fit(clip: float) -> None:
    groups = [(slice(0, 2), -24)]
    with pytest.raises((UpdateRefused, ConfigError), match="coarser grid"):
        to_grid(torch.tensor([1e38, 0.0]), groups, clip)
    with pytest.raises((UpdateRefused, ConfigError), match="coarser grid"):
        to_grid(torch.tensor([2.0**29, 0.0]), groups, clip)
    assert to_grid(torch.tensor([2.0**29 - 32, 0.0]), groups, math.inf).tolist() == [2**53 - 2**29, 0]


def test_many_large_values_fit() -> None:
    m = to_grid(torch.full((1000,), 2.0**28), [(slice(0, 1000), -24)], math.inf)
    assert set(m.tolist()) == {2**52}


@pytest.mark.parametrize(
    ("groups", "clip", "group_clips"),
    [
        ([(slice(0, 2), -24)], 1.0, None),
        ([(slice(0, 2), -24), (slice(1, 3), -24)], 1.0, None),
        ([(slice(0, 4), -24)], 1.0, None),
        ([], 1.0, None),
        ([(slice(0, 3), -201)], 1.0, None),
        ([(slice(0, 3), -24)], 0.0, None),
        ([(slice(0, 3), -24)], math.nan, None),
        ([(slice(0, 3), -24)], 1.0, [1.0, 1.0]),
        ([(slice(0, 3), -24)], 1.0, [-1.0]),
        ([(slice(0, 3), -24)], 1.0, [math.nan]),
    ],
)
def test_impossible_arguments(groups: list[tuple[slice, int]], clip: float, group_clips: list[float] | None) -> None:
    with pytest.raises(ConfigError):
        to_grid(torch.zeros(3), groups, clip, group_clips)


# --- equal results on every path, and back ---


def test_many_groups_of_one_exponent_are_one() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    split = laid_out([1000] * 10, [-24] * 10)
    assert np.array_equal(to_grid(x, split, 3.0), to_grid(x, [(slice(0, 10_000), -24)], 3.0))


def test_threads_do_not_matter() -> None:
    x = torch.randn(500_000, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    drawn = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        drawn.append(to_grid(x, [(slice(0, 500_000), -24)], 3.0))
    torch.set_num_threads(before)
    assert np.array_equal(*drawn)


@given(st.lists(st.integers(min_value=-(2**24), max_value=2**24), max_size=6), st.integers(min_value=-60, max_value=60))
def test_from_grid(integers: list[int], exponent: int) -> None:
    m = np.array(integers, dtype=np.int64)
    assert from_grid(m, [(slice(0, len(m)), exponent)]).tolist() == [i * 2.0**exponent for i in integers]


def test_from_grid_and_back() -> None:
    groups = laid_out([3, 0, 4], [-10, 5, -24])
    m = np.array([1, -2, 3, 4, -5, 6, -(2**20)])
    assert to_grid(from_grid(m, groups), groups, math.inf).tolist() == m.tolist()


def test_empty() -> None:
    assert to_grid(torch.zeros(0), [], 1.0).shape == (0,)
    assert from_grid(np.zeros(0, dtype=np.int64), []).shape == (0,)
