"""Seen counts and samples of fixed size: populations by brute force, integrals, composition by hand, an attack, traps."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.fft import irfft, rfft
from scipy.integrate import trapezoid
from scipy.stats import binom, norm

from fedveil.accounting import fixed_size, pld, subsampled
from fedveil.accounting._numbers import crossing
from fedveil.accounting.fixed_size import fixed_sample_delta, pairs_of, seen_count_delta
from fedveil.accounting.gaussian import delta_of, epsilon_of
from fedveil.accounting.types import Adjacency, FixedSampleGaussian, SeenCountGaussian
from fedveil.errors import ConfigError
from reference_costs import epsilon_pld, named_participants_delta

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
shares = st.floats(1e-3, 1)
noises = st.floats(0.3, 5)
epsilons = st.floats(0, 4)


def hockey_stick(first: np.ndarray, second: np.ndarray, epsilon: float, step: float) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum() * step)


def mixture(x: np.ndarray, sums: np.ndarray, z: float) -> np.ndarray:
    return norm.pdf(x, sums[:, None], z).mean(axis=0)


@given(shares, noises, epsilons)
@settings(max_examples=60, deadline=None)
def test_one_step_deltas_are_those_of_the_worst_pairs_by_integration(p: float, z: float, epsilon: float) -> None:
    x = np.linspace(-10 * z, 2 + 10 * z, 100_001)
    step, base = x[1] - x[0], (1 - p) * norm.pdf(x, 0, z)
    wide = hockey_stick(base + p * norm.pdf(x, 2, z), base + p * norm.pdf(x, 1, z), epsilon, step)
    narrow = hockey_stick(base + p * norm.pdf(x, 1, z), norm.pdf(x, 0, z), epsilon, step)
    assert fixed_sample_delta(p, z, epsilon) == pytest.approx((wide, narrow), rel=1e-4, abs=1e-8)
    assert fixed_sample_delta(p, z, epsilon, REPLACE) == pytest.approx((narrow, narrow), rel=1e-4, abs=1e-8)


@given(st.integers(2, 6), st.data(), st.floats(0.4, 3), st.floats(0, 2))
@settings(max_examples=80, deadline=None)
def test_no_population_costs_more_and_the_worst_one_attains_it(
    clients: int, data: st.DataObject, z: float, epsilon: float
) -> None:
    """All samples of a fixed size enumerated; client 0 has its contribution, zero, or a replacement."""
    size = data.draw(st.integers(1, clients))
    others = data.draw(st.lists(st.floats(-1, 1), min_size=clients - 1, max_size=clients - 1))
    mine, new = data.draw(st.floats(-1, 1)), data.draw(st.floats(-1, 1))
    x = np.linspace(-clients - 9 * z, clients + 9 * z, 20_001)
    step, samples = x[1] - x[0], list(itertools.combinations(range(clients), size))

    def law(own: float, rest: list[float]) -> np.ndarray:
        values = np.array([own, *rest])
        return mixture(x, np.array([values[list(s)].sum() for s in samples]), z)

    kept, zeroed, replaced = law(mine, others), law(0.0, others), law(new, others)
    forward, backward = fixed_sample_delta(size / clients, z, epsilon)
    assert hockey_stick(kept, zeroed, epsilon, step) <= forward + 1e-6
    assert hockey_stick(zeroed, kept, epsilon, step) <= backward + 1e-6
    both = fixed_sample_delta(size / clients, z / 2, epsilon, REPLACE)[0]  # noise std / 2C
    assert hockey_stick(kept, replaced, epsilon, step) <= both + 1e-6
    opposed = [-1.0] * (clients - 1)
    assert hockey_stick(law(1.0, opposed), law(0.0, opposed), epsilon, step) == pytest.approx(forward, abs=1e-6)
    assert hockey_stick(law(0.0, [1.0] * (clients - 1)), law(1.0, [1.0] * (clients - 1)), epsilon, step) == pytest.approx(
        backward, abs=1e-6
    )


def test_two_dimensional_contributions_cost_no_more() -> None:
    rng, axis = np.random.default_rng(5), np.linspace(-6, 6, 241)
    x, y = np.meshgrid(axis, axis)

    def density(v: np.ndarray) -> np.ndarray:
        return np.exp(-((x - v[0]) ** 2 + (y - v[1]) ** 2) / 2) / (2 * math.pi)

    for _ in range(25):
        a, b = (v / max(1.0, float(np.linalg.norm(v))) for v in rng.normal(size=(2, 2)))
        p, epsilon = rng.uniform(0.05, 0.95), rng.uniform(0, 1.5)
        first = (1 - p) * density(a) + p * density(b)
        second = (1 - p) * density(a) + p * density(np.zeros(2))
        cell = (axis[1] - axis[0]) ** 2
        forward, backward = fixed_sample_delta(p, 1, epsilon)
        assert hockey_stick(first, second, epsilon, cell) <= forward + 1e-6
        assert hockey_stick(second, first, epsilon, cell) <= backward + 1e-6


@given(shares, shares, st.floats(0, 1), noises, epsilons)
@settings(max_examples=100, deadline=None)
def test_curves_are_convex_and_grow_with_the_share(a: float, b: float, part: float, z: float, epsilon: float) -> None:
    """What allows counts to be thinned out, and those below a window to be lifted into it."""
    middle = part * a + (1 - part) * b
    for i in range(2):
        at_a, at_b, at = (fixed_sample_delta(p, z, epsilon)[i] for p in (a, b, middle))
        assert at <= (part * at_a + (1 - part) * at_b) * (1 + 1e-9) + 1e-300
        assert (at_a <= at_b * (1 + 1e-9)) if a <= b else (at_b <= at_a * (1 + 1e-9))


@given(st.integers(1, 3000), st.floats(1e-4, 0.999), st.booleans())
@settings(max_examples=80, deadline=None)
def test_counts_are_binomial_with_the_same_mean_and_what_is_left_out_is_counted(clients: int, rate: float, exact: bool) -> None:
    k, weights, lost = fixed_size._counts(clients, rate, 1e-9, exact)
    above = binom.sf(k[-1], clients, rate)
    assert above <= lost <= 1e-9 * (1 + 1e-8)
    assert math.fsum(weights) == pytest.approx(1, rel=1e-12)
    assert weights @ k == pytest.approx(clients * rate, rel=1e-6, abs=1e-6)
    if exact:
        assert weights == pytest.approx(binom.pmf(k, clients, rate), rel=1e-6, abs=1e-9)
    true = binom.pmf(np.arange(clients + 1), clients, rate)
    square = float(true @ np.arange(clients + 1) ** 2)
    assert square * (1 - 1e-6) - 1e-6 <= weights @ k**2 <= square * 1.003 + 1e-6


@pytest.mark.parametrize(("clients", "rate", "z"), [(10, 0.1, 1.0), (300, 0.05, 0.6), (40_000, 0.003, 2.0)])
def test_loss_distribution_of_one_release_is_the_curve_from_above(clients: int, rate: float, z: float) -> None:
    """At grid points the dots lie on the curve itself, also at negative epsilon, where the other direction speaks."""
    release = pairs_of(SeenCountGaussian(clients, rate, z))
    step = release.spread(replace=False) / 30
    for direction in (True, False):
        law = release.losses(step, release.highest(1e-12), direction, replace=False)
        for epsilon in (0.0, 0.1, 0.4, 1.0, 2.5):
            curve = seen_count_delta(clients, rate, z, epsilon)[0 if direction else 1]
            assert curve * (1 - 1e-7) - 1e-12 <= pld.delta(law, epsilon) <= curve * 1.02 + 1e-9
            losses = law.step * (law.lower + np.arange(law.probs.size))
            below = law.infinity + float(law.probs @ np.maximum(-np.expm1(-epsilon - losses), 0))
            other = seen_count_delta(clients, rate, z, epsilon)[1 if direction else 0]
            mirrored = -math.expm1(-epsilon) + math.exp(-epsilon) * other
            assert mirrored - 1e-9 <= below <= mirrored + 0.02 * other * math.exp(-epsilon) + 1e-9


def attacked_losses(clients: int, rate: float, z: float, rounds: int, step: float) -> tuple[np.ndarray, np.ndarray]:
    """Law of the summed loss, on the grid, when everybody else sends -C in every round and the client +C or zero."""
    x, size = np.linspace(-10 * z, 2 + 10 * z, 100_001), 2**18
    law = np.zeros(size)
    for k in range(clients + 1):
        p = k / clients
        base = (1 - p) * norm.pdf(x, 0, z)
        first, second = base + p * norm.pdf(x, 2, z), base + p * norm.pdf(x, 1, z)
        cells = np.rint(np.log(first / second) / step).astype(int) % size
        law += np.bincount(cells, first * (x[1] - x[0]) * binom.pmf(k, clients, rate), size)
    total = np.roll(irfft(rfft(law) ** rounds, size), size // 4)
    return step * (np.arange(size) - size // 4), total


def test_an_attack_on_the_first_row_stays_below_the_proven_value_and_near_it() -> None:
    losses, law = attacked_losses(10, 0.1, 1.0, 100, 4e-4)

    def delta(epsilon: float) -> float:
        above = losses > epsilon
        return float(law[above] @ -np.expm1(epsilon - losses[above]))

    attacked = crossing(lambda epsilon: delta(epsilon) - 1e-3, 5, 30)
    proven = epsilon_pld(SeenCountGaussian(10, 0.1, 1, 100), 1e-3, adjacency=ZERO)
    hidden = subsampled.epsilon_pld(0.1, 1, 100, 1e-3, adjacency=ZERO)
    assert attacked == pytest.approx(13.1245, abs=2e-3)
    assert hidden < 5 < attacked < proven < 14


def masses_of(curve: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """P's mass at each positive loss of the pair whose delta, as a function of e^epsilon, is linear between the given points."""
    slopes = np.diff(np.append(curve, 0.0)) / np.diff(np.append(np.exp(losses), 2 * math.exp(losses[-1])))
    return np.exp(losses[1:]) * np.diff(slopes)


