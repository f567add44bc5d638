"""The accountant, filters and ledger with the kinds of secret samples beyond the hidden Poisson sample."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.accounting import accountant, attack_power
from fedveil.accounting.accountant import bound, calibrate, delta_bound, rdp_curve
from fedveil.accounting.gaussian import epsilon_of, tpr
from fedveil.accounting.types import (
    Adjacency,
    Event,
    FixedSampleGaussian,
    Gaussian,
    SampledGaussian,
    SecretSample,
    SeenCountGaussian,
    Unbounded,
    Unit,
    UserRecordsGaussian,
    View,
)
from fedveil.errors import ConfigError
from fedveil.ledger.budgeted_ledger import summary
from fedveil.ledger.entry import Entry, from_row, to_row
from fedveil.ledger.filters import FixedPlan, GdpFilter, RdpFilter, best_order
from fedveil.ledger.ledger import Ledger
from reference_costs import epsilon_pld

ZERO, REPLACE = Adjacency.ZERO_OUT, Adjacency.REPLACE_ONE
SEEN, FIXED, USER = (
    SeenCountGaussian(50, 0.1, 2.0, 20),
    FixedSampleGaussian(40, 4, 2.0, 20),
    UserRecordsGaussian(3, 0.05, 2.0, 20),
)
KINDS = (SEEN, FIXED, USER)
kinds = st.one_of(
    st.builds(SeenCountGaussian, st.integers(2, 300), st.floats(0.02, 0.6), st.floats(0.8, 4), st.integers(1, 30)),
    st.builds(FixedSampleGaussian, st.just(30), st.integers(1, 29), st.floats(0.8, 4), st.integers(1, 30)),
    st.builds(UserRecordsGaussian, st.integers(1, 5), st.floats(0.02, 0.6), st.floats(0.8, 4), st.integers(1, 30)),
)
others = st.one_of(
    st.builds(SampledGaussian, st.floats(0.02, 0.6), st.floats(0.8, 4), st.integers(1, 30)),
    st.builds(Gaussian, st.floats(0.05, 1), st.integers(1, 3)),
)


@settings(max_examples=8, deadline=None)
@given(kinds, st.lists(others, max_size=2), st.sampled_from([ZERO, REPLACE, None]))
@pytest.mark.heavy
def test_every_accountant_bounds_and_auto_is_the_best_of_the_cheap_ones(
    event: Event, more: list[Event], adjacency: Adjacency | None
) -> None:
    events = [event, *more]
    each = {name: bound(events, 1e-5, accountant=name, adjacency=adjacency)[0] for name in ("gdp", "rdp", "pld")}  # type: ignore[arg-type]
    auto, name = bound(events, 1e-5, adjacency=adjacency)
    assert auto == min(each["gdp"], each["pld"]) == each[name]
    assert each["pld"] <= each["rdp"] * 1.003 + 1e-3
    assert each["pld"] <= each["gdp"] * 1.003 + 1e-3
    assert delta_bound(events, auto, adjacency=adjacency)[0] <= 1e-5 * (1 + 1e-3)


@pytest.mark.parametrize("event", KINDS)
def test_seen_fixed_and_several_records_cost_more_than_a_hidden_sample_of_one(event: SecretSample) -> None:
    rate = 0.1 if event is not USER else 0.05
    hidden = bound([SampledGaussian(rate, 2.0, 20)], 1e-5, adjacency=ZERO)[0]
    mine = bound([event], 1e-5, adjacency=ZERO)[0]
    assert hidden * 1.1 < mine < epsilon_of(math.sqrt(20) / 2 * (3 if event is USER else 1), 1e-5)
    assert mine < bound([event], 1e-5)[0]


@pytest.mark.parametrize("event", KINDS)
@pytest.mark.parametrize("adjacency", [ZERO, REPLACE])
def test_calibration_meets_its_target(event: SecretSample, adjacency: Adjacency) -> None:
    z = calibrate(2.0, 1e-5, lambda z: [replace(event, noise_multiplier=z)], adjacency=adjacency)
    assert 1.999 < bound([replace(event, noise_multiplier=z)], 1e-5, adjacency=adjacency)[0] <= 2.0


def test_orders_fixed_in_advance_and_counts() -> None:
    for event in KINDS:
        once = rdp_curve(replace(event, count=1), [2.0, 7.5], adjacency=ZERO)
        assert rdp_curve(event, [2.0, 7.5], adjacency=ZERO) == pytest.approx(20 * once, rel=1e-12)
    costs = [bound([replace(SEEN, count=n)], 1e-5, adjacency=ZERO)[0] for n in (1, 5, 20, 80)]
    assert all(more > less + 0.05 for less, more in pairwise(costs))


def test_tiny_deltas_are_left_to_the_renyi_bound() -> None:
    value, name = bound([SEEN], 1e-12, adjacency=ZERO)
    assert (name, math.isfinite(value)) == ("rdp", True)
    assert value > bound([SEEN], 1e-9, adjacency=ZERO)[0]


@pytest.mark.heavy
def test_large_populations_and_long_runs() -> None:
    for clients, rate, rounds in ((10**6, 0.01, 100), (10**6, 1e-4, 10**4), (1000, 0.05, 10**4)):
        seen = epsilon_pld(SeenCountGaussian(clients, rate, 2.0, rounds), 1e-6, adjacency=ZERO)
        hidden = bound([SampledGaussian(rate, 2.0, rounds)], 1e-6, adjacency=ZERO)[0]
        crowd = epsilon_pld(FixedSampleGaussian(clients, round(clients * rate), 2.0, rounds), 1e-6, adjacency=ZERO)
        assert hidden < crowd <= seen * 1.001
        assert seen <= crowd * 1.05  # many participants: their number hardly varies


def test_power_of_an_attacker() -> None:
    epsilon = bound([SEEN], 1e-5, adjacency=ZERO)[0]
    assert attack_power.exact_mu([SEEN]) is None
    assert attack_power.exact_mu([replace(USER, rate=1.0, count=4)]) == pytest.approx(3)
    assert attack_power.exact_mu([Unbounded("raw")]) is None
    best = attack_power.largest_tpr([SEEN], epsilon, 1e-5, 0.01, adjacency=ZERO)
    assert 0.01 < best < tpr(math.sqrt(20) / 2, 0.01)


def test_filters_charge_the_new_kinds() -> None:
    order = best_order(3.0, 1e-5, [SEEN], ZERO, orders=(4.0, 8.0, 16.0))
    rule = RdpFilter(3.0, 1e-5, order)
    assert float(rule.cost(SEEN, ZERO)) == pytest.approx(float(rdp_curve(SEEN, [order], adjacency=ZERO)[0]), rel=1e-8)
    for event in KINDS:
        assert 0 < rule.cost(event, ZERO) <= rule.cost(Gaussian(1.5 if event is USER else 0.5, 20), ZERO)
        with pytest.raises(ConfigError, match="GDP filter"):
            GdpFilter(1.0, 1e-5).cost(event, ZERO)
    assert float(GdpFilter(1.0, 1e-5, ignore_sampling=True).cost(USER, ZERO)) == pytest.approx(20 * 1.5**2)
    plan = FixedPlan(replace(SEEN, count=1), 20)
    assert plan.cost(replace(SEEN, rate=0.05, noise_multiplier=3.0), ZERO) == 20
    for other in (
        replace(SEEN, rate=0.2),
        replace(SEEN, clients=40),
        FIXED,
        SampledGaussian(0.1, 2.0),
        replace(SEEN, noise_multiplier=1.0),
    ):
        with pytest.raises(ConfigError, match="not covered"):
            plan.cost(other, ZERO)


def entry(event: Event, view: View = View.AGGREGATE) -> Entry:
    client = -1 if view is View.AGGREGATE else 0
    return Entry("run", 0, client, Unit.CLIENT, ZERO, view, event, (1.0,), (2.0,), 10, 10, 5)


@pytest.mark.parametrize("event", KINDS)
def test_ledger_keeps_them(event: SecretSample, tmp_path: Path) -> None:
    row = to_row(1, 0.0, entry(event))
    assert from_row(row)[2].event == event
    with Ledger.create(tmp_path / "ledger.db", "run") as ledger:
        ledger.charge(entry(event))
        (total,) = summary(ledger)
        assert (total.sampled, total.releases) == (20, 20)
    with Ledger.open(tmp_path / "ledger.db") as again:
        assert [kept.event for _, _, kept in again.entries()] == [event]


def test_a_server_that_sees_who_takes_part_gets_no_amplification() -> None:
    for event in (SEEN, FIXED):
        with pytest.raises(ConfigError, match="no amplification"):
            entry(event, View.SERVER)
    assert entry(USER, View.SERVER).event == USER


def test_unknown_kinds_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="SeenCountGaussian, FixedSampleGaussian, UserRecordsGaussian"):
        accountant.bound(["raw"], 1e-5)  # type: ignore[list-item]
    assert bound([SEEN, Unbounded("raw")], 1e-5) == (math.inf, "none")
