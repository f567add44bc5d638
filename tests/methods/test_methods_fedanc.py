"""FedANC: the controller against torch's own layers, gradients against finite differences, the budget, and that it learns."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import method_kit as h
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, SampledGaussian, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.executors.inline import Inline
from fedveil.executors.pool import ProcessPool
from fedveil.experiment.config import parse
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.experiment.run import run
from fedveil.federation.fit import fit
from fedveil.federation.progress import start
from fedveil.mechanism.plan import Released, Upload
from fedveil.methods.run_cost import Planner
from fedveil.methods.setting import Setting
from fedveil.papers.fedanc.lstm_controller import HIDDEN, LAYOUT, Controller, ranks, soft_mask_slope
from fedveil.papers.fedanc.method import Budgeted, FedANC, SparseNoise, captured, claimed_epsilon, estimate, tradeoff
from fedveil.training.local import Local
from method_kit import planner

FAST = {"name": "fedanc", "pretraining_steps": 20}


def setting(view: View = View.SERVER, dimension: int = 40, **more: Any) -> Setting:
    base: dict[str, Any] = {"noise_multiplier": 4.0, "adjacency": Adjacency.REPLACE_ONE, "cohort": 10, "rounds": 12, "records": 4}
    return h.setting(view, {"a": (dimension - 10,), "b": (10,)}, training={"batch_size": 32}, **{**base, **more})


# --- the controller ----------------------------------------------------------------------------------------------------


def test_controller_is_the_papers_network() -> None:
    lstm, linear = torch.nn.LSTM(4, HIDDEN), torch.nn.Linear(HIDDEN, 2)
    parameters = [*lstm.parameters(), *linear.parameters()]
    assert LAYOUT.dimension == 18050 == sum(p.numel() for p in parameters)
    weights = torch.cat([p.detach().flatten() for p in parameters])
    x = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0))
    expected, _ = lstm(x)
    u = linear(expected)
    hidden, cell = torch.zeros(1, HIDDEN), torch.zeros(1, HIDDEN)
    for t in range(3):
        beta, gamma, hidden, cell = Controller().outputs(weights, x[t], hidden, cell)
        assert beta.item() == pytest.approx(math.log1p(math.exp(u[t, 0, 0].item())), rel=1e-5)
        assert gamma.item() == pytest.approx(0.1 + 0.8 / (1 + math.exp(-u[t, 0, 1].item())), rel=1e-5)


@pytest.mark.slow
@pytest.mark.heavy
def test_pretraining_learns_the_mean_of_its_targets_because_they_do_not_depend_on_the_inputs() -> None:
    inputs = [(0.05, 2.0), (1e-5, 9.0), (0.1, 0.2)]
    bare, taught = Controller(steps=0).start(), Controller(steps=400).start()
    untaught = [Controller(steps=0).act(bare, *x)[0] for x in inputs]
    outputs = [Controller(steps=400).act(taught, *x) for x in inputs]
    assert all(abs(beta - 0.5) > 0.15 for beta in untaught)
    assert all(abs(beta - 0.5) < 0.08 and abs(gamma - 0.5) < 0.05 for beta, gamma in outputs)


def test_learning_descends_its_objective_and_moves_the_memory() -> None:
    c = Controller(steps=0, lr=1e-2)
    state = c.start()
    first = c.act(state, 0.05, 1.0)
    for _ in range(30):
        state = c.learn(state, 0.05, 1.0, lambda beta, gamma: (beta - 2.0).square() + (gamma - 0.3).square())
    beta, gamma = c.act(state, 0.05, 1.0)
    assert abs(beta - 2.0) < abs(first[0] - 2.0) / 3
    assert abs(gamma - 0.3) < abs(first[1] - 0.3) / 3
    assert state["updates"] == 30
    assert state["hidden"].abs().max() > 0
    assert all(isinstance(v, torch.Tensor | int | float | str) for v in state.values()), "checkpoints without pickle"


# --- published: gradients through the noise ----------------------------------------------------------------------------


def problem(dimension: int = 12) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(20, dimension // 2, generator=g).double(), torch.randint(0, 2, (20,), generator=g)
    return x, y, torch.randn(dimension, generator=g).double(), torch.randn(dimension, generator=g).double()


def loss_at(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ w.view(2, -1).T, y)


def test_gradient_of_the_next_loss_in_beta_goes_through_the_noise() -> None:
    x, y, w, noise = problem()
    eta, clip = 0.1, 1.0
    g = torch.autograd.functional.jacobian(lambda v: loss_at(v, x, y), w)  # type: ignore[no-untyped-call]
    short = g * min(1.0, clip / float(g.norm()))
    mask = ranks(short.abs()) < 5

    def after(beta: float) -> torch.Tensor:
        return w - eta * (short + mask * noise * (beta * clip))

    step = 1e-5
    numeric = float(loss_at(after(0.5 + step), x, y) - loss_at(after(0.5 - step), x, y)) / (2 * step)
    at = torch.autograd.functional.jacobian(lambda v: loss_at(v, x, y), after(0.5))  # type: ignore[no-untyped-call]
    assert abs(numeric) > 1e-4
    assert float(at @ (mask * noise * clip * -eta)) == pytest.approx(numeric, rel=1e-6)


def test_straight_through_slope_is_the_derivative_of_the_soft_mask() -> None:
    values = torch.tensor([0.3, -2.0, 0.1, 1.0, -0.7]).double()
    rank = ranks(values.abs())
    assert rank.tolist() == [3, 0, 4, 1, 2]

    def soft(gamma: float) -> torch.Tensor:
        return ((gamma - (rank.double() + 0.5) / 5) / 0.05).sigmoid()

    numeric = (soft(0.43 + 1e-6) - soft(0.43 - 1e-6)) / 2e-6
    assert soft_mask_slope(rank, 0.43, 0.05).tolist() == pytest.approx(numeric.tolist(), abs=1e-5)


def local_for(method: FedANC, lr: float = 0.1) -> Local:
    module = torch.nn.Linear(4, 2)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view(p.shape))
    local = h.local_of(module, training={"batch_size": 4, "optimizer": {"lr": lr}}, steps=2)
    local.normal = lambda n: torch.linspace(-1, 1, n)
    return local


X = torch.tensor([[1.0, 0.5, -1.0, 2.0], [0.2, -0.3, 0.8, 1.0], [0.0, 1.0, 1.0, -1.0], [1.5, 0.1, 0.4, -0.6]])
Y = torch.tensor([0, 1, 1, 0])


def gradient_at(w: torch.Tensor, x: torch.Tensor = X, y: torch.Tensor = Y) -> torch.Tensor:
    w = w.clone().requires_grad_()
    F.cross_entropy(x @ w[:8].view(2, 4).T + w[8:], y).backward()  # type: ignore[no-untyped-call]
    assert w.grad is not None
    return w.grad


def test_published_step_by_hand_and_only_noised_coordinates_leave() -> None:
    method = FedANC(variant="published", pretraining_steps=0, clip=0.3)
    local, objective = local_for(method), SparseNoise(method, 8.0, 1e-5)
    objective.begin(local)
    g = gradient_at(local.start)
    beta, gamma = method.controller.act(
        local.state, float(g.norm()), float(F.cross_entropy(X @ local.start[:8].view(2, 4).T + local.start[8:], Y))
    )
    objective.step(local, X, Y)
    k = math.ceil(gamma * 10)
    top = torch.zeros(10)
    top[g.abs().argsort(descending=True, stable=True)[:k]] = 1.0
    expected = local.start - 0.1 * (g * 0.3 / g.norm() + top * torch.linspace(-1, 1, 10) * beta * 0.3)
    assert local.model.vector.tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    update = objective.finish(local)
    assert update.tolist() == pytest.approx(((expected - local.start) * top).tolist(), abs=1e-6)
    assert 0 < int((update != 0).sum()) == k < 10


def test_constant_noise_on_all_coordinates_is_the_static_arm() -> None:
    method = FedANC(variant="published", clip=0.3, beta=0.5, gamma=1.0)
    local, objective = local_for(method), SparseNoise(method, 0.0, 1e-5)
    objective.begin(local)
    objective.step(local, X, Y)
    g = gradient_at(local.start)
    expected = -0.1 * (g * 0.3 / g.norm() + torch.linspace(-1, 1, 10) * 0.5 * 0.3)
    assert objective.finish(local).tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    claimed = math.sqrt(2 * 10 * math.log(1.25e5)) / 0.5
    assert objective.measures(local.state) == {"beta": 0.5, "gamma": 1.0, "claimed_epsilon": pytest.approx(claimed, rel=1e-6)}


def test_a_static_arm_claims_what_its_constants_do_and_is_steered_by_nothing() -> None:
    static = FedANC(variant="published", beta=0.5, gamma=1.0)
    claim = static.claim(static.calibrate(setting(noise_multiplier=None)))
    assert claim is not None
    assert claim.epsilon == claimed_epsilon(0.5, 1.0, 40, 1e-3)
    assert "steered" not in claim.note
    with pytest.raises(ConfigError, match=r"remove privacy\.epsilon"):
        static.calibrate(setting(noise_multiplier=None, epsilon=8.0))
    for half in ({"variant": "published", "beta": 0.5}, {"beta": 0.5, "gamma": 0.5}):
        with pytest.raises(ConfigError, match="give both, or none"):
            FedANC(**half).calibrate(setting(epsilon=8.0))


def test_what_leaves_is_the_union_of_the_masks_of_all_local_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eq. 13. Batches that show one feature only, 3 wide: its two weights have the largest gradients, then the two biases.

    So k = 2 picks the weights of feature 0 in the first step and those of feature 3 in the next two.
    """
    monkeypatch.setattr(Controller, "act", lambda *_: (0.5, 0.2))
    local = local_for(FedANC(variant="published", pretraining_steps=0, clip=0.3))
    objective = SparseNoise(FedANC(variant="published", pretraining_steps=0, clip=0.3), 8.0, 1e-5)
    objective.begin(local)
    w, noise, labels = local.start.clone(), torch.linspace(-1, 1, 10), torch.tensor([0, 0, 0, 0])
    for k, feature in enumerate((0, 3, 3)):
        local.step, x = k, torch.zeros(4, 4)
        x[:, feature] = 3.0
        objective.step(local, x, labels)
        g, noised = gradient_at(w, x, labels), torch.zeros(10)
        noised[[feature, 4 + feature]] = 1.0
        w = w - 0.1 * (g * 0.3 / g.norm() + noised * noise * 0.5 * 0.3)
    moved = w - local.start
    expected = [float(moved[i]) if i in (0, 3, 4, 7) else 0.0 for i in range(10)]
    assert float(moved[8:].abs().min()) > 1e-3, "the biases move bare, and stay"
    update = objective.finish(local)
    assert update.tolist() == pytest.approx(expected, abs=1e-6)
    assert update.nonzero().flatten().tolist() == [0, 3, 4, 7]


