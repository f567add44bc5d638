"""Noisy-FedAvg: how far clipped steps go, noise in shares, the printed claim beside composition, and the projected last model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.last_iterate import final_mu, final_mu_constant
from fedveil.accounting.types import Adjacency, Gaussian, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.experiment.certify import certify, certify_config
from fedveil.experiment.config import parse
from fedveil.federation.clients import Clients
from fedveil.federation.round import client_round
from fedveil.mechanism.grid import from_grid, to_grid
from fedveil.mechanism.plan import Plan, Upload
from fedveil.methods.base import Mean, SumServer
from fedveil.methods.projected import Projected, Trajectory, assumptions_of, last_model_mu
from fedveil.methods.run_cost import events_in_view
from fedveil.methods.setting import Setting
from fedveil.papers.convergent_dp.claim import FedAvgClaim, StepRates, linear_loss_mu
from fedveil.papers.convergent_dp.method import NoisyFedAvg, trajectory, upload_std
from fedveil.release.release_layout import ReleaseLayout
from fedveil.release.sealed import SealedUpload
from fedveil.training.local import Client, Plain
from method_kit import (
    charged_mu,
    digits,
    first_task,
    job_of,
    method_releases_mu,
    planner,
    released,
    setting,
    stepped,
    trained,
)

SCHEDULES = ["constant", "cyclic", "stage-wise", "iterative"]
TRAINING = {"local_steps": 3, "batch_clip": 2.0, "optimizer": {"lr": 0.1}, "clients_per_round": 12}


THREE_STEPS = {"local_steps": 3, "optimizer": {"lr": 0.5}, "batch_clip": 2.0}
"""K = 3 steps at rate 0.5 with V = 2: V mu K = 3."""


def noisy(
    view: View = View.AGGREGATE, schedule: str = "constant", training: Mapping[str, Any] | None = None, **changes: Any
) -> Setting:
    training = {**THREE_STEPS, "schedule": schedule, **(training or {})}
    return setting(view, training=training, **{"rounds": 4, **changes})


def mu_of(events: Any) -> float:
    assert all(isinstance(e, Gaussian) for e in events), events
    return math.sqrt(sum(e.count * e.mu**2 for e in events))


# --- how far K steps go ---


@pytest.mark.parametrize(
    ("schedule", "bounds"),
    [
        ("constant", [3.0]),
        ("cyclic", [1 + 1 / 2 + 1 / 3]),
        ("stage-wise", [3.0, 3 / 2, 1.0, 3 / 4]),
        ("iterative", [1 + 1 / 2 + 1 / 3, 1 / 4 + 1 / 5 + 1 / 6, 1 / 7 + 1 / 8 + 1 / 9, 1 / 10 + 1 / 11 + 1 / 12]),
    ],
)
def test_bounds_of_the_four_schedules(schedule: str, bounds: list[float]) -> None:
    assert trajectory(noisy(schedule=schedule)).tolist() == pytest.approx(bounds)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_update_goes_further_and_an_aligned_one_goes_as_far(schedule: str, tmp_path: Path) -> None:
    """From the zero model the gradient of a single example never turns; far from its optimum each step has length rate * V."""
    training = {**TRAINING, "schedule": schedule, "batch_clip": 1e-3}
    config = digits({"name": "noisy-fedavg", "sigma": 1e-9}, training=training, privacy={"view": "server"})
    job = job_of(config, tmp_path / "a")
    bound = float(trajectory(job.setting)[0])
    assert max(float(u.vector.norm()) for u in _uploads(job, job.context.clients)) <= bound * (1 + 1e-4)
    job = job_of(config, tmp_path / "b")
    job.context.model.vector.zero_()
    x = torch.full((1, *job.context.clients.x.shape[1:]), 50.0)
    (aligned,) = _uploads(job, replace(job.context.clients, x=x, y=torch.tensor([0]), offsets=np.array([0, 1])))
    assert float(aligned.vector.norm()) == pytest.approx(bound, rel=1e-3)


def _uploads(job: Any, clients: Clients) -> list[Upload]:
    context = replace(job.context, clients=clients)
    found = [client_round(context, first_task(job, c)).release for c in range(len(clients))]
    return [s.upload for s in found if isinstance(s, SealedUpload)]


# --- noise and its cost ---


def test_sigma_is_the_noise_of_one_upload_in_every_view() -> None:
    for view, shares in ((View.SERVER, 1), (View.AGGREGATE, 3), (View.FINAL, 4)):
        method = NoisyFedAvg(sigma=0.7)
        s = method.calibrate(noisy(view, noise_multiplier=None))
        policy = planner(method, s)
        plan = policy.plan(released([0.0] * 7), {})
        assert isinstance(policy.part, Trajectory)
        assert isinstance(plan, Plan)
        assert (plan.clip, plan.noise_std, plan.place) == (3.0, pytest.approx(0.7), "upload")
        assert s.z == pytest.approx(0.7 * math.sqrt(shares) / 3)
    with pytest.raises(ConfigError, match=r"method\.sigma"):
        NoisyFedAvg(sigma=0.7).calibrate(noisy())


def test_uploads_carry_the_planned_noise(tmp_path: Path) -> None:
    """Clients that hardly move release noise: of sigma / sqrt 12 on the mean, and after 12 rounds sigma on the model."""
    config = digits({"name": "noisy-fedavg", "sigma": 0.5}, training={**TRAINING, "optimizer": {"lr": 1e-9}, "rounds": 12})
    job = job_of(config, tmp_path / "l")
    begin = job.context.model.vector.clone()
    progress = trained(job)
    planned = [row["noise_norm"] for row in progress.history]
    assert planned == pytest.approx([0.5 / math.sqrt(12) * math.sqrt(650)] * 12)
    assert float((progress.model - begin).std()) == pytest.approx(0.5, rel=0.1)


def test_composition_by_hand() -> None:
    """sigma 1.5 on each of 4 uploads, C = 3: one upload mu = 2 a round; of a sum a client knows one noise; 4 rounds double it."""
    summed = 2 / math.sqrt(3) * math.sqrt(4)
    method = NoisyFedAvg(sigma=1.5)
    server, central = method.calibrate(noisy(View.SERVER, noise_multiplier=None)), method.calibrate(noisy(noise_multiplier=None))
    assert mu_of(method.releases(server, View.SERVER)) == pytest.approx(2 * math.sqrt(4))
    assert mu_of(method.releases(central, View.AGGREGATE)) == pytest.approx(summed)
    assert mu_of(method.releases(server, View.AGGREGATE)) == pytest.approx(summed)
    assert mu_of(method.releases(central, View.SERVER)) == pytest.approx(2 * math.sqrt(4))
    doubled = replace(central, scope=replace(central.scope, adjacency=Adjacency.REPLACE_ONE))
    assert mu_of(method.releases(doubled, View.AGGREGATE)) == pytest.approx(2 * summed)


def test_rounds_cost_what_their_rate_says() -> None:
    """Stage-wise: mu_t = 3 / (t + 1) / (sigma sqrt 3), and only the dearest rounds that one client may be in."""
    method = NoisyFedAvg(sigma=1.5)
    s = method.calibrate(noisy(schedule="stage-wise", noise_multiplier=None))
    assert mu_of(method.releases(s, View.AGGREGATE)) == pytest.approx(math.sqrt(4 / 3 * (1 + 1 / 4 + 1 / 9 + 1 / 16)))
    twice = replace(s, max_participations=2)
    assert mu_of(method.releases(twice, View.AGGREGATE)) == pytest.approx(math.sqrt(4 / 3 * (1 + 1 / 4)))


def test_survivors_and_colluders_shrink_the_noise_of_a_sum() -> None:
    """3 guaranteed survivors of which 1 colludes leave two noises of four; a server sees each upload's own noise anyway."""
    method = NoisyFedAvg(sigma=1.5)
    s = method.calibrate(noisy(noise_multiplier=None, min_survivors=3, colluders=1))
    assert mu_of(method.releases(s, View.AGGREGATE)) == pytest.approx(math.sqrt(2) * math.sqrt(4))
    assert upload_std(s, trajectory(s)) == pytest.approx(1.5)
    assert mu_of(method.releases(s, View.SERVER)) == pytest.approx(2 * math.sqrt(4))
    with pytest.raises(ConfigError, match=r"min_survivors \(1\) must exceed privacy.colluders \(1\)"):
        method.calibrate(noisy(noise_multiplier=None, min_survivors=1, colluders=1))


