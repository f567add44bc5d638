"""The second path of verification beside fedveil.accounting, dp-accounting, and the price list of the door."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from fedveil.accounting import gaussian
from fedveil.accounting.accountant import bound
from fedveil.accounting.attack_power import largest_tpr, tpr_of
from fedveil.accounting.selection import Selection
from fedveil.accounting.types import Adjacency, Gaussian, SampledGaussian
from fedveil.ledger.entry import event_columns
from fedveil.mechanism.cost import plan_mu
from fedveil.mechanism.plan import Extra, Plan
from fedveil.verify.row_costs import Expected, RowCosts
from fedveil.verify.second_path import Curve, gaussian_epsilon
from method_kit import layout

GRID = list(itertools.product((0.01, 0.1, 0.5), (0.7, 1.0, 3.0), (1, 50, 1000), (1e-3, 1e-6)))
SPREAD = GRID[::7]
"""Each number of rounds with each delta."""


def sampled(q: float, z: float, rounds: int, delta: float, adjacency: Adjacency, mu: float = 0.0) -> Curve:
    return Curve([(("sampled_gaussian", q, z), rounds)], mu**2, delta, str(adjacency))


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 3.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-10])
def test_gaussian_releases_agree_to_nine_digits(mu: float, delta: float) -> None:
    expected, _ = bound([Gaussian(mu)], delta)
    assert gaussian_epsilon(mu, delta) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    if expected > 0:
        assert gaussian_epsilon(0.99 * mu, delta) < expected * (1 - 1e-4)
    assert Curve((), mu**2, delta, "zero_out").true_positives(0.05) == pytest.approx(gaussian.tpr(mu, 0.05), rel=1e-9)


@pytest.mark.heavy
@pytest.mark.parametrize("spread", [SPREAD[::3], pytest.param(SPREAD, marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_sampled_releases_agree_with_the_accountant(adjacency: Adjacency, spread: list[tuple[float, float, int, float]]) -> None:
    for q, z, rounds, delta in spread:
        expected, _ = bound([SampledGaussian(q, z, rounds)], delta, accountant="pld", adjacency=adjacency)
        found = sampled(q, z, rounds, delta, adjacency).epsilon
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-6), (q, z, rounds, delta)


@pytest.mark.parametrize(
    ("q", "z", "rounds", "delta"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (number % 5 != 1)) for number, one in enumerate(SPREAD)],
)
def test_sampled_releases_agree_with_dp_accounting(q: float, z: float, rounds: int, delta: float) -> None:
    accountant = PLDAccountant()
    accountant.compose(dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(z)), rounds)
    expected = accountant.get_epsilon(delta)
    assert sampled(q, z, rounds, delta, Adjacency.ZERO_OUT).epsilon == pytest.approx(expected, rel=2e-3, abs=1e-4)


@pytest.mark.few(4)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("delta", [1e-5, 1e-11, 1e-15, 1e-40, 1e-250])
@pytest.mark.parametrize(("q", "z"), [(0.001, 0.7), (0.1, 2.0), (0.5, 0.3)])
def test_one_sampled_release_agrees_at_any_delta(q: float, z: float, delta: float, adjacency: Adjacency) -> None:
    expected, _ = bound([SampledGaussian(q, z)], delta, adjacency=adjacency)
    assert sampled(q, z, 1, delta, adjacency).epsilon == pytest.approx(expected, rel=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_a_plain_release_among_sampled_ones_counts(adjacency: Adjacency) -> None:
    expected, _ = bound([SampledGaussian(0.1, 1.0, 50), Gaussian(0.7)], 1e-5, accountant="pld", adjacency=adjacency)
    assert sampled(0.1, 1.0, 50, 1e-5, adjacency, mu=0.7).epsilon == pytest.approx(expected, rel=1e-3)
    assert sampled(0.1, 1.0, 50, 1e-5, adjacency).epsilon < 0.99 * expected


def test_one_percent_less_noise_or_rounds_is_another_number() -> None:
    honest = sampled(0.1, 1.0, 100, 1e-5, Adjacency.ZERO_OUT).epsilon
    assert sampled(0.1, 1.01, 100, 1e-5, Adjacency.ZERO_OUT).epsilon < honest * (1 - 3e-3)
    assert sampled(0.099, 1.0, 100, 1e-5, Adjacency.ZERO_OUT).epsilon < honest * (1 - 3e-3)
    assert sampled(0.1, 1.0, 99, 1e-5, Adjacency.ZERO_OUT).epsilon < honest * (1 - 3e-3)


def test_the_true_positive_rate_is_at_most_that_of_the_promise() -> None:
    curve = sampled(0.1, 1.0, 50, 1e-3, Adjacency.ZERO_OUT)
    promised = 1 - math.exp(-curve.epsilon) * (1 - 1e-3 - 0.05)
    assert 0.05 < curve.true_positives(0.05) < min(promised, math.exp(curve.epsilon) * 0.05 + 1e-3)
    assert curve.true_positives(0.05) > sampled(0.1, 1.2, 50, 1e-3, Adjacency.ZERO_OUT).true_positives(0.05)


def test_what_it_cannot_compute_it_refuses() -> None:
    with pytest.raises(NotImplementedError, match="fixed_sample"):
        Curve([(("fixed_sample_gaussian:9:3", 0.3, 1.0), 1)], 0.0, 1e-5, "zero_out")


@pytest.mark.few(1)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize(
    ("q", "z", "rounds", "delta"),
    [
        (0.5, 0.3, 5000, 1e-5),
        (0.05, 0.04, 1500, 1e-6),
        (0.05, 0.0309, 1500, 1e-6),
        (0.25, 0.032, 3, 1e-3),
    ],
)
def test_with_little_noise_it_still_tells_a_bound(q: float, z: float, rounds: int, delta: float, adjacency: Adjacency) -> None:
    events, curve = [SampledGaussian(q, z, rounds)], sampled(q, z, rounds, delta, adjacency)
    stated, _ = bound(events, delta, adjacency=adjacency)
    assert 0.9 * stated < curve.epsilon < stated * (1 + 1e-3)
    assert sampled(q, 1.01 * z, rounds, delta, adjacency).epsilon < curve.epsilon * (1 - 5e-3)
    tpr = largest_tpr(events, stated, delta, 0.05, adjacency=adjacency)
    assert 1 - 0.95 * (1 - q) ** rounds < curve.true_positives(0.05) * (1 + 1e-3)
    assert min(curve.true_positives(0.05), 1.0) <= tpr


@pytest.mark.few(2)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize("delta", [1e-3, 1e-9])
@pytest.mark.parametrize(("q", "z"), [(4 / 33, 0.027), (0.3, 0.015), (0.1, 0.0001)])
def test_one_sampled_release_agrees_at_any_epsilon(q: float, z: float, delta: float, adjacency: Adjacency) -> None:
    expected, _ = bound([SampledGaussian(q, z)], delta, adjacency=adjacency)
    assert sampled(q, z, 1, delta, adjacency).epsilon == pytest.approx(expected, rel=1e-9)


@pytest.mark.few(1)
@pytest.mark.parametrize(("adjacency", "sizes"), [(Adjacency.ZERO_OUT, 1 / 2), (Adjacency.REPLACE_ONE, 1 / 8)])
def test_almost_without_noise_the_number_of_rounds_counts(adjacency: Adjacency, sizes: float) -> None:
    """At delta 1e-5 a client takes part in at most 7 of 100 rounds; each tells sizes / z^2 of it, up to a few deviations."""
    assert binom.sf(7, 100, 0.01) < 1e-5 < binom.sf(6, 100, 0.01)
    assert sampled(0.01, 0.001, 100, 1e-5, adjacency).epsilon == pytest.approx(7 * sizes * 1e6, rel=5e-3)


LAYOUT = layout({"a": (3,), "b": (2, 2), "c": (5,)})
SIZES = st.floats(0.01, 10.0)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Clips of the whole, of layers or of both, a support, extras."""
    layers = draw(st.booleans())
    support = torch.tensor(draw(st.lists(st.booleans(), min_size=12, max_size=12)))
    return Plan(
        clip=draw(st.one_of(SIZES, st.just(math.inf))) if layers else draw(SIZES),
        layer_clip=torch.tensor(draw(st.lists(SIZES, min_size=3, max_size=3)), dtype=torch.float64) if layers else None,
        noise_std=torch.tensor(draw(st.lists(SIZES, min_size=3, max_size=3)), dtype=torch.float64),
        support=support if draw(st.booleans()) and bool(support.any()) else None,
        extras={"control": Extra(draw(SIZES), draw(SIZES))} if draw(st.booleans()) else {},
    )


