"""Integers with the exact law of a rounded Gaussian: the law, the hard coordinates, and independence of the arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mpmath
import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from fedveil.errors import ConfigError
from fedveil.mechanism import sampler
from fedveil.mechanism.sampler import fixed_sample, poisson_sample, rounded_normal

KEY = bytes(range(32))
DRAWS = 20_000_000
STDS = [0.3, 1.0, 8.0, 13.7, 64.0]
LIMITS = [edge + d for edge in (2**46, 2**48, 2**64 - 2**48, 2**64 - 2**46) for d in (-1, 0, 1)]
EDGES = [0, 1, 2, 3, 2**16, *LIMITS, 2**63, 2**64 - 2**10, 2**64 - 1]
EIGHTHS = [i * 2**61 + d for i in range(8) for d in (-(2**11), -1, 0, 1, 2**11) if 0 <= i * 2**61 + d < 2**64]

Integers = NDArray[np.int64]


# --- the law ---


@pytest.fixture(scope="module", params=STDS)
def histogram(request: pytest.FixtureRequest) -> tuple[float, Integers, Integers]:
    """(std, values, counts) of 2e7 draws."""
    drawn = rounded_normal(request.param, DRAWS, KEY)
    lowest = int(drawn.min())
    counts = np.bincount(drawn - lowest)
    return request.param, np.arange(lowest, lowest + len(counts)), counts


def chi_square(std: float, values: Integers, counts: Integers) -> float:
    """p-value against the rounded normal, cells of fewer than 10 expected draws pooled into two tails."""
    n = counts.sum()
    ends = np.floor(std * stats.norm.isf(10 / n)).astype(int)
    inner = np.arange(-ends, ends + 1)
    borders = np.concatenate([inner - 0.5, [ends + 0.5]]) / std
    upper = stats.norm.sf(borders)
    probabilities = np.concatenate([[stats.norm.cdf(borders[0])], upper[:-1] - upper[1:], [upper[-1]]])
    cells = np.bincount(np.clip(values, -ends - 1, ends + 1) + ends + 1, weights=counts, minlength=len(probabilities))
    return float(stats.chisquare(cells, n * probabilities).pvalue)


def power_test(std: float, values: Integers, counts: Integers) -> float:
    """p-value of the mean square, the most sensitive statistic for the std."""
    k = np.arange(int(12 * std) + 3)
    weights = 2 * (stats.norm.sf((k - 0.5) / std) - stats.norm.sf((k + 0.5) / std))
    second, fourth = float((weights * k**2).sum()), float((weights * k.astype(float) ** 4).sum())
    n = counts.sum()
    z = (float((counts * values.astype(float) ** 2).sum()) / n - second) / np.sqrt((fourth - second**2) / n)
    return float(2 * stats.norm.sf(abs(z)))


@pytest.mark.few(2)
@pytest.mark.heavy
def test_law(histogram: tuple[float, Integers, Integers]) -> None:
    std, values, counts = histogram
    assert chi_square(std, values, counts) > 1e-3
    assert power_test(std, values, counts) > 1e-3


@pytest.mark.few(4)
@pytest.mark.parametrize("off", [0.999, 1.001])
@pytest.mark.heavy
def test_law_tells_a_std_off_by_a_thousandth(histogram: tuple[float, Integers, Integers], off: float) -> None:
    std, values, counts = histogram
    assert power_test(std * off, values, counts) < 1e-4


@pytest.mark.heavy
def test_tails(histogram: tuple[float, Integers, Integers]) -> None:
    std, values, counts = histogram
    for sigmas in (3.0, 4.0, 4.8):
        beyond = int(np.ceil(sigmas * std))
        for side in (values >= beyond, values <= -beyond):
            expected = float(DRAWS * stats.norm.sf((beyond - 0.5) / std))
            assert stats.poisson.cdf(counts[side].sum(), expected) > 1e-5
            assert stats.poisson.sf(counts[side].sum() - 1, expected) > 1e-5


def residues(integers: Integers, modulus: int) -> float:
    return float(stats.chisquare(np.bincount(integers % modulus, minlength=modulus)).pvalue)


@pytest.mark.parametrize("std", [2.0**24, 1.9 * 2**24, 2.0**33])
def test_low_bits_are_uniform(std: float) -> None:
    drawn = rounded_normal(std, 200_000, KEY)
    assert all(residues(drawn, 2**bits) > 1e-4 for bits in range(1, 9))


@pytest.mark.parametrize("std", [2.0**24, 1.9 * 2**24])
def test_float32_noise_fails_the_same_test(std: float) -> None:
    naive = (np.random.default_rng(0).standard_normal(200_000).astype(np.float32) * np.float32(std)).astype(np.int64)
    assert residues(naive, 2) < 1e-20


def test_neighbours_are_independent() -> None:
    drawn = rounded_normal(100.0, 1_000_000, KEY).astype(float)
    for f in (np.abs, np.sign, np.square):
        assert abs(np.corrcoef(f(drawn[0::2]), f(drawn[1::2]))[0, 1]) < 6 / 500_000**0.5
        assert abs(np.corrcoef(f(drawn[1:-1:2]), f(drawn[2::2]))[0, 1]) < 6 / 500_000**0.5


# --- hard coordinates, against an arithmetic of 400 bits ---


def words_at_borders(std: float, offsets: list[int], per_offset: int) -> NDArray[np.uint64]:
    """Pairs of words whose cosine coordinate is `offset` steps of c away from a border between two integers."""
    rng = np.random.default_rng(7)
    found = []
    with mpmath.workprec(400):
        for offset in offsets:
            wanted = len(found) + per_offset
            while len(found) < wanted:
                b = int(2 ** rng.uniform(49, 63.9))
                reach = std * mpmath.sqrt(-2 * mpmath.log(mpmath.ldexp(b, -64)))
                k = int(mpmath.floor(reach * float(rng.uniform(-0.99, 0.99))))
                if abs(k + 0.5) > 0.99 * reach:
                    continue
                c = int(mpmath.floor(mpmath.acos((k + mpmath.mpf(0.5)) / reach) / (2 * mpmath.pi) * 2**64))
                c = (-c if rng.random() < 0.5 else c) + offset
                found.append((b, c % 2**64))
    return np.array(found, dtype=np.uint64)


def ideal(words: NDArray[np.uint64], std: float) -> list[int]:
    """The correct rounding of each coordinate from 64 + 320 bits of U and V, without any of the sampler's arithmetic."""
    integers = []
    with mpmath.workprec(400):
        for pair, (b, c) in enumerate(words.tolist()):
            more_u, more_v = sampler._more_bits(KEY, pair, 320)
            radius = mpmath.sqrt(-2 * mpmath.log(mpmath.ldexp((b << 320) + more_u, -384)))
            angle = 2 * mpmath.pi * mpmath.ldexp((c << 320) + more_v, -384)
            integers += [int(mpmath.nint(std * radius * f(angle))) for f in (mpmath.cos, mpmath.sin)]
    return integers