@pytest.mark.parametrize(("cohort", "colluders"), [(2, 0), (3, 1), (10, 0), (10, 1), (10, 4), (100, 0)])
def test_a_fellow_client_knows_its_own_share(cohort: int, colluders: int) -> None:
    """Its share leaves n - 1 of n noises, as one colluder does, and all of them to an outsider, who took no part."""
    method = NoisyFedAvg(sigma=1.5, project_to=2.0)
    s = method.calibrate(noisy(View.FINAL, noise_multiplier=None, clients=200, cohort=cohort, colluders=colluders, rounds=10**6))
    known = max(colluders, 1)
    assert [s.unknown_noises_in(view) for view in View] == [1, cohort - known, cohort - colluders]
    event = method.releases(s, View.AGGREGATE)[0]
    assert isinstance(event, Gaussian)
    assert event.mu == pytest.approx(3 / (1.5 * math.sqrt(cohort - known)), rel=1e-12)
    honest = method.calibrate(replace(s, noise_multiplier=None, colluders=0))
    scaled = bound_of_last(method, honest) * math.sqrt(cohort / (cohort - colluders))
    assert bound_of_last(method, s) == pytest.approx(scaled, rel=1e-12)
    text = " ".join(assumptions_of(method, s))
    assert f"at least {cohort - known} honest clients add their noise share to every released sum besides " in text
    assert ("fellow client" in text) is (colluders == 0)