@pytest.mark.parametrize(("adjacency", "direction"), [(ZERO, 0), (ZERO, 1), (REPLACE, 0), (None, 0)])
@pytest.mark.heavy
def test_composition_by_a_second_implementation_from_the_curves(adjacency: Adjacency | None, direction: int) -> None:
    """Slopes of the one-step curves instead of masses of intervals."""
    clients, rate, z, rounds, step, size = 20, 0.2, 1.5, 30, 4e-3, 2**16
    losses = step * np.arange(3000)
    k = np.arange(1, clients + 1)
    weights, p = binom.pmf(k, clients, rate)[:, None], (k / clients)[:, None]
    wide, narrow = ((weights * curve(p, z, losses)).sum(axis=0) for curve in (fixed_size.wide_curve, fixed_size.narrow_curve))
    pair = {ZERO: (wide, narrow), REPLACE: (narrow, narrow), None: (wide, wide)}[adjacency]
    forward, backward = (masses_of(curve, losses) for curve in (pair if direction == 0 else pair[::-1]))
    law = np.zeros(size)
    law[1:3000], law[-2999:] = forward, (backward * np.exp(-losses[1:]))[::-1]
    law[0] = 1 - law.sum()
    total = np.roll(irfft(rfft(law) ** rounds, size), size // 4)
    values = step * (np.arange(size) - size // 4)
    bound = pld.composed([pairs_of(SeenCountGaussian(clients, rate, z, rounds))], 1e-10, adjacency, step)[direction]
    for epsilon in (0.5, 1.5, 3.0, 6.0):
        above = values > epsilon
        direct = float(total[above] @ -np.expm1(epsilon - values[above]))
        assert pld.delta(bound, epsilon) == pytest.approx(direct, rel=1e-3)


def test_a_sample_of_everybody_is_a_plain_gaussian_and_of_nobody_nothing() -> None:
    for adjacency in (ZERO, REPLACE, None):
        for event in (SeenCountGaussian(7, 1.0, 2.0, 9), FixedSampleGaussian(7, 7, 2.0, 9)):
            assert epsilon_of(1.5, 1e-5) <= epsilon_pld(event, 1e-5, adjacency=adjacency) <= epsilon_of(1.5, 1e-5) * 1.002
        for event in (SeenCountGaussian(7, 0.0, 2.0, 9), FixedSampleGaussian(7, 0, 2.0, 9), SeenCountGaussian(7, 0.5, 2.0, 0)):
            assert epsilon_pld(event, 1e-5, adjacency=adjacency) == 0
    assert fixed_sample_delta(1, 2, 0.3) == pytest.approx((delta_of(0.5, 0.3),) * 2, rel=1e-12)
    assert seen_count_delta(5, 0, 2, 0.3) == fixed_sample_delta(0, 2, 0.3) == (0, 0)


@given(st.integers(2, 400), st.floats(0.01, 0.9), st.floats(0.6, 3), st.integers(1, 40))
@settings(max_examples=25, deadline=None)
def test_seen_lies_between_hidden_and_named_and_unsampled(clients: int, rate: float, z: float, rounds: int) -> None:
    event, delta, slack = SeenCountGaussian(clients, rate, z, rounds), 1e-5, 1 + 2e-3
    seen = epsilon_pld(event, delta, adjacency=ZERO)
    assert subsampled.epsilon_pld(rate, z, rounds, delta, adjacency=ZERO) <= seen * slack + 1e-4
    assert seen <= epsilon_pld(event, delta) * slack + 1e-4
    if rounds == 1:
        assert seen_count_delta(clients, rate, z, 0.5)[0] <= named_participants_delta(rate, z, 1, 0.5) * (1 + 1e-9)


@pytest.mark.parametrize("adjacency", [ZERO, REPLACE, None])
def test_renyi_divergence_by_its_integral_over_epsilon(adjacency: Adjacency | None) -> None:
    clients, rate, z = 12, 0.2, 1.5
    eps = np.linspace(0, 20, 6_001)
    k = np.arange(1, clients + 1)
    weights, p = binom.pmf(k, clients, rate)[:, None], (k / clients)[:, None]
    wide = (weights * fixed_size.wide_curve(p, z, eps)).sum(axis=0)
    narrow = (weights * fixed_size.narrow_curve(p, z, eps)).sum(axis=0)
    first, second = {ZERO: (wide, narrow), REPLACE: (narrow, narrow), None: (wide, wide)}[adjacency]
    pairs = fixed_size.renyi_pairs_of(SeenCountGaussian(clients, rate, z))
    for a in (1.5, 4.0, 9.0):
        direct = max(
            math.log1p(a * (a - 1) * trapezoid(np.exp((a - 1) * eps) * up + np.exp(-a * eps) * down, eps)) / (a - 1)
            for up, down in ((first, second), (second, first))
        )
        ours = float(fixed_size.rdp(pairs, np.array([a]), adjacency)[0])
        assert ours == pytest.approx(direct, rel=1e-4)


def test_renyi_curve_is_monotone_below_the_unsampled_one_and_never_beats_the_loss_distribution() -> None:
    orders = np.array([1.01, 1.5, 2, 3.7, 8, 20, 65, 300, 1024.0])
    for event in (SeenCountGaussian(1000, 0.01, 1), SeenCountGaussian(10, 0.3, 0.4), FixedSampleGaussian(9, 4, 12.0)):
        for adjacency in (ZERO, REPLACE, None):
            curve = fixed_size.rdp(fixed_size.renyi_pairs_of(event), orders, adjacency)
            assert np.all(np.diff(curve) >= -1e-15)
            assert np.all(curve <= orders / (2 * event.noise_multiplier**2))


@pytest.mark.parametrize("bad", [{"clients": 0}, {"rate": 1.5}, {"rate": math.nan}, {"noise_multiplier": 0}, {"count": -1}])
def test_values_out_of_range_are_refused(bad: dict[str, float]) -> None:
    good = {"clients": 10, "rate": 0.1, "noise_multiplier": 1.0, "count": 1}
    with pytest.raises(ConfigError, match=next(iter(bad)).replace("rate", "rate|sampling")):
        SeenCountGaussian(**{**good, **bad})  # type: ignore[arg-type]
    if "rate" not in bad:
        good["cohort"] = 2
        good.pop("rate")
        with pytest.raises(ConfigError):
            FixedSampleGaussian(**{**good, **bad})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cohort"):
        FixedSampleGaussian(10, 11, 1.0)
    with pytest.raises(ConfigError, match="rate"):
        seen_count_delta(10, 2, 1, 1)


# --- clients that keep something ---------------------------------------------------------------------------------------------


def _losses_of_two(n: int, rounds: int, rate: float, z: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The losses [n] of clients i, j under sums and counts that are seen, and those of whoever sees the names as well.

    i sends 1 on one axis (zeroed: 0). j sends -0.3 there and +-sqrt(0.91) on another, the sign by how often it was absent before.
    """
    draw, a, r = np.random.default_rng(seed), 0.3, math.sqrt(1 - 0.3**2)
    sign, named, signs = np.ones(n), np.zeros(n), np.array([1.0, -1.0])
    logs = [np.stack([np.zeros(n), np.full(n, -np.inf)], 1) for _ in range(2)]  # of both signs, with i and with i zeroed
    for _ in range(rounds):
        here, other = draw.random((2, n)) < rate
        k, noise = here.astype(int) + other, draw.standard_normal((2, n)) * z
        main, beside = noise[0] + here - a * other, noise[1] + r * sign * other
        named += np.where(here, noise[0] + 0.5, 0.0) / z**2
        told = (beside[:, None] * signs * r - r * r / 2) / z**2
        for w, sent in enumerate((1.0, 0.0)):
            both, alone, absent = ((main * m - m * m / 2) / z**2 for m in (sent - a, -a, sent))
            came = np.select([k == 2, k == 1], [both, alone + math.log(0.5)], -np.inf)
            stayed = np.select([k == 0, k == 1], [np.zeros(n), absent + math.log(0.5)], -np.inf)
            logs[w] = np.logaddexp(came[:, None] + told + logs[w], stayed[:, None] + logs[w][:, ::-1])
        sign = np.where(other, sign, -sign)
    return np.logaddexp(*logs[0].T) - np.logaddexp(*logs[1].T), named


def test_clients_that_keep_something_tell_more_than_a_seen_count_of_memoryless_ones() -> None:
    rate, z, rounds, delta, n = 0.97, 1.5, 60, 0.05, 40_000
    crowd, alone = (epsilon_pld(SeenCountGaussian(clients, rate, z, rounds), delta, adjacency=ZERO) for clients in (2, 1))
    loss, named = _losses_of_two(n, rounds, rate, z, seed=0)
    above, control = (np.maximum(-np.expm1(np.minimum(crowd - x, 0.0)), 0.0) for x in (loss, named))
    exact, beside = named_participants_delta(rate, z, rounds, crowd), above - control  # the control's mean is known
    found, error = exact + float(beside.mean()), float(beside.std()) / math.sqrt(n)
    assert abs(float(control.mean()) - exact) < 4 * float(control.std()) / math.sqrt(n)
    assert found - 3 * error > delta, "the bound for a crowd does not hold of clients that keep something"
    assert found < exact
    names_seen = crossing(lambda e: named_participants_delta(rate, z, rounds, e) - delta, 10.0, 40.0)
    assert names_seen <= alone <= names_seen * (1 + 1e-3), "a crowd of one is what is charged then"