def drawn_from(words: NDArray[np.uint64], std: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(sampler, "_words", lambda key, first, pairs: words[first : first + pairs])
    return rounded_normal(std, 2 * len(words), KEY).tolist()


@pytest.mark.parametrize("std", [0.3, 1.0, 13.7, 2.0**12, 2.0**24, 1.9 * 2**24, 2.0**33])
def test_borders(std: float, monkeypatch: pytest.MonkeyPatch) -> None:
    words = words_at_borders(std, [-(2**22), -(2**18), -1024, -1, 0, 1, 1024, 2**18, 2**22], 30)
    assert drawn_from(words, std, monkeypatch) == ideal(words, std)


@pytest.mark.parametrize("std", [0.3, 13.7, 2.0**24, 2.0**33])
def test_extreme_words(std: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """All radii up to 9.4, and beyond it where the first 64 bits are zero; all angles at which a value changes sign."""
    words = np.array(list(itertools.product(EDGES, EIGHTHS)), dtype=np.uint64)
    drawn = drawn_from(words, std, monkeypatch)
    assert drawn == ideal(words, std)
    assert max(drawn) > 9 * std


def test_words_become_the_nearest_floats() -> None:
    hard = [*EDGES, *EIGHTHS, 2**53 + 1, 2**63 + 2**10, 2**63 + 2**10 + 1, 2**63 + 3 * 2**10, (2**32 - 1) << 32, 2**32 - 1]
    many = np.random.default_rng(7).integers(0, 2**64, 100_000, dtype=np.uint64)
    words = np.concatenate([np.array(hard, dtype=np.uint64), many]).repeat(2).reshape(-1, 2)
    assert sampler._uniform(words[:, 0]).tolist() == [float(b) * 2.0**-64 for b in words[:, 0].tolist()]


# --- Assumption A, and independence of the arithmetic ---


def errors_of_libraries() -> tuple[float, float]:
    """Worst relative error of log, worst absolute error of cos and sin, over fixed words."""
    rng = np.random.default_rng(3)
    many = rng.integers(0, 2**64, 2000, dtype=np.uint64)
    b = np.concatenate([np.array(EDGES[1:], dtype=np.uint64), many, many >> np.uint64(12), ~(many >> np.uint64(12))])
    c = np.concatenate([np.array(EIGHTHS, dtype=np.uint64), many, many >> np.uint64(20)])
    x = b.astype(np.float64) * 2.0**-64
    angle = c.view(np.int64).astype(np.float64) * (np.pi * 2.0**-63)
    log, (cos, sin) = sampler._log(x), sampler._cos_sin(angle)
    with mpmath.workprec(200):
        logs = [abs(y / mpmath.log(v) - 1) for v, y in zip(x.tolist(), log.tolist(), strict=True) if v < 1]
        turns = [
            max(abs(y - mpmath.cos(a)), abs(z - mpmath.sin(a)))
            for a, y, z in zip(angle.tolist(), cos.tolist(), sin.tolist(), strict=True)
        ]
    return float(max(logs)), float(max(turns))


def test_assumption_a() -> None:
    assert max(errors_of_libraries()) <= 2.0**-47


@pytest.fixture
def with_error(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes log, cos and sin wrong by the given error, up and down."""
    log, cos_sin = np.log, sampler._cos_sin

    def inject(size: float) -> None:
        signs = np.resize([1.0, 1.0, -1.0, -1.0, 1.0], sampler._PAIRS)

        def wrong_log(x: NDArray[np.float64]) -> NDArray[np.float64]:
            return log(x) * (1 + size * signs[: len(x)])

        def wrong_cos_sin(angle: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            cos, sin = cos_sin(angle)
            return cos + size * np.sign(cos) * signs[: len(cos)], sin - size * signs[: len(sin)]

        monkeypatch.setattr(sampler, "_log", wrong_log)
        monkeypatch.setattr(sampler, "_cos_sin", wrong_cos_sin)

    return inject


def test_assumption_a_sees_a_larger_error(with_error: Callable[[float], None]) -> None:
    with_error(2.0**-46)
    assert max(errors_of_libraries()) > 2.0**-47


@pytest.mark.few(2)
@pytest.mark.parametrize("std", [13.7, 2.0**24, 1.9 * 2**24, 2.0**33])
@pytest.mark.heavy
def test_errors_within_a_change_nothing(std: float, with_error: Callable[[float], None], monkeypatch: pytest.MonkeyPatch) -> None:
    many = rounded_normal(std, 200_000, KEY)
    with_error(2.0**-47)
    assert np.array_equal(rounded_normal(std, 200_000, KEY), many)
    near = [sign * 2**e for sign in (-1, 1) for e in range(12, 24)]
    words = words_at_borders(std, near, 40)
    right = ideal(words, std)
    assert drawn_from(words, std, monkeypatch) == right
    monkeypatch.setattr(sampler, "_MARGIN", 2.0**-47)
    assert drawn_from(words, std, monkeypatch) != right, "these words would show a margin that is too small"


def test_errors_beyond_a_show(with_error: Callable[[float], None]) -> None:
    before = rounded_normal(2.0**24, 400_000, KEY)
    with_error(2.0**-38)
    assert not np.array_equal(rounded_normal(2.0**24, 400_000, KEY), before)


def test_numpy_and_torch_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    before = rounded_normal(1.3 * 2**30, 300_001, KEY)
    monkeypatch.setattr(sampler, "_cos_sin", lambda angle: (np.cos(angle), np.sin(angle)))
    assert np.array_equal(rounded_normal(1.3 * 2**30, 300_001, KEY), before)
    extended = np.longdouble
    monkeypatch.setattr(sampler, "_log", lambda x: np.log(x.astype(extended)).astype(np.float64))
    assert np.array_equal(rounded_normal(1.3 * 2**30, 300_001, KEY), before)


# --- the interface ---


@pytest.mark.parametrize("n", [0, 1, 2, 3, 1000, 65_536, 65_537])
def test_a_shorter_draw_is_a_prefix(n: int) -> None:
    assert np.array_equal(rounded_normal(2.0**24, n, KEY), rounded_normal(2.0**24, 150_000, KEY)[:n])


def test_neither_blocks_nor_threads_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    std = np.random.default_rng(0).choice([0.0, 0.3, 5.0, 2.0**24, 2.0**33], 150_001)
    before = rounded_normal(std, len(std), KEY, threads=1)
    assert np.array_equal(rounded_normal(std, len(std), KEY, threads=3), before)
    monkeypatch.setattr(sampler, "_PAIRS", 1000)
    assert np.array_equal(rounded_normal(std, len(std), KEY, threads=2), before)
    assert not before[std == 0].any()
    for s in (0.3, 5.0, 2.0**24, 2.0**33):
        assert np.array_equal(rounded_normal(s, len(std), KEY)[std == s], before[std == s])


def test_each_key_is_another_draw() -> None:
    other = rounded_normal(2.0**24, 1000, bytes(32))
    assert not (rounded_normal(2.0**24, 1000, KEY) == other).any()


def test_zero_std_is_no_noise() -> None:
    assert not rounded_normal(0.0, 100_000, KEY).any()


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf"), 2.0**33 + 1, np.array([1.0, np.nan]), np.array([1.0, -1.0])])
def test_refused_stds(std: float | NDArray[np.float64]) -> None:
    with pytest.raises(ConfigError, match="between 0 and 2"):
        rounded_normal(std, 2, KEY)


def test_refused_shapes_and_keys() -> None:
    with pytest.raises(ConfigError, match="one per coordinate"):
        rounded_normal(np.ones(3), 2, KEY)
    with pytest.raises(ConfigError, match="32 bytes"):
        rounded_normal(1.0, 2, KEY[:16])
    with pytest.raises(ConfigError, match=">= 0"):
        rounded_normal(1.0, -1, KEY)


@pytest.mark.few(2)
@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 1 - 1e-3])
def test_each_coin_of_a_poisson_sample_falls_with_its_rate(rate: float) -> None:
    n, draws = 5000, 400
    samples = [poisson_sample(rate, n, bytes([t % 256, t // 256] * 16)) for t in range(draws)]
    counts = np.bincount(np.concatenate(samples), minlength=n)
    total = int(counts.sum())
    assert stats.binomtest(total, n * draws, rate).pvalue > 1e-4
    spread = ((counts - draws * rate) ** 2).sum() / (draws * rate * (1 - rate))
    assert 1e-4 < stats.chi2.cdf(spread, n) < 1 - 1e-4
    together = sum(len(np.intersect1d(one, other)) for one, other in itertools.pairwise(samples))
    assert stats.binomtest(together, n * (draws - 1), rate * rate).pvalue > 1e-4


def test_a_coin_is_one_word_below_the_rate_exactly() -> None:
    key = bytes(range(32))
    words = sampler._stream(key, 1000)
    assert words.tolist() == sampler._words(key, 0, 500).reshape(-1).tolist()
    for word in np.sort(words)[[1, 500, 998]].tolist():
        rate = float(word >> 11) * 2.0**-53  # the float next below the word, and the next above
        for exact in (rate, rate + 2.0**-53):
            expected = [i for i, w in enumerate(words.tolist()) if w < int(exact * 2**64)]
            assert poisson_sample(exact, 1000, key).tolist() == expected
    assert poisson_sample(2.0**-70, 10**6, key).tolist() == []
    assert poisson_sample(0.0, 1000, key).tolist() == []
    assert poisson_sample(1.0, 1000, key).tolist() == list(range(1000))
    assert poisson_sample(0.3, 70_001, key).tolist() == [i for i in poisson_sample(0.3, 10**6, key).tolist() if i < 70_001]
    for rate in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="rate of a Poisson sample"):
            poisson_sample(rate, 10, key)


@pytest.mark.parametrize(("size", "n"), [(0, 5), (5, 5), (1, 4), (2, 5), (3, 6)])
def test_every_sample_of_a_fixed_size_is_as_likely(size: int, n: int) -> None:
    draws = [tuple(fixed_sample(size, n, t.to_bytes(32, "big")).tolist()) for t in range(4000)]
    sets = list(itertools.combinations(range(n), size))
    assert set(draws) == set(sets)
    assert len(sets) == 1 or stats.chisquare([draws.count(one) for one in sets]).pvalue > 1e-4
    with pytest.raises(ConfigError, match="fixed size"):
        fixed_sample(n + 1, n, bytes(32))