@pytest.mark.parametrize("view", [View.AGGREGATE, View.FINAL])
@pytest.mark.parametrize(
    ("changes", "key"), [({"cohort": 1}, "training.clients_per_round"), ({"min_survivors": 1}, "privacy.min_survivors")]
)
def test_a_sum_of_one_upload_is_refused(view: View, changes: dict[str, int], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key} \(1\) must exceed .* a fellow client drew itself.* privacy.view = 'server'"):
        certify(NoisyFedAvg(), NoisyFedAvg().calibrate(noisy(view, epsilon=1.0, noise_multiplier=None, **changes)))
    alone = certify(NoisyFedAvg(), noisy(View.SERVER, **changes))
    assert len({v.proven.epsilon for v in alone.views}) == 1, "each upload has its own noise, and nobody knows it"


# --- the claim ---


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_claim_is_theorem_3(schedule: str) -> None:
    method = NoisyFedAvg(sigma=1.5, smoothness=2.0, scale=1.2)
    s = method.calibrate(noisy(schedule=schedule, noise_multiplier=None))
    claim = method.claim(s)
    printed = FedAvgClaim(
        StepRates(schedule.replace("-", "_")),
        learning_rate=0.5,
        clip=2.0,
        steps=3,
        smoothness=2.0,
        rounds=4,
        clients=4,
        noise_std=1.5,
        scale=1.2,
    ).mu
    assert claim is not None
    assert claim.epsilon == pytest.approx(epsilon_of(printed, s.delta))
    assert claim.scope.view is View.FINAL