def test_published_lesson_in_gamma_is_the_finite_difference_of_the_soft_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope that the second step hands to the controller, against the next loss where the first step's mask is softened."""
    method = FedANC(variant="published", pretraining_steps=0, clip=0.3, budget_weight=0.0)
    handed: list[float] = []

    def learn(self: Controller, state: Any, norm: float, loss: float, objective: Any) -> Any:
        zero = torch.zeros((), requires_grad=True)
        handed.append(float(torch.autograd.grad(objective(torch.tensor(0.5), zero + 0.5), zero)[0]))
        return state

    monkeypatch.setattr(Controller, "act", lambda *_: (0.5, 0.5))
    monkeypatch.setattr(Controller, "learn", learn)
    local, objective = local_for(method), SparseNoise(method, 8.0, 1e-5)
    objective.begin(local)
    objective.step(local, X, Y)
    w = local.model.vector.double()
    local.step = 1
    objective.step(local, X, Y)
    order = gradient_at(local.start).abs().argsort(descending=True, stable=True)
    rank = torch.empty(10, dtype=torch.double)
    rank[order] = torch.arange(10.0).double()

    def next_loss(gamma: float) -> float:
        """The hard step, its mask moved along the soft one, sigmoid((gamma - (rank + 1/2) / 10) / 0.05), from gamma = 0.5."""
        soft, hard = (((g - (rank + 0.5) / 10) / 0.05).sigmoid() for g in (gamma, 0.5))
        v = w - 0.1 * (soft - hard) * torch.linspace(-1, 1, 10).double() * 0.5 * 0.3
        return float(F.cross_entropy(X.double() @ v[:8].view(2, 4).T + v[8:], Y))

    numeric = (next_loss(0.501) - next_loss(0.499)) / 0.002
    assert abs(numeric) > 1e-3
    assert handed[0] == pytest.approx(numeric, rel=1e-2)


