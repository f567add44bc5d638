"""The caps of the filters against arbitrary-precision mathematics, and what fits below them."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath as mp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.accounting import accountant, subsampled
from fedveil.accounting.types import Adjacency, Event, Gaussian, OneOrder, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.errors import BudgetExhausted, ConfigError
from fedveil.ledger.budget import Budget, Filter, FixedPlan, GdpFilter, RdpFilter, best_order
from fedveil.ledger.entry import event_columns, event_from

SCOPE = Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE)
TARGETS = [(0.1, 1e-6), (1.0, 1e-5), (2.0, 0.02), (8.0, 1e-5), (50.0, 1e-12), (0.0, 1e-3), (1e-3, 1e-300), (300.0, 1e-5)]


def gaussian_delta(epsilon: float, mu: mp.mpf) -> mp.mpf:
    """The exact delta of a mu-GDP release, in 60 digits or more."""
    e = mp.mpf(epsilon)
    return mp.ncdf(-e / mu + mu / 2) - mp.exp(e) * mp.ncdf(-e / mu - mu / 2)


def renyi_epsilon(order: float, divergence: mp.mpf, delta: float) -> mp.mpf:
    """Canonne, Kamath & Steinke 2020, Proposition 12."""
    a = mp.mpf(order)
    return divergence + mp.log1p(-1 / a) - (mp.log(delta) + mp.log(a)) / (a - 1)


def sampled_divergence(rate: float, noise_multiplier: float, order: int) -> mp.mpf:
    """Mironov, Talwar & Zhang 2019, Section 3.3, with rational binomials."""
    q, z = mp.mpf(rate), mp.mpf(noise_multiplier)
    terms = (math.comb(order, k) * (1 - q) ** (order - k) * q**k * mp.exp((k * k - k) / (2 * z * z)) for k in range(order + 1))
    return mp.log(mp.fsum(terms)) / (order - 1)


def accepted(rule: Filter, event: Event, most: int = 100_000) -> int:
    """How many releases of one kind a fresh budget lets out."""
    budget = Budget(rule, SCOPE)
    for number in range(most):
        try:
            budget.spend(event)
        except BudgetExhausted:
            return number
    return most


@pytest.mark.parametrize(("epsilon", "delta"), TARGETS)
def test_gdp_cap_is_the_exact_conversion_from_below(epsilon: float, delta: float) -> None:
    rule = GdpFilter(epsilon, delta)
    with mp.workdps(60 + int(-math.log10(delta))):
        cap = mp.sqrt(mp.mpf(rule.limit.numerator) / rule.limit.denominator)
        assert gaussian_delta(epsilon, cap) <= delta
        assert gaussian_delta(epsilon, cap * (1 + mp.mpf("1e-9"))) > delta


@settings(max_examples=50, deadline=None)
@given(epsilon=st.just(0.0) | st.floats(1e-100, 500), exponent=st.floats(-30, -0.1))
def test_gdp_cap_never_exceeds_the_exact_one(epsilon: float, exponent: float) -> None:
    delta = 10**exponent
    with mp.workdps(80):
        assert gaussian_delta(epsilon, mp.mpf(GdpFilter(epsilon, delta).mu)) <= delta


@pytest.mark.parametrize(("epsilon", "delta"), [(e, d) for e, d in TARGETS if e >= 0.1])
def test_rdp_cap_is_the_exact_conversion_from_below(epsilon: float, delta: float) -> None:
    for order in (2.0, 4.5, 32.0, 512.0):
        try:
            rule = RdpFilter(epsilon, delta, order)
        except ConfigError:
            with mp.workdps(50):
                assert renyi_epsilon(order, mp.mpf(0), delta) > epsilon * (1 - 1e-9)
            continue
        with mp.workdps(50):
            cap = mp.mpf(rule.limit.numerator) / rule.limit.denominator
            assert renyi_epsilon(order, cap, delta) <= epsilon
            assert renyi_epsilon(order, cap, delta) > epsilon - 1e-8 * (1 + epsilon)


@settings(max_examples=60, deadline=None)
@given(rate=st.floats(1e-12, 1), noise_multiplier=st.floats(0.06, 1e4), order=st.integers(2, 64))
def test_sampled_cost_is_never_below_the_exact_divergence(rate: float, noise_multiplier: float, order: int) -> None:
    cost = RdpFilter(1e6, 1e-5, order).cost(SampledGaussian(rate, noise_multiplier), Adjacency.ZERO_OUT)
    with mp.workdps(120):
        exact = sampled_divergence(rate, noise_multiplier, order)
        assert exact * (1 - mp.mpf("1e-100")) <= mp.mpf(cost.numerator) / cost.denominator <= exact * (1 + mp.mpf("1e-8"))


@pytest.mark.few(2)
@pytest.mark.parametrize(("rate", "noise_multiplier", "order"), [(0.1, 1.0, 8), (0.5, 2.0, 3), (0.01, 0.5, 4), (0.9, 5.0, 16)])
def test_replace_one_costs_at_least_what_opposite_contributions_show(rate: float, noise_multiplier: float, order: int) -> None:
    """Two clipped contributions of opposite sign, 1/2 and -1/2 in units of the sensitivity, by direct quadrature."""
    cost = RdpFilter(1e6, 1e-5, order).cost(SampledGaussian(rate, noise_multiplier), Adjacency.REPLACE_ONE)
    with mp.workdps(30):
        q, z, a = mp.mpf(rate), mp.mpf(noise_multiplier), order

        def density(x: mp.mpf, shift: mp.mpf) -> mp.mpf:
            return (1 - q) * mp.npdf(x, 0, z) + q * mp.npdf(x, shift, z)

        half = mp.mpf("0.5")
        points = [-12 * z, -2, 0, 2, a / 2, 12 * z + a]
        moment = mp.quad(lambda x: density(x, half) ** a * density(x, -half) ** (1 - a), sorted(points))
        exact = mp.log(moment) / (a - 1)
        assert exact <= mp.mpf(cost.numerator) / cost.denominator < 1.5 * exact


@pytest.mark.few(9)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 10, 49, 97, 1000, 12345])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-5), (0.3, 1e-9), (20.0, 0.01)])
@pytest.mark.heavy
def test_equal_shares_fit_exactly(count: int, epsilon: float, delta: float) -> None:
    rule = GdpFilter(epsilon, delta)
    assert accepted(rule, Gaussian(rule.share(count))) == count
    assert accepted(rule, Gaussian(rule.share(count, slack=0) * (1 + 1e-12))) == count - 1


@pytest.mark.parametrize(("scale", "expected"), [(1.0, 900), (1.5, 400), (2 / 3, 2025), (2.0, 225)])
def test_less_noise_is_stopped_earlier_by_its_square(scale: float, expected: int) -> None:
    """Two thirds of the noise (mu 3/2 as large) gets 4/9 of the releases; twice the sensitivity a quarter."""
    rule = GdpFilter(1.0, 1e-5)
    assert accepted(rule, Gaussian(rule.share(900) * scale)) == expected
    rdp = RdpFilter(1.0, 1e-5, 20.0)
    share = math.sqrt(2 * float(rdp.limit) / (20.0 * 900)) * (1 - 1e-12)
    assert accepted(rdp, Gaussian(share * scale)) == expected


def test_counted_events_cost_as_much_as_single_ones() -> None:
    for rule in (GdpFilter(1.0, 1e-5, ignore_sampling=True), RdpFilter(1.0, 1e-5, 16.0)):
        for one in (Gaussian(0.01), SampledGaussian(0.1, 3.0)):
            many = Gaussian(0.01, 41) if isinstance(one, Gaussian) else SampledGaussian(0.1, 3.0, 41)
            assert rule.cost(many, Adjacency.ZERO_OUT) == 41 * rule.cost(one, Adjacency.ZERO_OUT)


def test_a_filter_from_mu_admits_that_mu_and_hardly_more() -> None:
    for mu in (1e-6, 0.01, 0.3, 1.0, 7.0, 100.0):
        rule = GdpFilter.from_mu(mu, 1e-5)
        assert mu <= rule.mu <= mu * (1 + 1e-6) or (rule.epsilon == 0 and mu <= rule.mu)
        assert accepted(rule, Gaussian(mu), 2) >= 1


def test_sampling_is_refused_or_ignored_by_a_gdp_filter_never_credited() -> None:
    event = SampledGaussian(0.01, 2.0)
    with pytest.raises(ConfigError, match="RdpFilter"):
        GdpFilter(5.0, 1e-5).cost(event, Adjacency.ZERO_OUT)
    assert GdpFilter(5.0, 1e-5).cost(SampledGaussian(1.0, 2.0), Adjacency.ZERO_OUT) >= Fraction(1, 4)
    cost = GdpFilter(5.0, 1e-5, ignore_sampling=True).cost(event, Adjacency.ZERO_OUT)
    assert Fraction(1, 4) <= cost <= Fraction(1, 4) * (1 + Fraction(1, 10**15))


@settings(max_examples=50, deadline=None)
@given(noise_multiplier=st.floats(1e-99, 1e99))
def test_inverse_noise_is_rounded_up(noise_multiplier: float) -> None:
    cost = GdpFilter(1.0, 1e-5).cost(SampledGaussian(1.0, noise_multiplier), Adjacency.ZERO_OUT)
    assert cost >= 1 / Fraction(noise_multiplier) ** 2


def test_sampling_lowers_the_renyi_cost_but_less_under_replace_one() -> None:
    rule, event = RdpFilter(5.0, 1e-5, 8.0), SampledGaussian(0.1, 1.0)
    full = rule.cost(Gaussian(1.0), Adjacency.ZERO_OUT)
    assert full == rule.cost(SampledGaussian(1.0, 1.0), Adjacency.ZERO_OUT) == 4
    same_noise = SampledGaussian(0.1, 2.0)  # noise std 2C: multiplier 2 under zero-out, 1 under replace-one
    assert rule.cost(same_noise, Adjacency.ZERO_OUT) < rule.cost(event, Adjacency.REPLACE_ONE) < full
    assert rule.cost(SampledGaussian(0.0, 1.0), Adjacency.ZERO_OUT) == 0


@pytest.mark.parametrize("noise", [1e-100, 1e-99, 1e99, 1e100])
def test_extreme_noise_is_charged_without_overflow(noise: float) -> None:
    cost = RdpFilter(5.0, 1e-5, 8.0).cost(SampledGaussian(0.5, noise), Adjacency.ZERO_OUT)
    assert cost > 10**190 if noise < 1 else 0 <= cost < Fraction(1, 10**190)


@pytest.mark.parametrize(
    ("rate", "rounds", "epsilon", "delta"), [(0.01, 1000, 2.0, 1e-5), (0.1, 200, 1.0, 1e-6), (0.5, 50, 8.0, 1e-5)]
)
def test_a_calibrated_plan_fits_at_the_best_order(rate: float, rounds: int, epsilon: float, delta: float) -> None:
    def events(noise: float) -> list[SampledGaussian]:
        return [SampledGaussian(rate, noise, rounds)]

    noise = accountant.calibrate(epsilon, delta, events, accountant="rdp", adjacency=Adjacency.ZERO_OUT)
    order = best_order(epsilon, delta, events(noise), Adjacency.ZERO_OUT)
    rule = RdpFilter(epsilon, delta, order)
    assert rounds <= accepted(rule, SampledGaussian(rate, noise * (1 + 1e-6))) <= rounds * 1.001 + 1
    assert accepted(rule, SampledGaussian(rate, noise * 2 / 3)) < 0.7 * rounds
    parts = {
        a: rounds * float(subsampled.rdp(rate, noise, [a], adjacency=Adjacency.ZERO_OUT)[0]) / _limit(epsilon, delta, a)
        for a in ORDERS
    }
    assert order == min((a for a in ORDERS if parts[a] > 0), key=parts.__getitem__)


ORDERS = subsampled.ORDERS


def _limit(epsilon: float, delta: float, order: float) -> float:
    try:
        return float(RdpFilter(epsilon, delta, order).limit)
    except ConfigError:
        return -1.0


def test_no_order_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no Renyi order up to 4"):
        best_order(0.01, 1e-10, [Gaussian(0.1)], Adjacency.ZERO_OUT, orders=[2.0, 4.0])
    with pytest.raises(ConfigError, match="larger order"):
        RdpFilter(0.01, 1e-10, 2.0)


def test_a_fixed_plan_admits_its_releases_and_what_they_dominate() -> None:
    plan = FixedPlan(SampledGaussian(0.1, 2.0), 10)
    assert accepted(plan, SampledGaussian(0.1, 2.0)) == 10
    assert accepted(plan, SampledGaussian(0.05, 3.0, 4)) == 2
    assert accepted(plan, Gaussian(0.0)) == 10
    for event in (SampledGaussian(0.1, 1.999999), SampledGaussian(0.1000001, 2.0), Gaussian(0.1), Unbounded("raw")):
        with pytest.raises(ConfigError, match="fixed plan"):
            plan.cost(event, Adjacency.ZERO_OUT)
    plain = FixedPlan(Gaussian(0.5, 2), 3)
    assert accepted(plain, Gaussian(0.5)) == 6
    assert accepted(plain, SampledGaussian(0.3, 2.0)) == 6
    with pytest.raises(ConfigError, match="fixed plan"):
        plain.cost(Gaussian(math.nextafter(0.5, 1)), Adjacency.ZERO_OUT)
    assert accepted(FixedPlan(Gaussian(0.5), 0), Gaussian(0.5)) == 0


@settings(max_examples=100, deadline=None)
@given(z=st.floats(1e-3, 1e3), steps=st.integers(-2, 2))
def test_a_fixed_plan_compares_noise_without_rounding(z: float, steps: int) -> None:
    mu = 1 / z
    for _ in range(abs(steps)):
        mu = math.nextafter(mu, steps * math.inf)
    fits = Fraction(mu) * Fraction(z) <= 1
    try:
        FixedPlan(SampledGaussian(1.0, z), 1).cost(Gaussian(mu), Adjacency.ZERO_OUT)
    except ConfigError:
        assert not fits
    else:
        assert fits


@pytest.mark.parametrize(
    "make",
    [
        lambda: GdpFilter(-1.0, 1e-5),
        lambda: GdpFilter(math.nan, 1e-5),
        lambda: GdpFilter(math.inf, 1e-5),
        lambda: GdpFilter(1.0, 0.0),
        lambda: GdpFilter(1.0, 1.0),
        lambda: RdpFilter(1.0, 1e-5, 1.0),
        lambda: RdpFilter(1.0, 1e-5, math.inf),
        lambda: FixedPlan(Gaussian(0.1), -1),
        lambda: FixedPlan(Unbounded("raw"), 1),
        lambda: GdpFilter(1.0, 1e-5).share(0),
    ],
)
def test_filters_that_make_no_sense_are_refused(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_a_cost_that_is_known_at_one_order_counts_there_and_nowhere_else() -> None:
    event = OneOrder("a search", 12.0, 0.25)
    there = RdpFilter(2.0, 1e-5, 12.0)
    assert there.cost(event, Adjacency.ZERO_OUT) == Fraction(0.25) * (1 + Fraction(1, 10**9))
    budget = Budget(there, SCOPE)
    budget.spend(event)
    assert budget.spent > Fraction(0.25)
    for other in (RdpFilter(2.0, 1e-5, 12.5), GdpFilter(2.0, 1e-5), GdpFilter(2.0, 1e-5, ignore_sampling=True)):
        with pytest.raises(ConfigError):
            other.cost(event, Adjacency.ZERO_OUT)
    assert accountant.bound([event], 1e-5) == (math.inf, "none")
    assert event_from(*event_columns(event)) == event
    for order, divergence in ((1.0, 0.1), (2.0, -0.1), (2.0, math.inf)):
        with pytest.raises(ConfigError, match="order"):
            OneOrder("a search", order, divergence)