def test_claim_for_constant_rates_lies_below_what_linear_losses_give_away() -> None:
    """Linear losses attain composition exactly, so no bound below it holds; stage-wise, the claim is above."""
    method = NoisyFedAvg(sigma=1.5)
    for schedule, refuted in (("constant", True), ("stage-wise", False)):
        s = method.calibrate(noisy(schedule=schedule, noise_multiplier=None, rounds=50))
        s = replace(s, scope=replace(s.scope, adjacency=Adjacency.REPLACE_ONE))
        proven = mu_of(method.releases(s, View.AGGREGATE))
        gammas = np.broadcast_to(2 * trajectory(s) / 4, (50,))
        attained = linear_loss_mu(gammas, 4, 1.5)
        claim = method.claim(s)
        assert claim is not None
        assert (claim.epsilon < epsilon_of(attained, s.delta)) is refuted
        outside = proven * math.sqrt(3 / 4)  # of the four noises, of which a client knows one
        assert attained <= outside * (1 + 1e-12)
        assert (outside == pytest.approx(attained)) is refuted


def test_without_noise_nothing_is_claimed_or_proven() -> None:
    s = noisy(noise_multiplier=0.0)
    assert NoisyFedAvg().claim(s) is None
    assert isinstance(NoisyFedAvg().releases(s, View.AGGREGATE)[0], Unbounded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"batch_clip": None}}, "training.batch_clip"),
        ({"training": {"local_steps": None}}, "training.local_steps"),
        ({"training": {"optimizer": {"name": "adam"}}}, "training.optimizer"),
        ({"training": {"optimizer": {"momentum": 0.5}}}, "training.optimizer"),
        ({"sampling": "poisson"}, "training.sampling = 'fixed'"),
        ({"training": {"local": "dp-sgd"}}, "training.local = 'sgd'"),
    ],
)
def test_settings_that_would_break_the_bound_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        NoisyFedAvg().calibrate(noisy(**changes))
    assert message in str(error.value)


# --- the projected model ---


VECTORS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3)


@given(VECTORS, VECTORS, st.floats(0.01, 1e3))
def test_the_projected_model_lies_in_the_ball(model: list[float], vector: list[float], diameter: float) -> None:
    upload = Upload(-1, 0, torch.tensor(vector), torch.zeros(2), Plan())
    w = torch.tensor(model)
    landed = w + stepped(Projected(diameter), [upload], w)
    norm = float((w + upload.vector).double().norm())
    slack = 1e-6 * float(w.norm())
    assert float(landed.double().norm()) <= diameter / 2 + slack
    if norm < diameter / 2 * 0.99:
        assert torch.equal(landed, w + upload.vector)
    elif norm > diameter / 2 * 1.01:
        assert float(landed.double().norm()) == pytest.approx(diameter / 2, rel=1e-5, abs=slack)


def bound_of_last(method: NoisyFedAvg, s: Setting) -> float:
    """The bound on the last model alone, which the parts of this method have."""
    found = last_model_mu(method, s)
    assert found is not None
    return found


def rounding(s: Setting, sigma: float, diameter: float, bits: int = 24) -> tuple[float, float]:
    """(h sqrt d, h sqrt d / n + D / 2^20): what truncation to the grid, and whole shifts and floats, put between two models."""
    cell = 2.0 ** (math.floor(math.log2(sigma)) - bits) * math.sqrt(s.layout.dimension)
    return cell, cell / s.cohort + diameter / 2**20