def test_published_lesson_is_the_finite_difference_of_the_next_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope that the second step hands to the controller, against nudging the first step's beta."""
    method = FedANC(variant="published", pretraining_steps=0, clip=0.3, budget_weight=0.0)
    handed: list[float] = []

    def act(self: Controller, state: Any, norm: float, loss: float, beta: float = 0.5) -> tuple[float, float]:
        return beta, 0.5

    def learn(self: Controller, state: Any, norm: float, loss: float, objective: Any) -> Any:
        zero = torch.zeros((), requires_grad=True)
        handed.append(float(torch.autograd.grad(objective(zero + 0.5, torch.tensor(0.5)), zero)[0]))
        return state

    def next_loss(beta: float) -> float:
        monkeypatch.setattr(Controller, "act", partial(act_with, beta))
        local, objective = local_for(method), SparseNoise(method, 8.0, 1e-5)
        objective.begin(local)
        objective.step(local, X, Y)
        w = local.model.vector.double()
        value = float(F.cross_entropy(X.double() @ w[:8].view(2, 4).T + w[8:], Y))
        local.step = 1
        objective.step(local, X, Y)
        return value

    def act_with(beta: float, *arguments: Any) -> tuple[float, float]:
        return beta, 0.5

    monkeypatch.setattr(Controller, "learn", learn)
    numeric = (next_loss(0.55) - next_loss(0.45)) / 0.1
    handed.clear()
    next_loss(0.5)
    assert abs(numeric) > 1e-4
    assert handed[0] == pytest.approx(numeric, rel=2e-2)


