"""From events to epsilon and back: agreement between accountants, monotonicity, calibration never above its target."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.accounting.accountant import _bound, bound, calibrate, delta_bound, rdp_curve
from fedveil.accounting.attack_power import largest_tpr
from fedveil.accounting.gaussian import delta_of, epsilon_of, mu_of
from fedveil.accounting.selection import selection_bound, tries_of_mean
from fedveil.accounting.types import (
    Adjacency,
    Event,
    FixedSampleGaussian,
    Gaussian,
    SampledGaussian,
    SecretSample,
    SeenCountGaussian,
    Unbounded,
    UserRecordsGaussian,
)
from fedveil.errors import ConfigError

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
sampled = st.builds(SampledGaussian, st.floats(0.01, 0.6), st.floats(0.6, 5), st.integers(1, 40))
plain = st.builds(Gaussian, st.floats(0.01, 1), st.integers(1, 5))


def test_gaussian_events_get_the_exact_curve() -> None:
    events = [Gaussian(0.3, 4), Gaussian(0.8), SampledGaussian(1.0, 2.0, 3)]
    mu = math.sqrt(4 * 0.09 + 0.64 + 0.75)
    assert bound(events, 1e-5) == (pytest.approx(epsilon_of(mu, 1e-5), rel=1e-12), "gdp")
    assert delta_bound(events, 2.0) == (pytest.approx(delta_of(mu, 2.0), rel=1e-12), "gdp")


def test_nothing_released_costs_nothing_and_an_unbounded_release_costs_everything() -> None:
    for accountant in ("auto", "gdp", "rdp", "pld"):
        assert bound([], 1e-5, accountant=accountant)[0] == 0
        assert bound([SampledGaussian(0.0, 1.0, 9), Gaussian(0.0)], 1e-5, accountant=accountant)[0] == 0
        assert bound([Gaussian(0.1), Unbounded("raw")], 1e-5, accountant=accountant) == (math.inf, "none")
    assert delta_bound([Unbounded("raw")], 1) == (1.0, "none")
    assert np.all(np.isinf(rdp_curve(Unbounded("raw"), [2.0, 3.0])))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(sampled, plain), min_size=1, max_size=4), st.sampled_from([ZERO, REPLACE, None]))
@pytest.mark.heavy
def test_all_accountants_are_ordered_and_auto_is_the_best(events: list[Event], adjacency: Adjacency | None) -> None:
    delta = 1e-5
    each = {name: bound(events, delta, accountant=name, adjacency=adjacency)[0] for name in ("gdp", "rdp", "pld")}
    auto, name = bound(events, delta, adjacency=adjacency)
    if any(isinstance(event, SampledGaussian) for event in events):
        assert auto == min(each.values())
        assert each["pld"] <= each["rdp"] * 1.002 + 1e-3
    else:
        assert name == "gdp"
        assert auto <= each["pld"] <= each["gdp"] * 1.003 + 1e-3
    assert auto <= bound(events, delta)[0] * (1 + 1e-3)
    assert auto <= each["gdp"] * (1 + 1e-12)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.02, 0.9), st.floats(0.6, 5), st.integers(1, 60), st.floats(1e-8, 1e-3))
def test_epsilon_grows_with_rounds_and_falls_with_noise_and_delta(rate: float, z: float, count: int, delta: float) -> None:
    def cost(z: float, count: int, delta: float) -> float:
        return bound([SampledGaussian(rate, z, count)], delta, adjacency=ZERO)[0]

    here = cost(z, count, delta)
    slack = 1 + 1e-3
    assert cost(z, count + 5, delta) >= here / slack
    assert cost(z * 1.2, count, delta) <= here * slack
    assert cost(z, count, delta * 3) <= here * slack


@settings(max_examples=20, deadline=None)
@given(st.lists(st.one_of(sampled, plain), min_size=1, max_size=4), st.floats(1.1, 40))
def test_renyi_curves_are_additive_over_events_and_counts(events: list[Event], order: float) -> None:
    orders = [order, 2.0]
    total = sum(rdp_curve(event, orders) for event in events)
    singles = [type(e)(**{**e.__dict__, "count": 1}) for e in events for _ in range(e.count)]  # type: ignore[union-attr]
    assert total == pytest.approx(sum(rdp_curve(event, orders) for event in singles), rel=1e-9)


@settings(max_examples=25, deadline=None)
@given(st.lists(sampled, min_size=1, max_size=3), st.floats(0.2, 8))
def test_delta_and_epsilon_are_inverse(events: list[Event], epsilon: float) -> None:
    delta, _ = delta_bound(events, epsilon, accountant="pld")
    if 1e-9 < delta < 0.1:
        assert bound(events, delta * 1.001, accountant="pld")[0] <= epsilon * 1.002 + 1e-6
        assert bound(events, delta / 1.01, accountant="pld")[0] >= epsilon * 0.995


@pytest.mark.few(5)
@pytest.mark.parametrize("adjacency", [ZERO, REPLACE, None])
@pytest.mark.parametrize(("rate", "count"), [(0.1, 60), (0.1, 400), (0.01, 10**5), (1.0, 100)])
@pytest.mark.heavy
def test_calibration_is_just_below_its_target(rate: float, count: int, adjacency: Adjacency | None) -> None:
    def events(z: float) -> Sequence[Event]:
        return [SampledGaussian(rate, z, count)]

    z = calibrate(8.0, 1e-5, events, adjacency=adjacency)
    assert 8.0 * 0.999 < bound(events(z), 1e-5, adjacency=adjacency)[0] <= 8.0
    assert bound(events(z * 2 / 3), 1e-5, adjacency=adjacency)[0] > 10


@given(st.floats(0.01, 500), st.floats(1e-12, 1e-2), st.integers(1, 10**6))
@pytest.mark.heavy
def test_gaussian_calibration_equals_the_closed_form(epsilon: float, delta: float, count: int) -> None:
    z = calibrate(epsilon, delta, lambda z: [Gaussian(1 / z, count)])
    assert z == pytest.approx(math.sqrt(count) / mu_of(epsilon, delta), rel=3e-6)
    assert bound([Gaussian(1 / z, count)], delta)[0] <= epsilon


def test_a_million_sampled_rounds_and_many_different_ones_have_finite_answers() -> None:
    epsilon, name = bound([SampledGaussian(0.001, 1.0, 10**6)], 1e-5, adjacency=ZERO)
    assert (epsilon, name) == (pytest.approx(6.03, abs=0.01), "pld")
    many = [SampledGaussian(0.1, 1 + i / 100, 1) for i in range(100)]
    worst, best = (bound([SampledGaussian(0.1, z, 100)], 1e-5)[0] for z in (1.0, 1.99))
    assert best < bound(many, 1e-5)[0] < worst * 1.15


def test_tiny_delta_is_not_left_to_floating_point() -> None:
    epsilon, name = bound([SampledGaussian(0.1, 1.0, 60)], 1e-30)
    assert name in ("rdp", "gdp")
    assert 10 < epsilon < 60
    with pytest.raises(ConfigError, match="1e-10"):
        bound([SampledGaussian(0.1, 1.0, 60)], 1e-30, accountant="pld")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="accountant"):
        bound([Gaussian(1)], 1e-5, accountant="clt")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="knows"):
        bound(["noise"], 1e-5)  # type: ignore[list-item]
    with pytest.raises(ConfigError):
        bound([Gaussian(1)], 0.0)
    with pytest.raises(ConfigError, match="no noise can be calibrated"):
        calibrate(1.0, 1e-5, lambda z: [])
    with pytest.raises(ConfigError, match="no noise multiplier"):
        calibrate(1.0, 1e-5, lambda z: [Gaussian(5.0)])


@pytest.mark.parametrize("adjacency", [ZERO, REPLACE, None])
@pytest.mark.parametrize(
    "events",
    [
        [SampledGaussian(1.6e-7, 0.0046, 1772)],
        [SampledGaussian(3.6e-4, 2607.0, 13), Gaussian(69.3)],
        [SampledGaussian(0.007, 8439.0, 2289), SampledGaussian(6e-5, 244.0, 21), Gaussian(91.0)],
        [SampledGaussian(0.1, 0.55, 60), SampledGaussian(1e-6, 0.3, 10**6)],
        [SampledGaussian(2.2e-6, 0.058, 273_023)],
    ],
)
def test_extreme_events_have_finite_answers_without_warnings(events: list[Event], adjacency: Adjacency | None) -> None:
    for accountant in ("auto", "pld"):
        epsilon, _ = bound(events, 4e-6, accountant=accountant, adjacency=adjacency)  # type: ignore[arg-type]
        assert epsilon > 0
        assert math.isfinite(epsilon) or accountant == "pld"


def exact_delta(p: list[tuple[float, float]], q: list[tuple[float, float]], z: float, epsilon: mpmath.mpf) -> mpmath.mpf:
    """sup_E P(E) - e^eps Q(E) of two mixtures (weight, mean) of normals of std z whose likelihood ratio grows with x."""
    density = lambda mixture, x: sum(w * mpmath.npdf(x, m, z) for w, m in mixture)  # noqa: E731
    above = lambda mixture, x: sum(w * mpmath.ncdf(m, x, z) for w, m in mixture)  # noqa: E731
    low, high = mpmath.mpf(-100), mpmath.mpf(2000)
    while high - low > mpmath.mpf(10) ** -40:
        middle = (low + high) / 2
        low, high = (low, middle) if density(p, middle) > mpmath.exp(epsilon) * density(q, middle) else (middle, high)
    return above(p, high) - mpmath.exp(epsilon) * above(q, high)


def binomial(records: int, rate: float) -> list[tuple[float, float]]:
    return [(math.comb(records, j) * rate**j * (1 - rate) ** (records - j), float(j)) for j in range(records + 1)]


@pytest.mark.few(10)
@pytest.mark.parametrize("delta", [1e-6, 1e-11, 1e-13, 1e-30, 1e-200])
@pytest.mark.parametrize(
    ("event", "adjacency", "p", "q"),
    [
        (SampledGaussian(0.01, 1.0), Adjacency.ZERO_OUT, binomial(1, 0.01), [(1.0, 0.0)]),
        (SampledGaussian(0.001, 0.7), Adjacency.ZERO_OUT, binomial(1, 0.001), [(1.0, 0.0)]),
        (SampledGaussian(0.1, 2.0), Adjacency.REPLACE_ONE, [(0.9, 0.0), (0.1, 0.5)], [(0.9, 0.0), (0.1, -0.5)]),
        (SampledGaussian(0.1, 2.0), None, binomial(1, 0.1), [(1.0, 0.0)]),
        (UserRecordsGaussian(3, 0.01, 1.0), Adjacency.ZERO_OUT, binomial(3, 0.01), [(1.0, 0.0)]),
        (FixedSampleGaussian(100, 10, 2.0), Adjacency.ZERO_OUT, [(0.9, 0.0), (0.1, 2.0)], [(0.9, 0.0), (0.1, 1.0)]),
        (FixedSampleGaussian(100, 10, 2.0), Adjacency.REPLACE_ONE, binomial(1, 0.1), [(1.0, 0.0)]),
    ],
)
def test_one_release_on_a_secret_sample_costs_its_closed_form_at_any_delta(
    event: SecretSample,
    adjacency: Adjacency | None,
    p: list[tuple[float, float]],
    q: list[tuple[float, float]],
    delta: float,
) -> None:
    with mpmath.workdps(50):
        epsilon, name = bound([event], delta, adjacency=adjacency)
        assert name == "pld"
        assert exact_delta(p, q, event.noise_multiplier, mpmath.mpf(epsilon)) == pytest.approx(delta, rel=1e-10, abs=0)
        stated, _ = delta_bound([event], epsilon, adjacency=adjacency)
    assert stated == pytest.approx(delta, rel=1e-10, abs=0)


def test_many_releases_at_a_tiny_delta_are_still_bounded() -> None:
    one, two = (bound([SampledGaussian(1e-4, 1.0, count)], 1e-12, adjacency=Adjacency.ZERO_OUT)[0] for count in (1, 2))
    assert one == pytest.approx(0.0316438568143, rel=1e-9)
    assert one < two
    with pytest.raises(ConfigError, match="needs delta >= 1e-10"):
        bound([SampledGaussian(1e-4, 1.0, 2)], 1e-12, accountant="pld")


EVENTS: list[list[Event]] = [
    [SampledGaussian(0.02, 1.0, 100)],
    [SampledGaussian(0.1, 0.7, 50), Gaussian(0.3)],
    [SampledGaussian(0.004, 2.0, 1000)],
    [Gaussian(3.0, 1000)],
    [SeenCountGaussian(100, 0.1, 2.0, 60)],
    [FixedSampleGaussian(100, 10, 2.0, 60)],
    [UserRecordsGaussian(3, 0.01, 1.0, 100)],
]


@pytest.mark.few(3)
@pytest.mark.heavy
@pytest.mark.parametrize("events", EVENTS)
def test_a_program_that_lets_numpy_raise_gets_the_same_numbers(events: list[Event]) -> None:
    def numbers() -> list[float]:
        search = selection_bound(tries_of_mean(0, 3), events, 1e-5)[0]
        return [
            *(bound(events, 1e-5, accountant=name)[0] for name in ("auto", "rdp", "gdp", "pld")),
            *(delta_bound(events, 1.0)[0], *rdp_curve(events[0], [1.5, 40.0]), largest_tpr(events, 1.0, 1e-5, 0.05), search),
        ]

    usual = numbers()
    _bound.cache_clear()
    with np.errstate(all="raise"):
        assert numbers() == usual


@pytest.mark.parametrize("value", [1e101, 1e160, math.inf, math.nan])
def test_numbers_that_floats_cannot_square_are_refused_by_name(value: float) -> None:
    with pytest.raises(ConfigError, match="mu must lie between 0 and 1e100"):
        Gaussian(value)
    for noise in (value, 1 / value):
        with pytest.raises(ConfigError, match="noise_multiplier must lie between 1e-100 and 1e100"):
            SampledGaussian(0.1, noise)
    assert bound([Gaussian(1e100, 3)], 1e-5)[0] == pytest.approx(1.5e200)
    assert bound([SampledGaussian(0.1, 1e100, 3)], 1e-5)[0] == 0