def test_bound_on_the_last_model_by_hand() -> None:
    """Without smoothness: the best n of (D + 2 C n)^2 / n, over the noise sigma sqrt 4 / 4 of the mean; D = 60, C = 3: n = 10."""
    method = NoisyFedAvg(sigma=1.5, project_to=60.0)
    s = method.calibrate(noisy(View.FINAL, noise_multiplier=None, rounds=2000))
    expected = (60 + (6 + rounding(s, 1.5, 60.0)[1]) * 10) / math.sqrt(10) / (1.5 / 2)
    assert bound_of_last(method, s) == pytest.approx(expected, rel=1e-12)
    assert mu_of(events_in_view(method, s, View.FINAL)) == pytest.approx(min(expected, math.sqrt(2000 * 4 / 3)))
    longer = replace(s, rounds=2_000_000)
    assert mu_of(events_in_view(method, longer, View.FINAL)) == pytest.approx(expected)
    assert mu_of(method.releases(longer, View.AGGREGATE)) == pytest.approx(math.sqrt(2_000_000 * 4 / 3))
    assert mu_of(events_in_view(NoisyFedAvg(sigma=1.5), longer, View.FINAL)) == pytest.approx(math.sqrt(2_000_000 * 4 / 3))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_assumed_smoothness_is_used_round_by_round(schedule: str) -> None:
    """rho_t = prod_k (1 + eta L), gamma_t = 2 C_t / n for replacement and rounding, noise sigma / sqrt n on the mean of n = 4."""
    s = replace(noisy(View.FINAL, schedule, rounds=300, noise_multiplier=None, adjacency=Adjacency.REPLACE_ONE))
    s = NoisyFedAvg(sigma=0.05, project_to=1.0).calibrate(s)
    bounds = np.broadcast_to(trajectory(s), (300,))
    eta = [[s.local.learning_rate(t, k, 3) for k in range(3)] for t in range(300)]
    rhos = [math.prod(1 + 0.01 * e for e in row) for row in eta]
    gammas = 2 * bounds / 4 + sum(rounding(s, 0.05, 1.0))
    gammas[0] += 1.0  # whatever the first model's norm, two models are D apart after a round
    by_hand = final_mu(rhos, gammas.tolist(), [1.0] * 300, [0.05 / 2] * 300)
    free, smooth = (bound_of_last(NoisyFedAvg(sigma=0.05, project_to=1.0, assumed_smoothness=L), s) for L in (None, 0.01))
    assert smooth == pytest.approx(min(by_hand, free), rel=1e-9)
    assert by_hand < mu_of(events_in_view(NoisyFedAvg(sigma=0.05), s, View.FINAL))


@pytest.mark.few(2)
@pytest.mark.parametrize("bits", [4, 8, 12, 24])
def test_the_last_model_pays_for_the_grid(bits: int) -> None:
    """Coarse grids leave composition only; fine ones cost what truncation does, and the step is that of the run's door."""
    method = NoisyFedAvg(sigma=0.05, project_to=1.0, assumed_smoothness=0.01)
    s = method.calibrate(noisy(View.FINAL, rounds=20_000, noise_multiplier=None, grid_bits=bits))
    plan = planner(method, s).plan(released([0.0] * 7), {})
    assert isinstance(plan, Plan)
    (_, exponent), *_ = ReleaseLayout(s.layout, bits=bits).grid(plan)
    h, sigma = 2.0**exponent, 0.05 / 2
    assert h * math.sqrt(s.layout.dimension) == rounding(s, 0.05, 1.0, bits)[0]
    before = final_mu_constant(1.005**3, 3 / 4, 20_000, 1.0, sigma)
    after = final_mu_constant(1.005**3, 3 / 4 + sum(rounding(s, 0.05, 1.0, bits)), 20_000, 1.0, sigma)
    found = mu_of(events_in_view(method, s, View.FINAL))
    assert found == pytest.approx(min(after, bound_of_last(NoisyFedAvg(sigma=0.05, project_to=1.0), s)), rel=1e-9)
    assert found >= before


