"""Every reference value of oracles2.json, to the digits that it has; an id without a call here is a failure."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from fedveil.accounting import correlated_noise as factorisation
from fedveil.accounting import finite_precision as floats
from fedveil.accounting import finite_precision as shares
from fedveil.accounting import fixed_size, gaussian, pld, secret_samples, selection, subsampled
from fedveil.accounting._numbers import crossing
from fedveil.accounting.accountant import least_noise
from fedveil.accounting.types import (
    Adjacency,
    FixedSampleGaussian,
    SampledGaussian,
    SecretSample,
    SeenCountGaussian,
    UserRecordsGaussian,
)
from reference_costs import epsilon_pld, named_participants_delta, prefix_sum_error, tree_sensitivity_squared

ROWS = {row["id"]: row for row in json.loads((Path(__file__).parent / "oracles2.json").read_text())}
ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
COEFFICIENTS = factorisation.square_root_coefficients(64)
STEP = 2e-4


def renyi(event: SecretSample, order: float, adjacency: Adjacency = ZERO) -> float:
    return float(secret_samples.rdp(event, np.array([order]), adjacency)[0])


@lru_cache(maxsize=16)
def seen(clients: int, rate: float, z: float, rounds: int, delta: float) -> tuple[float, ...]:
    pairs = fixed_size.pairs_of(SeenCountGaussian(clients, rate, z, rounds))
    return tuple(pld.epsilon(total, delta) for total in pld.composed([pairs], 1e-5 * delta, ZERO, STEP))


def hidden(rate: float, z: float, rounds: int, delta: float) -> float:
    return max(pld.epsilon(total, delta) for total in pld.composed([pld.Sampled(rate, z, rounds)], 1e-5 * delta, ZERO, STEP))


def add_or_remove() -> float:
    """Bin(9, .1) of others and the client, who comes or does not, each visible count a pair of its own."""
    weight = [math.comb(9, k) * 0.1**k * 0.9 ** (9 - k) for k in range(10)] + [0.0]
    total = 0.1 * weight[9]  # all ten: impossible without the client
    for k in range(10):
        stay, join = 0.9 * weight[k], 0.1 * weight[k - 1] if k else 0.0
        if k == 0:
            continue  # P is below Q everywhere
        rate = join / (stay + join)
        epsilon = 1 - math.log((stay + join) / weight[k])
        total += (stay + join) * _sampled_delta(rate, 0.5, epsilon)
    return total


def _sampled_delta(rate: float, z: float, epsilon: float) -> float:
    if epsilon >= 0:
        return subsampled.one_step_delta(rate, z, epsilon)[0]
    return 1 - math.exp(epsilon) + math.exp(epsilon) * subsampled.one_step_delta(rate, z, -epsilon)[1]


def selected(tries: float, z: float, order: int, other: int, eta: float = 0.0) -> float:
    law = selection.tries_of_mean(eta, tries)
    a, b = (60 * subsampled.rdp(0.1, z, [float(x)], adjacency=ZERO) for x in (order, other))
    values = np.array([a[0], b[0]])
    extra = (1 + eta) * ((1 - 1 / other) * b[0] - math.log(law.gamma) / other)
    total = a[0] + extra + math.log(law.mean) / (order - 1)
    assert selection.selection_rdp(law, np.array([order, other], dtype=float), values)[0] <= total * (1 + 1e-12)
    return total + math.log1p(-1 / order) - (math.log(1e-5) + math.log(order)) / (order - 1)


def needed(tries: float, epsilon: float, eta: float = 0.0) -> float:
    """By Renyi divergences, as the page has it; by privacy profiles less is needed."""
    law = selection.tries_of_mean(eta, tries)

    def cost(z: float) -> float:
        return selection.selection_epsilon(law, selection.curve_of([SampledGaussian(0.1, z, 60)], ZERO), 1e-5)

    found = least_noise(cost, epsilon, 1e-5, 1e-6)
    assert selection.selection_bound(law, [SampledGaussian(0.1, found / 1.1, 60)], 1e-5, ZERO)[0] < epsilon
    return found


def toy(eta: float) -> float:
    """Exact Renyi divergence of order 2 of the best of K scores, N(1, 1) against N(0, 1), E[K] = 10."""
    law, x = selection.tries_of_mean(eta, 10), np.linspace(-12, 14, 200_001)
    c = 1 - law.gamma

    def density(mu: float) -> np.ndarray:
        below = 0.5 * np.vectorize(math.erfc)((mu - x) / math.sqrt(2))
        slope = c / (1 - c * below) / -math.log(law.gamma) if eta == 0 else c * eta * (1 - c * below) ** (-eta - 1)
        slope = slope if eta == 0 else slope / (law.gamma**-eta - 1)
        return slope * np.exp(-((x - mu) ** 2) / 2) / math.sqrt(2 * math.pi)

    first, second = density(1), density(0)
    return math.log(max((first**2 / second).sum(), (second**2 / first).sum()) * (x[1] - x[0]))


def toy_bound(eta: float, mu: float, order: float) -> float:
    law = selection.tries_of_mean(eta, 10)
    other = max(1.0, math.sqrt(-2 * math.log(law.gamma)) / mu)
    orders = np.array([order, other])
    return float(selection.selection_rdp(law, orders, orders * mu**2 / 2)[0])


def true_order_two(band: int, rounds: list[int], rate: float) -> float:
    """Renyi divergence of order 2 of 9 rounds of correlated noise of std 2; a client joins each of `rounds` at `rate`."""
    matrix = sum(np.diag(np.full(9 - j, COEFFICIENTS[j]), -j) for j in range(band))
    patterns = np.array(list(itertools.product((0, 1), repeat=len(rounds))))
    weights = np.prod(np.where(patterns == 1, rate, 1 - rate), axis=1)
    means = patterns @ matrix[:, rounds].T / 2
    return math.log(weights @ np.exp(means @ means.T) @ weights)


def banded(rounds: int, separation: int, participations: int, band: int) -> float:
    return factorisation.banded_sensitivity(COEFFICIENTS[:band], rounds, separation, participations)


def full(rounds: int, separation: int, participations: int) -> float:
    return factorisation.toeplitz_sensitivity(COEFFICIENTS[:rounds], rounds, separation, participations)


def user(records: int) -> float:
    return epsilon_pld(UserRecordsGaussian(records, 0.01, 1.0, 1000), 1e-5, adjacency=ZERO, step=STEP)


def fixed(z: float, adjacency: Adjacency) -> float:
    return epsilon_pld(FixedSampleGaussian(10, 1, z, 60), 1e-5, adjacency=adjacency, step=STEP)


def summed(dimension: int, contributions: int, precision: floats.Precision) -> float:
    """The sensitivity of a floating-point sum of contributions of norm 1 on the grid 2^-24; docs/privacy-theorems.md."""
    moved = 1 + floats.sum_error(contributions, precision)
    return (1 + floats.norm_excess(dimension, precision)) * moved + 2.0**-24 * math.sqrt(dimension)


def root(f: Callable[[float], float], target: float, low: float, high: float) -> float:
    return crossing(lambda epsilon: f(epsilon) - target, low, high)


Call = tuple[Callable[[], float], float]
EXACT = 1e-9
CALLS: dict[int, Call] = {
    101: (lambda: fixed_size.fixed_sample_delta(0.2, 1, 1)[0], EXACT),
    103: (lambda: fixed_size.fixed_sample_delta(0.2, 1, 1)[1], EXACT),
    104: (lambda: fixed_size.seen_count_delta(10, 0.1, 1, 1)[0], EXACT),
    106: (lambda: fixed_size.seen_count_delta(100, 0.1, 2, 0.5)[0], EXACT),
    107: (lambda: subsampled.one_step_delta(0.1, 1, 1)[0], EXACT),
    109: (lambda: root(lambda e: fixed_size.seen_count_delta(10, 0.1, 1, e)[1], 1e-3, 0.1, 3), EXACT),
    110: (lambda: root(lambda e: subsampled.one_step_delta(0.1, 1, e)[0], 1e-3, 0.1, 3), 1e-6),
    112: (lambda: renyi(SeenCountGaussian(10, 0.1, 1), 8), EXACT),
    113: (lambda: renyi(FixedSampleGaussian(10, 2, 1), 2), EXACT),
    115: (add_or_remove, EXACT),
    116: (lambda: root(lambda e: named_participants_delta(0.1, 1, 100, e), 1e-3, 5, 30), EXACT),
    118: (lambda: selection.tries_of_mean(0, 3).gamma, EXACT),
    119: (lambda: selection.tries_of_mean(0, 10).gamma, EXACT),
    121: (lambda: selection.tries_of_mean(-0.5, 10).gamma, EXACT),
    122: (lambda: selected(3, 9.34, 49, 23), EXACT),
    124: (lambda: selected(30, 12.0, 69, 48), EXACT),
    125: (lambda: selected(3, 4.93, 26, 12), EXACT),
    127: (lambda: selected(30, 6.24, 36, 24), EXACT),
    128: (lambda: selected(3, 2.69, 13, 6), EXACT),
    130: (lambda: selected(30, 3.34, 18, 12), EXACT),
    131: (lambda: needed(3, 0.5), 1e-5),
    133: (lambda: needed(30, 0.5), 1e-5),
    134: (lambda: needed(3, 1), 1.2e-5),
    136: (lambda: needed(30, 1), 1e-5),
    137: (lambda: needed(3, 2), 2e-5),
    139: (lambda: needed(30, 2), 2e-5),
    140: (lambda: toy(0), EXACT),
    142: (lambda: toy(1), EXACT),
    143: (lambda: toy_bound(1, 1, 2), EXACT),
    145: (lambda: toy_bound(0, 0.5, 4), EXACT),
    146: (lambda: math.fsum(COEFFICIENTS[:8] ** 2), EXACT),
    148: (lambda: banded(60, 10, 6, 10), EXACT),
    149: (lambda: banded(60, 8, 8, 8), EXACT),
    151: (lambda: full(8, 4, 2), EXACT),
    152: (lambda: full(60, 10, 6), EXACT),
    154: (lambda: prefix_sum_error(COEFFICIENTS[:4], 8), EXACT),
    155: (lambda: prefix_sum_error(COEFFICIENTS[:10], 60), EXACT),
    157: (
        lambda: gaussian.epsilon_of(factorisation.factorisation_event(banded(60, 10, 6, 10), 1, 8, ZERO).mu, 1e-5),
        EXACT,
    ),
    160: (lambda: tree_sensitivity_squared(8, 4, 2), 0),
    161: (lambda: tree_sensitivity_squared(8, 2, 4), 0),
    163: (lambda: tree_sensitivity_squared(8), 0),
    164: (lambda: tree_sensitivity_squared(60), 0),
    166: (lambda: shares.kappa(1, 2), EXACT),
    167: (lambda: shares.kappa(2, 10), EXACT),
    169: (lambda: shares.log_kappa(2**12, 10), EXACT),
    170: (lambda: shares.log_kappa(2**16, 10), EXACT),
    172: (lambda: shares.log_kappa(2**24, 10), EXACT),
    173: (lambda: floats.norm_excess(4010, "float32"), EXACT),
    175: (lambda: floats.norm_excess(61_706, "float32", "pairwise"), EXACT),
    176: (lambda: floats.norm_excess(11_200_000, "float64"), EXACT),
    178: (lambda: floats.sum_error(1000, "float32", "pairwise"), EXACT),
    179: (lambda: floats.sum_error(64, "float32"), EXACT),
    181: (lambda: summed(61_706, 1000, "float64"), EXACT),
    182: (lambda: summed(61_706, 1000, "float32"), EXACT),
    184: (lambda: secret_samples.one_step_delta(2, 0.1, 1, 1)[0], EXACT),
    185: (lambda: secret_samples.one_step_delta(4, 0.1, 1, 1)[0], EXACT),
    187: (lambda: secret_samples.one_step_delta(4, 0.1, 1, 0.2)[1], EXACT),
    188: (lambda: renyi(UserRecordsGaussian(2, 0.1, 1), 2), EXACT),
    190: (lambda: renyi(UserRecordsGaussian(3, 0.01, 0.8), 4), EXACT),
    191: (lambda: gaussian.epsilon_of(4 * 0.5, 1e-5), EXACT),
    193: (lambda: renyi(FixedSampleGaussian(10, 1, 1), 2, REPLACE), EXACT),
    194: (lambda: math.log1p(0.1**2 * min(4 * math.expm1(1), 2 * math.e)), EXACT),
    196: (lambda: seen(10, 0.1, 1, 100, 1e-3)[1], 5e-6),
    197: (lambda: hidden(0.1, 1, 100, 1e-3), 5e-6),
    199: (lambda: seen(10, 0.1, 2, 100, 1e-5)[1], 5e-6),
    200: (lambda: hidden(0.1, 2, 100, 1e-5), 5e-6),
    202: (lambda: seen(100, 0.1, 2, 60, 1e-5)[1], 5e-6),
    203: (lambda: hidden(0.1, 2, 60, 1e-5), 5e-6),
    205: (lambda: seen(100, 0.1, 1, 60, 1e-5)[1], 5e-6),
    206: (lambda: hidden(0.1, 1, 60, 1e-5), 5e-6),
    208: (lambda: seen(1000, 0.01, 1, 100, 1e-5)[1], 5e-6),
    209: (lambda: hidden(0.01, 1, 100, 1e-5), 5e-6),
    211: (lambda: needed(3, 1, -0.5), 1.2e-5),
    212: (lambda: needed(10, 1, -0.5), 1.2e-5),
    214: (lambda: needed(3, 1, 1), 1e-5),
    215: (lambda: needed(10, 1, 1), 1e-5),
    217: (lambda: user(2), 5e-6),
    218: (lambda: user(4), 1e-5),
    220: (lambda: fixed(2, ZERO), 5e-6),
    221: (lambda: fixed(2, REPLACE), 5e-6),
    223: (lambda: true_order_two(6, [0, 3, 6], 0.3), EXACT),
    224: (lambda: true_order_two(3, list(range(9)), 0.1), EXACT),
}
TABLE = [  # accounting.md, section 1: seen, data to zeroed, which is the proven value
    ((10, 0.1, 1, 100, 1e-3), 13.88942),
    ((10, 0.1, 2, 100, 1e-5), 5.52950),
    ((100, 0.1, 2, 60, 1e-5), 3.57984),
    ((1000, 0.01, 1, 100, 1e-5), 5.16436),
]


def test_every_reference_value_has_a_call_and_every_call_a_value() -> None:
    assert set(CALLS) == set(ROWS)


@pytest.mark.parametrize("number", list(ROWS))
def test_reference_value(number: int) -> None:
    call, tolerance = CALLS[number]
    assert call() == pytest.approx(float(ROWS[number]["value"]), rel=tolerance, abs=0)


@pytest.mark.parametrize(("row", "expected"), TABLE)
def test_seen_counts_of_the_table(row: tuple[int, float, float, int, float], expected: float) -> None:
    clients, rate, z, rounds, delta = row
    fine = seen(*row)
    assert max(fine) == fine[0] == pytest.approx(expected, rel=6e-6)
    quoted = epsilon_pld(SeenCountGaussian(clients, rate, z, rounds), delta, adjacency=ZERO)
    assert expected * (1 - 1e-6) <= quoted <= expected * 1.0003


@pytest.mark.heavy
def test_remaining_values_of_the_page() -> None:
    """Values that accounting.md prints and oracles2.json does not have."""
    assert banded(8, 4, 2, 4) == pytest.approx(1.72527, rel=3e-6)
    assert banded(200, 20, 10, 20) == pytest.approx(4.48987, rel=2e-6)
    assert tree_sensitivity_squared(60, 10, 6) == 49
    assert shares.kappa(4, 100) == pytest.approx(5.2e-69, rel=0.02)
    assert summed(11_200_000, 64, "float64") == pytest.approx(1.000200, abs=5e-7)
    assert [needed(10, e) for e in (0.5, 1, 2)] == pytest.approx([10.8739, 5.6911, 3.0643], rel=2e-5)
    assert [needed(30, 1, eta) for eta in (1, -0.5)] == pytest.approx([7.72, 5.43], abs=5e-3)
    assert [selection.tries_of_mean(eta, 10).probability_of(1) for eta in (0, -0.5)] == pytest.approx([0.27, 0.53], abs=5e-3)
    assert user(1) == pytest.approx(1.8283, rel=3e-5)