@given(plans(), st.sampled_from([1, 2]))
@settings(max_examples=200)
def test_rows_cost_what_the_door_charges(plan: Plan, factor: int) -> None:
    mu = plan_mu(plan, LAYOUT, factor)
    assert isinstance(mu, float)
    row = row_of(plan, mu, factor)
    assert verdict(row) == ""
    for wrong in (0.99 * mu, 1.01 * mu):
        assert "give" in verdict({**row, "mu": wrong})


def row_of(plan: Plan, mu: float, factor: int) -> dict[str, object]:
    """The columns of the ledger, written as docs/ledger.md says."""
    parts = [True] * 3 if plan.support is None else [bool(part.any()) for part in LAYOUT.split(plan.support)]
    clips = [plan.clip] * 3 if plan.layer_clip is None else plan.layer_clip.tolist()
    clips = [clip if sent else 0.0 for clip, sent in zip(clips, parts, strict=True)]
    stds = plan.noise_std.tolist()
    extras = list(plan.extras.values())
    names = ("event", "mu", "rate", "noise_multiplier", "count", "reason")
    return {
        **dict(zip(names, event_columns(Gaussian(mu)), strict=True)),
        "seq": 1,
        "round": 0,
        "client": 3,
        "unit": "client",
        "adjacency": "zero_out" if factor == 1 else "replace_one",
        "view": "server",
        "run": "r",
        "dimension": 12,
        "coordinates": 12,
        "participants": 1,
        "note": "",
        "reads": "[]",
        "grid": "[-20, -20, -20]",
        "clip": json.dumps([*(None if math.isinf(c) else c for c in clips), *(e.clip for e in extras)]),
        "noise_std": json.dumps([*stds, *(e.noise_std for e in extras)]),
        "extras": json.dumps(list(plan.extras)),
        "whole_clip": None if math.isinf(plan.clip) else plan.clip,
        "mechanism": "independent",
    }


