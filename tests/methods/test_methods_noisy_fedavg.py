"""Noisy-FedAvg: how far clipped steps go, noise in shares, the printed claim beside composition, and the projected last model."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.last_iterate import final_mu
from fedveil.accounting.types import Adjacency, Gaussian, Unbounded, View
from fedveil.configuration.public_setting import calibrated_setting
from fedveil.errors import ConfigError
from fedveil.federation.clients import Clients
from fedveil.federation.round import ClientTask, client_round
from fedveil.methods.noisy_fedavg import NoisyFedAvg
from fedveil.methods.setting import Setting
from fedveil.methods.trajectory import Ball, Trajectory, last_model_mu, trajectory, upload_std
from fedveil.papers.convergent_dp.convergent_claim import FedAvgClaim, Schedule, linear_loss_mu
from fedveil.release.plan import Plan, Upload
from fedveil.release.sealed import SealedUpload
from fedveil.statement.certify import certify
from fedveil.training.local import LocalSpec, OptimizerSpec
from method_kit import all_same, charged_mu, digits, job_of, method_releases_mu, released, setting, swapped_plans, trained

SCHEDULES = ["constant", "cyclic", "stage-wise", "iterative"]
TRAINING = {"local_steps": 3, "batch_clip": 2.0, "optimizer": {"lr": 0.1}, "clients_per_round": 12}


def spec(schedule: str = "constant", **changes: Any) -> LocalSpec:
    """K = 3 steps at rate 0.5 with V = 2: V mu K = 3."""
    return replace(LocalSpec(1, 3, 25, OptimizerSpec(lr=0.5), 2.0, schedule), **changes)  # type: ignore[arg-type]


def noisy(view: View = View.AGGREGATE, schedule: str = "constant", **changes: Any) -> Setting:
    return setting(view, local=spec(schedule), **{"rounds": 4, **changes})


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
    (aligned,) = _uploads(job, Clients(x, torch.tensor([0]), np.array([0, 1])))
    assert float(aligned.vector.norm()) == pytest.approx(bound, rel=1e-3)


def _uploads(job: Any, clients: Clients) -> list[Upload]:
    context = replace(job.context, clients=clients)
    seen = released(job.context.model.vector.tolist())
    found = [client_round(context, ClientTask(c, seen, 1.0)).release for c in range(len(clients))]
    return [s.upload for s in found if isinstance(s, SealedUpload)]


# --- noise and its cost ---


def test_sigma_is_the_noise_of_one_upload_in_every_view() -> None:
    for view, shares in ((View.SERVER, 1), (View.AGGREGATE, 4), (View.FINAL, 4)):
        method = NoisyFedAvg(sigma=0.7)
        s = method.calibrate(noisy(view, noise_multiplier=None))
        policy = method.policy(s)
        plan = policy.plan(released([0.0] * 7), {})
        assert isinstance(policy, Trajectory)
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
    """sigma 1.5 on each of 4 uploads, C = 3: one upload mu = 2 a round; a sum of 4 has twice the noise; 4 rounds double it."""
    method = NoisyFedAvg(sigma=1.5)
    server, central = method.calibrate(noisy(View.SERVER, noise_multiplier=None)), method.calibrate(noisy(noise_multiplier=None))
    assert mu_of(method.releases(server, View.SERVER)) == pytest.approx(2 * math.sqrt(4))
    assert mu_of(method.releases(central, View.AGGREGATE)) == pytest.approx(1 * math.sqrt(4))
    assert mu_of(method.releases(server, View.AGGREGATE)) == pytest.approx(1 * math.sqrt(4))
    assert mu_of(method.releases(central, View.SERVER)) == pytest.approx(2 * math.sqrt(4))
    doubled = replace(central, scope=replace(central.scope, adjacency=Adjacency.REPLACE_ONE))
    assert mu_of(method.releases(doubled, View.AGGREGATE)) == pytest.approx(2 * math.sqrt(4))


def test_rounds_cost_what_their_rate_says() -> None:
    """Stage-wise: mu_t = 3 / (t + 1) / (sigma sqrt 4), and only the dearest rounds that one client may be in."""
    method = NoisyFedAvg(sigma=1.5)
    s = method.calibrate(noisy(schedule="stage-wise", noise_multiplier=None))
    assert mu_of(method.releases(s, View.AGGREGATE)) == pytest.approx(math.sqrt(1 + 1 / 4 + 1 / 9 + 1 / 16))
    twice = replace(s, max_participations=2)
    assert mu_of(method.releases(twice, View.AGGREGATE)) == pytest.approx(math.sqrt(1 + 1 / 4))


def test_survivors_and_colluders_shrink_the_noise_of_a_sum() -> None:
    """3 guaranteed survivors of which 1 colludes leave two noises of four; a server sees each upload's own noise anyway."""
    method = NoisyFedAvg(sigma=1.5)
    s = method.calibrate(noisy(noise_multiplier=None, min_survivors=3, colluders=1))
    assert mu_of(method.releases(s, View.AGGREGATE)) == pytest.approx(math.sqrt(2) * math.sqrt(4))
    assert upload_std(s, trajectory(s)) == pytest.approx(1.5)
    assert mu_of(method.releases(s, View.SERVER)) == pytest.approx(2 * math.sqrt(4))
    with pytest.raises(ConfigError, match=r"min_survivors .*must exceed"):
        method.calibrate(noisy(noise_multiplier=None, min_survivors=1, colluders=1))