@pytest.mark.parametrize(("bits", "epsilon"), [(None, 2.421), (12, 13.51), (8, 15.56)])
def test_the_example_of_the_privacy_page(bits: int | None, epsilon: float) -> None:
    """LeNet-5 in a small ball, 20,000 rounds: 2.415 on real numbers, and 15.56 by composition."""
    privacy = {"delta": 1e-5, "view": "final"} | ({} if bits is None else {"grid_bits": bits})
    config = {
        "method": {"name": "noisy-fedavg", "project_to": 0.02, "assumed_smoothness": 0.01, "sigma": 0.05},
        "data": {"name": "mnist", "partition": {"kind": "iid", "clients": 100}},
        "model": {"name": "lenet5"},
        "training": {"rounds": 20_000, "clients_per_round": 100, "local_steps": 1, "batch_clip": 0.1, "optimizer": {"lr": 0.1}},
        "privacy": privacy,
    }
    proven = certify_config(parse(config)).view(View.FINAL).proven
    assert proven.epsilon == pytest.approx(epsilon, rel=4e-4)


CLOSE = st.lists(st.tuples(st.floats(-9, 9, width=32), st.floats(-2, 2, width=32)), min_size=1, max_size=6)


@given(CLOSE)
def test_truncated_updates_are_at_most_a_cell_further_apart(pairs: list[tuple[float, float]]) -> None:
    """| |trunc x - trunc y| | <= |x - y| + h sqrt d, with h = 1, for the door's own truncation."""
    x = torch.tensor([a for a, _ in pairs])
    y = x + torch.tensor([b for _, b in pairs])
    moved = [to_grid(v, [(slice(0, len(v)), 0)], math.inf).astype(float) for v in (x, y)]
    apart = float((x.double() - y.double()).norm())
    assert float(np.linalg.norm(moved[0] - moved[1])) <= apart + math.sqrt(len(pairs)) + 1e-12


def test_truncation_is_no_lipschitz_map() -> None:
    """Two updates 2e-3 apart leave two grid steps apart in every coordinate's length: without the term the bound is wrong."""
    x = torch.full((100,), 0.999)
    found = [to_grid(v, [(slice(0, 100), 0)], math.inf) for v in (x, x + 0.002)]
    assert float((x + 0.002 - x).norm()) < 0.03
    assert np.linalg.norm(found[0] - found[1]) == 10  # h sqrt d


@given(st.integers(0, 2**32), st.floats(-12, 12), st.floats(-3, 12))
def test_floats_put_less_than_was_counted_between_two_models(seed: int, size: float, far: float) -> None:
    """The projected float32 model lies within D / 2^21 of the exact one, for moves of any length from a model in the ball."""
    rng, diameter, d, n = np.random.default_rng(seed), 2.0**size, 50, 7
    start = torch.from_numpy(rng.standard_normal(d)).float()
    start *= rng.random() * diameter / 2 / float(start.norm())
    integers = np.round(rng.standard_normal(d) * 2**24 * diameter * 2**far).astype(np.int64)
    sent = torch.from_numpy(from_grid(integers, [(slice(0, d), -24)])).div_(n)
    landed = start + stepped(Projected(diameter), [Upload(-1, 0, sent, torch.zeros(1), Plan())], start)
    exact = start.double().numpy() + integers * 2.0**-24 / n
    norm, radius = float(np.linalg.norm(exact)), diameter / 2 * (1 - 1e-6)
    exact = exact if norm <= radius else exact * (radius / norm)
    assert np.linalg.norm(landed.double().numpy() - exact) <= diameter / 2**21
    assert float(landed.double().norm()) <= diameter / 2


def test_the_statement_says_what_the_last_model_rests_on() -> None:
    method = NoisyFedAvg(sigma=0.5, project_to=2.0, assumed_smoothness=0.01)
    s = method.calibrate(noisy(View.FINAL, rounds=500, noise_multiplier=None))
    statement = certify(method, s)
    epsilons = {v.view: v.proven.epsilon for v in statement.views}
    assert epsilons[View.FINAL] < epsilons[View.AGGREGATE] < epsilons[View.SERVER]
    text = " ".join(assumptions_of(method, s))
    assert "0.01-smooth" in text
    assert "as float32 computes them" in text
    assert "no model but the last and no figure of the others" in text
    assert "digits of the last model" in text