@pytest.mark.slow
@pytest.mark.heavy
def test_budget_term_pulls_the_claimed_epsilon_towards_its_target() -> None:
    assert float(estimate(torch.tensor(0.5), torch.tensor(0.4), dimension=1000, delta=1e-5)) == pytest.approx(
        claimed_epsilon(0.5, 0.4, 1000, 1e-5), rel=1e-6
    )
    job = h.job_of(h.at_epsilon_8({**FAST, "variant": "published"}, "privacy.view=server", "training.local_epochs=3"))
    rows = h.trained(job).history
    assert rows[-1]["claimed_epsilon"] < rows[0]["claimed_epsilon"]
    assert rows[-1]["beta"] > rows[0]["beta"] > 0.5, "a target of 8 is far below what a step at beta = 0.5 claims"


def test_published_marks_what_it_reads_and_promises_nothing() -> None:
    job = h.job_of(h.at_epsilon_8({**FAST, "variant": "published"}, "privacy.view=server", rounds=2))
    h.trained(job)
    assert all(isinstance(e.event, Unbounded) and e.reads == ("gradients", "losses") for e in h.book(job).entries)
    assert all(0 < e.coordinates < 650 for e in h.book(job).entries)
    assert job.method.weighting == "examples"
    claim = job.method.claim(job.setting)
    assert claim is not None
    assert claim.epsilon == pytest.approx(math.sqrt(2 * 0.5 * 650 * math.log(1250)) / 0.5)
    with pytest.raises(ConfigError, match="view = 'server'"):
        calibrated_setting(h.at_epsilon_8({**FAST, "variant": "published"}))
    with pytest.raises(ConfigError, match="gamma_min"):
        h.job_of(h.at_epsilon_8({**FAST, "gamma_min": 0.9, "gamma_max": 0.5}))


# --- proven ------------------------------------------------------------------------------------------------------------


def test_support_is_the_last_movement_and_a_random_share() -> None:
    policy = planner(FedANC(pretraining_steps=0, exploration=0.25), setting())
    movement = torch.arange(40.0)
    plan = policy.plan(Released(3, movement, torch.zeros(40)), policy.start())
    assert plan.support is not None
    _, gamma = policy.part.method.controller.act(policy.start(), 0.0, 0.0)
    k = math.ceil(gamma * 40)
    known = k - math.ceil(k / 4)
    assert int(plan.support.sum()) == k
    assert plan.support[40 - known :].all()
    assert not plan.support[: 40 - known].all()
    other = policy.plan(Released(3, movement, torch.zeros(40)), {**policy.start(), "releaser": 5})
    assert not torch.equal(plan.support, other.support), "clients explore different coordinates"  # type: ignore[arg-type]
    first = policy.plan(Released(0, movement, None), policy.start())
    assert first.support is not None
    assert int(first.support.sum()) == k


