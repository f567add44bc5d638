"""Time-Varying DP and DPA-LDP: each formula a second way, the exact cost of every schedule, and refinement on public losses."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, SampledGaussian, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.ledger.ledger import Ledger
from fedveil.methods.base import Scheduled
from fedveil.papers.ladp_fl.claim import allocated_std, epsilon_of_noise, falling_first_std, geometric_sum, zcdp_of
from fedveil.papers.ladp_fl.noise_schedules import DPALDP, TimeVaryingDP, priced
from method_kit import charged_mu, digits, job_of, planner, released, setting, stepped, trained, upload

LADP = {"local_epochs": 2, "batch_size": 50, "batch_clip": 20.0}
RELEASED = released([0.0] * 7)
NAMES = ("time-varying-dp", "dpa-ldp")


def ladp(**changes: Any) -> Any:
    base = {"training": LADP, "epsilon": 0.2, "noise_multiplier": None, "delta": 0.02}
    return setting(**{**base, "clients": 100, "cohort": 10, "rounds": 400, "records": 500, **changes})


# --- formulas ---


@given(st.floats(0.1, 50), st.floats(1e-9, 0.5))
def test_rho_gives_back_epsilon(epsilon: float, delta: float) -> None:
    rho = zcdp_of(epsilon, delta)
    assert rho + 2 * math.sqrt(rho * math.log(1 / delta)) == pytest.approx(epsilon, rel=1e-9)


@given(st.floats(0.5, 1.0), st.integers(1, 50), st.sampled_from(["naive", "zcdp"]))
def test_falling_noise_costs_epsilon_in_all(decay: float, rounds: int, accountant: str) -> None:
    """Round by round: sum c Delta / sigma_t = epsilon, or sum Delta^2 / (2 sigma_t^2) = rho."""
    first = falling_first_std(2.0, 0.01, 3.0, decay, rounds, accountant)
    stds = [first * decay**t for t in range(rounds)]
    if accountant == "naive":
        assert sum(math.sqrt(2 * math.log(125)) * 3.0 / std for std in stds) == pytest.approx(2.0)
    else:
        assert sum(9.0 / (2 * std**2) for std in stds) == pytest.approx(zcdp_of(2.0, 0.01))


def test_allocation_is_the_minimum_that_a_solver_finds() -> None:
    """sum kappa^(T-1-t) sigma_t^2 under sum 1 / (2 sigma_t^2) = rho, over log variances."""
    rounds, kappa, rho = 6, 0.7, zcdp_of(1.0, 1e-3)
    a = kappa ** np.arange(rounds - 1, -1, -1.0)

    def error(logs: np.ndarray[Any, Any]) -> float:
        shares = np.exp(logs) / np.exp(logs).sum()  # of rho
        return float((a / (2 * rho * shares)).sum())

    best = minimize(error, np.zeros(rounds), tol=1e-12)
    ours = [allocated_std(1.0, 1e-3, 1.0, kappa, rounds, t) ** 2 for t in range(rounds)]
    assert sum(1 / (2 * v) for v in ours) == pytest.approx(rho)
    assert float(a @ ours) == pytest.approx(best.fun, rel=1e-6)
    assert ours[1] / ours[0] == pytest.approx(math.sqrt(kappa))


def test_the_cost_of_allocation_tends_to_a_constant() -> None:
    """kappa = 0.97, T from 200 to 5,000: the bound grows by 10 %, with equal noise 25-fold."""

    def bounds(rounds: int) -> tuple[float, float]:
        a = 0.97 ** np.arange(rounds - 1, -1, -1.0)
        own = sum(w * allocated_std(1.0, 1e-3, 1.0, 0.97, rounds, t) ** 2 for t, w in enumerate(a.tolist()))
        return own, float(a.sum()) * rounds / (2 * zcdp_of(1.0, 1e-3))

    (short, even), (long, evener) = bounds(200), bounds(5000)
    assert long / short == pytest.approx(4378 / 3971, rel=1e-3)
    assert evener / even == pytest.approx(166667 / 6652, rel=1e-3)


def test_ladp_fls_sums_of_epsilon() -> None:
    """57.3 % over Full DP at v = 0.9979, 26.04 % at kappa^(1/4) = 0.9989, as the paper states them for T = 400."""
    full = 0.1 * 400 * 0.2
    varying = TimeVaryingDP(variant="published", source="ladp-fl", decay=0.9979).claim(ladp(delta=1e-4))
    allocated = DPALDP(variant="published", source="ladp-fl", contraction=0.9989**4).claim(ladp(delta=1e-4))
    assert varying is not None
    assert allocated is not None
    assert varying.epsilon / full == pytest.approx(1.573, abs=0.01)
    assert allocated.epsilon / full == pytest.approx(1.2604, abs=0.01)


def test_epsilon_read_off_the_noise() -> None:
    """Equation 17 inverts Theorem 1: noise of std c Delta / epsilon has that epsilon; half of it twice that."""
    std = math.sqrt(2 * math.log(62.5)) * 8 / 0.2
    assert epsilon_of_noise(std, 8.0, 0.02) == pytest.approx(0.2)
    assert epsilon_of_noise(std / 2, 8.0, 0.02) == pytest.approx(0.4)
    assert math.isinf(epsilon_of_noise(0.0, 8.0, 0.02))


# --- published plans ---


def test_published_noise_round_by_round() -> None:
    s = ladp()
    varying = TimeVaryingDP(variant="published", source="ladp-fl", decay=0.99).release(s)
    allocated = DPALDP(variant="published", source="ladp-fl", contraction=0.96).release(s)
    assert isinstance(varying, Scheduled)
    assert isinstance(allocated, Scheduled)
    assert [p.noise_std for p in varying.plans[:3]] == pytest.approx([115.03275 * 0.99**t for t in range(3)])
    assert [p.noise_std for p in allocated.plans[::4][:3]] == pytest.approx([115.03275 * 0.96**t for t in range(3)])
    whole = DPALDP(variant="published", contraction=0.96)
    assert whole.stds(s)[7] == pytest.approx(allocated_std(0.2, 0.02, 8.0, 0.96, 400, 7))
    naive = TimeVaryingDP(variant="published").first_std(s)
    assert naive == pytest.approx(115.03275 * geometric_sum(1 / 0.998, 400))
    for method in (whole, TimeVaryingDP(variant="published")):
        assert all(isinstance(e, Unbounded) for view in View for e in method.releases(s, view))
        assert (method.claim(s) or pytest.fail("no claim")).epsilon == 0.2
        with pytest.raises(ConfigError, match=r"training\.batch_clip"):
            method.calibrate(ladp(training={**LADP, "batch_clip": None}))


def test_the_l1_part_shrinks_the_model() -> None:
    uploads = [upload([1.0, -1.0, 0, 0, 0, 0, 0.5], [0.0] * 7), upload([1.0, 0.0, 0, 0, 0, 0, -0.1], [0.0] * 7)]
    model = torch.tensor([0.0, 0.2, 0.05, -3.0, 0, 0, 0])
    moved = model + stepped(DPALDP(l1=0.1), uploads, model)
    assert moved.tolist() == pytest.approx([0.9, -0.2, 0.0, -2.9, 0, 0, 0.1])


# --- proven ---


@given(st.floats(0.5, 1.0), st.integers(1, 30), st.integers(1, 30))
def test_no_choice_of_rounds_costs_more_than_constant_noise(decay: float, rounds: int, most: int) -> None:
    s = setting(rounds=rounds, max_participations=most)
    found = priced(s, [decay**t for t in range(rounds)])
    dearest = sorted((z**-2 for z in found), reverse=True)[: min(most, rounds)]
    assert sum(dearest) == pytest.approx(min(most, rounds) / s.z**2)
    assert all(b / a == pytest.approx(decay) for a, b in pairwise(found))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_the_ledger_holds_the_configured_epsilon(name: str, view: str, tmp_path: Path) -> None:
    options = {"decay": 0.7} if name == NAMES[0] else {"contraction": 0.3}
    config = digits({"name": name, **options}, privacy={"epsilon": 5.0, "view": view}, training={"clients_per_round": 12})
    done = trained(job_of(config, tmp_path / "ledger"))
    noise = [row["noise_norm"] for row in done.history]
    assert noise[1] / noise[0] == pytest.approx(0.7 if name == NAMES[0] else 0.3**0.25)
    for mu in charged_mu(tmp_path / "ledger").values():
        assert 5.0 * (1 - 1e-4) < epsilon_of(mu, 1e-3) <= 5.0


def test_sampled_rounds_are_priced_one_by_one() -> None:
    config = digits(
        {"name": "time-varying-dp", "decay": 0.8}, privacy={"epsilon": 2.0, "view": "aggregate"}, training={"sampling": "poisson"}
    )
    method, s = calibrated_setting(config)
    events = method.releases(s, View.AGGREGATE)
    assert [type(e) for e in events] == [SampledGaussian] * 3
    cost = bound(events, 1e-3, accountant="rdp", adjacency=Adjacency.ZERO_OUT)[0]
    assert 2.0 * (1 - 1e-3) < cost <= 2.0
    assert len(trained(job_of(config)).history) == 3


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_by_sample_each_round_is_charged_for_its_own_noise(view: str, tmp_path: Path) -> None:
    """DPA-LDP as its paper has it: one clipped gradient a round, whose noise falls; the ledger holds the configured epsilon."""
    training = {"local": "dp-sgd", "example_clip": 0.5, "local_steps": 1, "batch_size": 10, "clients_per_round": 12}
    privacy = {"epsilon": 3.0, "delta": 1e-3, "view": view, "unit": "record"}
    config = digits({"name": "dpa-ldp", "contraction": 0.3}, privacy=privacy, training=training)
    method, s = calibrated_setting(config)
    trained(job_of(config, tmp_path / "ledger"))
    with Ledger.open(tmp_path / "ledger") as ledger:
        charged = [entry for _, _, entry in ledger.entries()]
    first = [entry.event for entry in charged if entry.client == charged[0].client]
    steps = [event for event in first if isinstance(event, SampledGaussian)]
    assert len(steps) == len(first) == 3
    later = sorted({e.noise_multiplier for e in steps}, reverse=True)
    assert later[1] / later[0] == pytest.approx(0.3**0.25, rel=1e-6)
    planned = method.releases(s, View(view))
    assert sorted({e.noise_multiplier for e in planned if isinstance(e, SampledGaussian)}, reverse=True) == later
    cost = bound(planned, 1e-3, accountant="rdp", adjacency=Adjacency.ZERO_OUT)[0]
    assert 3.0 * (1 - 1e-3) < cost <= 3.0
    cheaper = [replace(e, noise_multiplier=later[0]) for e in steps]  # as if every round had the noise of the first
    assert bound(cheaper, 1e-3, accountant="rdp", adjacency=Adjacency.ZERO_OUT)[0] < cost


def test_by_sample_a_client_pays_for_the_quietest_rounds_it_can_be_in() -> None:
    s = setting(unit=Unit.RECORD, training={"local": "dp-sgd", "example_clip": 0.5}, rounds=6, max_participations=2)
    method = DPALDP(contraction=0.2)
    every = [e.noise_multiplier for e in method.releases(replace(s, max_participations=None), View.SERVER)]
    two = [e.noise_multiplier for e in method.releases(s, View.SERVER)]
    assert len(every) == 6
    assert [b / a for a, b in pairwise(two)] == pytest.approx([0.2**-0.25])
    protected = replace(s, scope=replace(s.scope, unit=Unit.CLIENT))
    assert all(isinstance(e, Unbounded) for e in method.releases(protected, View.SERVER))


@given(st.lists(st.floats(0.1, 3.0), min_size=12, max_size=12), st.integers(1, 4), st.floats(0.5, 1.0))
def test_refined_noise_costs_the_same_on_every_path(losses: list[float], every: int, decay: float) -> None:
    s = setting(View.AGGREGATE, rounds=12)
    method = TimeVaryingDP(refine_every=every, decay=decay, refinement=0.8, clip=1.0)
    policy, spent = planner(method, s), 0.0
    state = policy.start()
    for t, loss in enumerate(losses):
        plan = policy.plan(replace(RELEASED, round=t), state)
        spent += float(plan.noise_std) ** -2
        state = policy.observe(state, replace(upload([0.0] * 7, [0.0] * 7), round=t, public_loss=loss))
    assert spent == pytest.approx(12 / s.z**2)
    refined = {t for t in range(2 * every, 12, every) if losses[t - 1] >= losses[t - every - 1]}
    assert state["decay"] == pytest.approx(decay * 0.8 ** len(refined))


def test_refinement_needs_a_public_loss_and_one_common_budget() -> None:
    method = TimeVaryingDP(refine_every=2)
    with pytest.raises(ConfigError, match=r"privacy\.view = 'aggregate'"):
        method.calibrate(setting())
    with pytest.raises(ConfigError, match=r"training\.sampling = 'fixed'"):
        method.calibrate(setting(View.AGGREGATE, sampling="poisson"))
    with pytest.raises(ConfigError, match=r"data\.public_fraction"):
        method.calibrate(setting(View.AGGREGATE))
    public = setting(View.AGGREGATE, public_split=True)
    assert method.assumptions(public) == ("data.public_fraction sets examples aside that are public",)
    assert not TimeVaryingDP().assumptions(public)
    assert not method.assumptions(setting(View.AGGREGATE))
    policy = planner(method, setting(View.AGGREGATE))
    with pytest.raises(ConfigError, match=r"data\.public_fraction"):
        policy.observe(policy.start(), replace(upload([0.0] * 7, [0.0] * 7), round=1))