def test_every_row_with_a_bound_on_the_last_model_says_what_it_rests_on() -> None:
    """A run that promises something in the aggregate view has a final row too; in the server view composition counts."""
    method = NoisyFedAvg(sigma=0.5, project_to=2.0, assumed_smoothness=0.01)
    for view in View:
        s = method.calibrate(noisy(view, rounds=500, noise_multiplier=None))
        bounded = mu_of(events_in_view(method, s, View.FINAL)) < mu_of(method.releases(s, View.AGGREGATE))
        assert bounded is (view is not View.SERVER)
        assert ("0.01-smooth" in " ".join(assumptions_of(method, s))) is bounded


class Unprojected(NoisyFedAvg):
    """The plain mean, which no ball holds."""

    def server(self, s: Setting) -> SumServer:
        return Mean()


class Weighing(NoisyFedAvg):
    """The heaviest client moves the mean by more than its share."""

    weighting: Literal["uniform", "examples"] = "examples"


class OtherSteps(NoisyFedAvg):
    """Clients that go another way than gradients lead."""

    def client(self, s: Setting) -> Client:
        return Plain(lambda local: None)


class SideBySide(NoisyFedAvg):
    """A number that leaves beside the update, for which the bound has no price."""

    def extras(self, s: Setting) -> dict[str, tuple[int, ...]]:
        return {"more": ()}


@pytest.mark.parametrize(
    ("kind", "holds"),
    [(NoisyFedAvg, True), (OtherSteps, True)] + [(kind, False) for kind in (Unprojected, Weighing, SideBySide)],
)
def test_the_bound_on_the_last_model_follows_from_the_parts(kind: type[NoisyFedAvg], holds: bool) -> None:
    """Without a projection the last model tells what the sums do; how clients train matters to smoothness alone."""
    s = noisy(rounds=20_000, noise_multiplier=None)
    method = kind(sigma=0.5, project_to=0.02)
    s = method.calibrate(s)
    last, sums = (bound(events_in_view(method, s, view), s.delta)[0] for view in (View.FINAL, View.AGGREGATE))
    assert (last < sums / 2) if holds else last == sums


def test_smoothness_is_assumed_of_plain_clipped_steps_alone() -> None:
    s = NoisyFedAvg(sigma=0.05, project_to=1.0).calibrate(noisy(View.FINAL, rounds=300, noise_multiplier=None))
    options = {"sigma": 0.05, "project_to": 1.0}
    plain, other = (bound_of_last(kind(**options, assumed_smoothness=0.01), s) for kind in (NoisyFedAvg, OtherSteps))
    assert plain < other == bound_of_last(NoisyFedAvg(**options), s)


def test_a_projected_run_is_calibrated_by_its_last_model_and_charged_in_full(tmp_path: Path) -> None:
    """Every round is charged, more than the target in all; the run still ends, inside the ball."""
    method = {"name": "noisy-fedavg", "project_to": 0.2, "assumed_smoothness": 0.0}
    training = {**TRAINING, "rounds": 25, "evaluate_every": 25}
    job = job_of(digits(method, training=training, privacy={"epsilon": 3.0, "view": "final"}), tmp_path / "l")
    progress = trained(job)
    assert len(progress.history) == 25
    assert float(progress.model.double().norm()) <= 0.1
    spent = epsilon_of(charged_mu(tmp_path / "l")[-1], 1e-3)
    last = epsilon_of(method_releases_mu(job.method, job.setting), 1e-3)
    assert last == pytest.approx(3.0, rel=1e-4)
    assert spent > 3.5


def test_a_projection_that_the_server_would_undo_is_refused() -> None:
    with pytest.raises(ConfigError, match="server_optimizer"):
        NoisyFedAvg(project_to=1.0).calibrate(noisy(training={"server_optimizer": {"lr": 0.5}}))
    with pytest.raises(ConfigError, match="project_to"):
        NoisyFedAvg(assumed_smoothness=1.0).calibrate(noisy())