@pytest.mark.parametrize("view", [View.SERVER, View.AGGREGATE])
@pytest.mark.parametrize("schedule", ["constant", "stage-wise"])
def test_the_ledger_holds_the_configured_epsilon(view: View, schedule: str, tmp_path: Path) -> None:
    training = {**TRAINING, "schedule": schedule}
    config = digits({"name": "noisy-fedavg"}, training=training, privacy={"epsilon": 5.0, "view": view})
    trained(job_of(config, tmp_path / "l"))
    method, s = calibrated_setting(config)
    for mu in charged_mu(tmp_path / "l").values():
        assert mu == pytest.approx(method_releases_mu(method, s), rel=1e-6)
        assert 5.0 * (1 - 1e-4) < epsilon_of(mu, 1e-3) <= 5.0


def test_plans_do_not_read_data() -> None:
    assert all_same(swapped_plans(digits({"name": "noisy-fedavg", "sigma": 1.0}, training=TRAINING)))


# --- the claim ---


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_claim_is_theorem_3(schedule: str) -> None:
    method = NoisyFedAvg(sigma=1.5, smoothness=2.0, scale=1.2)
    s = method.calibrate(noisy(schedule=schedule, noise_multiplier=None))
    claim = method.claim(s)
    printed = FedAvgClaim(
        Schedule(schedule.replace("-", "_")),
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
        assert attained <= proven * (1 + 1e-12)
        assert (proven == pytest.approx(attained)) is refuted


def test_without_noise_nothing_is_claimed_or_proven() -> None:
    s = noisy(noise_multiplier=0.0)
    assert NoisyFedAvg().claim(s) is None
    assert isinstance(NoisyFedAvg().releases(s, View.AGGREGATE)[0], Unbounded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local": spec(batch_clip=None)}, "training.batch_clip"),
        ({"local": spec(steps=None)}, "training.local_steps"),
        ({"local": spec(optimizer=OptimizerSpec("adam"))}, "training.optimizer"),
        ({"local": spec(optimizer=OptimizerSpec(momentum=0.5))}, "training.optimizer"),
        ({"sampling": "poisson"}, "training.sampling = 'fixed'"),
        ({"example_clip": 1.0}, "training.local = 'sgd'"),
    ],
)
def test_settings_that_would_break_the_bound_are_refused(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        NoisyFedAvg().calibrate(replace(noisy(), **changes))
    assert message in str(error.value)


# --- the projected model ---


VECTORS = st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3)


@given(VECTORS, VECTORS, st.floats(0.01, 1e3))
def test_the_projected_model_lies_in_the_ball(model: list[float], vector: list[float], diameter: float) -> None:
    upload = Upload(-1, 0, torch.tensor(vector), torch.zeros(2), Plan())
    w = torch.tensor(model)
    landed = w + Ball(diameter, None).step([upload], w)
    norm = float((w + upload.vector).double().norm())
    slack = 1e-6 * float(w.norm())
    assert float(landed.double().norm()) <= diameter / 2 + slack
    if norm < diameter / 2 * 0.99:
        assert torch.equal(landed, w + upload.vector)
    elif norm > diameter / 2 * 1.01:
        assert float(landed.double().norm()) == pytest.approx(diameter / 2, rel=1e-5, abs=slack)