def test_captured_and_tradeoff_by_hand() -> None:
    movement = torch.tensor([3.0, -1.0, 0.0, 2.0])
    assert captured(movement, 0.5) == pytest.approx((13 / 14, 4 * 4 / 14))
    assert captured(movement, 0.26) == pytest.approx((13 / 14, 4 * 4 / 14)), "k is rounded up"
    assert captured(None, 0.3) == (0.3, 1.0) == captured(torch.zeros(4), 0.3)
    b, gamma = torch.tensor(0.4, requires_grad=True), torch.tensor(0.5, requires_grad=True)
    value = tradeoff(b, gamma, weight=2.0, noise=3.0, captured=(0.7, 0.9))
    error = 0.3 + 3 * 0.16 * 0.5
    assert value.item() == pytest.approx(math.log(error) + 2 * (1.5625 - 1) ** 2, rel=1e-5)
    by_b, by_gamma = torch.autograd.grad(value, (b, gamma))
    assert by_gamma.item() == pytest.approx((3 * 0.16 - 0.9) / error, rel=1e-5)
    assert by_b.item() == pytest.approx(2 * 3 * 0.4 * 0.5 / error + 4 * 0.5625 * (-2 * 0.25 / 0.064), rel=1e-5)


def spend(policy: Budgeted, rounds: list[int], seed: int = 0) -> list[float]:
    """mu of each round that a client takes part in."""
    state, mus = policy.start(), []
    for t in rounds:
        plan = policy.plan(Released(t, torch.ones(40) * t, torch.zeros(40)), state)
        std = float(plan.noise_std)  # type: ignore[arg-type]
        mus.append(2 * plan.clip / std)
        g = torch.Generator().manual_seed(seed + t)
        vector = torch.randn(40, generator=g) * (1 + 5 * (t % 2))
        state = policy.observe(state, Upload(0, t, vector, torch.full((2,), std), plan, plan.support, start=torch.ones(40) * t))
    return mus


def test_the_budget_is_spent_exactly_unevenly_and_never_more() -> None:
    policy = planner(FedANC(pretraining_steps=20, controller_lr=0.02), setting())
    total = 12 * (2 / 4.0) ** 2
    mus = spend(policy, list(range(12)))
    assert math.fsum(mu**2 for mu in mus) == pytest.approx(total, rel=1e-9)
    assert max(mus) > 1.05 * min(mus), "the controller must matter"
    assert spend(policy, list(range(12)), seed=50) != mus
    some = spend(policy, [1, 4, 5, 10])
    assert math.fsum(mu**2 for mu in some) < total
    assert some[-1] > mus[10], "rounds sat out leave more for the others"
    capped = planner(policy.part.method, setting(max_participations=4))
    assert math.fsum(mu**2 for mu in spend(capped, [1, 4, 5, 10])) == pytest.approx(4 * 0.25, rel=1e-9)


def test_a_larger_beta_asks_for_more_noise_and_spends_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """An even share of 12 (2 / 4)^2 is 0.25; a round costs 0.25 (0.5 / b)^2, within 4 times: noise 2 / mu = 8 b."""
    policy = planner(FedANC(pretraining_steps=0, pace=4.0), setting())
    noises = []
    for b in (0.1, 0.25, 0.4, 0.5, 0.625, 1.0, 9.0):
        monkeypatch.setattr(Controller, "act", lambda *_, b=b: (b, 0.5))
        noises.append(policy.plan(Released(0, torch.zeros(40), None), policy.start()).noise_std)
    assert noises == pytest.approx([2.0, 2.0, 3.2, 4.0, 5.0, 8.0, 8.0])