def verdict(row: dict[str, object]) -> str:
    expected = Expected(("client", str(row["adjacency"]), "server"), clients=10, kinds=frozenset([("gaussian", None)]))
    costs = RowCosts(expected)
    costs.add(row, "r")
    return costs.wrong


@pytest.mark.parametrize(("runs", "shape"), [(1.05, 0.0), (3, 0.0), (10, -0.9), (10, 1.0), (1000, -0.5)])
@pytest.mark.parametrize(("mu", "delta"), [(0.05, 1e-3), (1.0, 1e-12), (30.0, 1e-5)])
def test_the_best_of_gaussian_runs_agrees_to_nine_digits(runs: float, shape: float, mu: float, delta: float) -> None:
    expected, _ = Selection(runs, shape).bound([Gaussian(mu)], delta, Adjacency.ZERO_OUT)
    assert Curve((), mu**2, delta, "zero_out", (runs, shape)).epsilon == pytest.approx(expected, rel=1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize("adjacency", list(Adjacency))
@pytest.mark.parametrize(("runs", "shape", "mu"), [(3, 0.0, 0.0), (10, 0.0, 0.05), (30, -0.5, 0.05), (10, 1.0, 0.2)])
def test_the_best_of_a_random_number_of_runs_agrees_with_the_accountant(
    runs: float, shape: float, mu: float, adjacency: Adjacency
) -> None:
    events = [SampledGaussian(0.1, 5.7, 60), Gaussian(mu)]
    expected, _ = Selection(runs, shape).bound(events, 1e-5, adjacency)
    found = Curve([(("sampled_gaussian", 0.1, 5.7), 60)], mu**2, 1e-5, str(adjacency), (runs, shape))
    assert found.epsilon == pytest.approx(expected, rel=2e-4)
    assert found.true_positives(0.05) == pytest.approx(tpr_of(found.epsilon, 1e-5, 0.05), rel=1e-9)
    alone, _ = Selection(1).bound(events, 1e-5, adjacency)
    assert found.epsilon > 1.25 * alone