def test_bound_on_the_last_model_by_hand() -> None:
    """Without smoothness: the best n of (D + 2 C n)^2 / n, over the noise sigma sqrt 4 / 4 of the mean; D = 60, C = 3: n = 10."""
    method = NoisyFedAvg(sigma=1.5, project_to=60.0)
    s = method.calibrate(noisy(View.FINAL, noise_multiplier=None, rounds=2000))
    expected = (60 + 6 * 10) / math.sqrt(10) / (1.5 / 2)
    assert last_model_mu(s, 0.0, 60.0, None) == pytest.approx(expected)
    assert mu_of(method.releases(s, View.FINAL)) == pytest.approx(min(expected, math.sqrt(2000)))
    longer = replace(s, rounds=2_000_000)
    assert mu_of(method.releases(longer, View.FINAL)) == pytest.approx(expected)
    assert mu_of(method.releases(longer, View.AGGREGATE)) == pytest.approx(math.sqrt(2_000_000))
    assert mu_of(NoisyFedAvg(sigma=1.5).releases(longer, View.FINAL)) == pytest.approx(math.sqrt(2_000_000))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_assumed_smoothness_is_used_round_by_round(schedule: str) -> None:
    """rho_t = prod_k (1 + eta L), gamma_t = 2 C_t / n for replacement, noise sigma / sqrt n on the mean of n = 4."""
    s = replace(noisy(View.FINAL, schedule, rounds=300, noise_multiplier=None, adjacency=Adjacency.REPLACE_ONE))
    s = NoisyFedAvg(sigma=0.05, project_to=1.0).calibrate(s)
    bounds = np.broadcast_to(trajectory(s), (300,))
    eta = [[s.local.learning_rate(t, k, 3) for k in range(3)] for t in range(300)]
    rhos = [math.prod(1 + 0.01 * e for e in row) for row in eta]
    by_hand = final_mu(rhos, (2 * bounds / 4).tolist(), [1.0] * 300, [0.05 / 2] * 300)
    assert last_model_mu(s, 0.0, 1.0, 0.01) == pytest.approx(min(by_hand, last_model_mu(s, 0.0, 1.0, None)), rel=1e-9)
    assert by_hand < mu_of(NoisyFedAvg(sigma=0.05).releases(s, View.FINAL))


def test_the_statement_says_what_the_last_model_rests_on() -> None:
    method = NoisyFedAvg(sigma=0.5, project_to=2.0, assumed_smoothness=0.01)
    s = method.calibrate(noisy(View.FINAL, rounds=500, noise_multiplier=None))
    statement = certify(method, s)
    epsilons = {v.view: v.proven.epsilon for v in statement.views}
    assert epsilons[View.FINAL] < epsilons[View.AGGREGATE] < epsilons[View.SERVER]
    text = " ".join(method.assumptions(s))
    assert "0.01-smooth" in text
    assert "no model but the last" in text
    assert "0.01-smooth" not in " ".join(method.assumptions(replace(s, scope=replace(s.scope, view=View.AGGREGATE))))


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
        NoisyFedAvg(project_to=1.0).calibrate(replace(noisy(), server=OptimizerSpec(lr=0.5)))
    with pytest.raises(ConfigError, match="project_to"):
        NoisyFedAvg(assumed_smoothness=1.0).calibrate(noisy())


@pytest.mark.heavy
def test_it_learns(tmp_path: Path) -> None:
    """100 clients of 14 digits, noise 0.05 on each upload: above 0.7 after 10 rounds (chance is 0.1)."""
    training = {**TRAINING, "rounds": 10, "clients_per_round": 50, "local_steps": 5, "optimizer": {"lr": 0.2}, "batch_size": 7}
    config = digits(
        {"name": "noisy-fedavg", "sigma": 0.05}, data={"partition": {"kind": "iid", "clients": 100}}, training=training
    )
    assert trained(job_of(config, tmp_path / "l"), stacked=True).history[-1]["test_accuracy"] > 0.7