def test_poisson_sums_keep_the_noise_and_adapt_the_support() -> None:
    policy = planner(FedANC(pretraining_steps=20, controller_lr=0.02), setting(View.AGGREGATE, sampling="poisson"))
    assert spend(policy, list(range(5))) == pytest.approx([0.5] * 5)


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_the_ledger_adds_up_to_the_configured_epsilon(view: str) -> None:
    job = h.job_of(h.at_epsilon_8({**FAST, "controller_lr": 0.02}, f"privacy.view={view}", rounds=6))
    rows = h.trained(job).history
    for client in range(6) if view == "server" else [-1]:
        spent = epsilon_of(math.sqrt(h.book(job).mu2(client)), 1e-3)
        assert 0.999 * 8.0 < spent <= 8.0
    assert len({round(row["beta"], 9) for row in rows}) == 6, "the noise follows the controller"
    assert len({round(row["gamma"], 9) for row in rows}) == 6
    for row in rows:
        if view == "aggregate":
            assert row["coordinates"] < 650
            assert row["noise_norm"] == pytest.approx(row["beta"] * math.sqrt(row["coordinates"]) / 6, rel=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("view", ["server", "aggregate"])
@pytest.mark.parametrize("level", [{"noise_multiplier": 5.0}, {"epsilon": 4.0}])
@pytest.mark.heavy
def test_the_preset_cap_admits_every_round_to_the_last(view: str, level: dict[str, float], tmp_path: Path) -> None:
    sections = {"privacy": {**level, "view": view, "delta": 1e-3}, "run": {"engine": "inline"}}
    config = h.at_epsilon_8(FAST, f"privacy.view={view}").model_dump(mode="json") | sections
    result = run(parse(config), tmp_path / "run")
    assert (len(result.history), result.ended) == (4, "")


def test_poisson_ledger_is_the_planned_one() -> None:
    job = h.job_of(h.at_epsilon_8(FAST, "training.sampling=poisson", "training.clients_per_round=3"))
    h.trained(job)
    events = [e.event for e in h.book(job).entries]
    assert all(isinstance(e, SampledGaussian) for e in events)
    assert {round(e.noise_multiplier, 9) for e in events if isinstance(e, SampledGaussian)} == {round(job.setting.z, 9)}


def test_the_public_loss_reaches_the_controller() -> None:
    policy = planner(FedANC(pretraining_steps=20, pace=4.0), setting())
    plans = [policy.plan(Released(0, torch.zeros(40), None, loss), policy.start()) for loss in (None, 0.5, 5.0)]
    assert len({float(p.noise_std) for p in plans}) == 3  # type: ignore[arg-type]
    seen: list[float | None] = []

    class Spy(Budgeted):
        def plan(self, s: Any, now: Released, state: Any) -> Any:
            seen.append(now.public_loss)
            return super().plan(s, now, state)

    for public in ("0.1", "0.0"):
        job = h.job_of(h.at_epsilon_8(FAST, f"data.public_fraction={public}", rounds=3))
        spy = Planner.of(Spy(job.context.policy.part.method), job.setting)  # type: ignore[union-attr]
        h.trained(replace(job, context=replace(job.context, policy=spy)))
    losses = [loss for loss in seen[:3] if loss is not None]
    assert losses[0] == pytest.approx(math.log(10), abs=0.4), "an untrained model"
    assert len(set(losses)) == 3
    assert seen[3:] == [None] * 3


@pytest.mark.parametrize("view", ["server", "aggregate"])
def test_pool_and_inline_agree_on_controllers_and_public_loss(view: str) -> None:
    models = []
    for engine in (Inline, lambda context: ProcessPool(context, workers=2)):
        job = h.job_of(h.at_epsilon_8(FAST, f"privacy.view={view}", "data.public_fraction=0.1", rounds=3))
        progress = start(job)
        assert fit(job, engine(job.context), progress) == ""
        models.append(progress.model)
    assert torch.equal(models[0], models[1])


def test_restricting_the_support_lowers_the_noise_at_the_same_cost() -> None:
    norms = []
    for low, high in ((0.05, 0.06), (0.94, 0.95)):
        job = h.job_of(h.at_epsilon_8({**FAST, "gamma_min": low, "gamma_max": high}, rounds=1))
        norms.append(h.trained(job).history[0]["update_norm"])
    assert norms[0] < norms[1] / 2


@pytest.mark.parametrize("path", [p for p in h.presets("fedanc") if "proven" not in p.stem], ids=lambda p: p.stem)
def test_presets_of_the_paper_calibrate(path: Path) -> None:
    method, s = calibrated_setting(load_config(path))
    assert method.name == "fedanc"
    assert method.releases(s, s.scope.view)
    assert (s.clients, s.cohort, s.local.batch_size) == (20, 10, 32)


@pytest.mark.parametrize("controller_beta", [1e-3, 1.0, 1e3])
def test_no_pace_spends_the_budget_before_the_last_round(controller_beta: float) -> None:
    config = parse(
        {
            "data": {"partition": {"kind": "iid", "clients": 4}},
            "model": {"name": "linear"},
            "method": {"name": "fedanc", "pace": 4.0},
            "training": {"rounds": 6},
            "privacy": {"epsilon": 2.0, "delta": 1e-3, "view": "server"},
        }
    )
    method, setting = calibrated_setting(config)
    policy = planner(method, setting)
    assert isinstance(policy.part, Budgeted)
    spent = 0.0
    for t in range(6):
        mu = policy.part._mu(setting, controller_beta, t, {"spent": spent, "rounds": t})
        assert mu > 0
        spent += mu**2
    assert spent == pytest.approx(6 / setting.z**2, rel=1e-12)
