"""AdapLDP: three rounds against the authors' program, two of a client against plain numpy, and the budget on every path."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedveil.accounting.types import Unbounded, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, reason_of
from fedveil.papers.ladp_fl.adapldp import AdapLDP, Scaling, laplace, turned
from fedveil.papers.ladp_fl.claim import adapldp_scale
from fedveil.training.local import BatchGradient, Local, train
from method_kit import LAYERS, Layers, digits, job_of, local_of, planner, released, setting, stepped, trained, upload

# --- formulas ---


def test_noise_by_hand() -> None:
    """Delta = 2 * 0.01 * 35 / 600; Laplace Delta / (eps c); Gaussian sqrt(2 ln(125000 / c)): 6.106 at 0.001, 4.344 at 10."""
    delta_f = 2 * 0.01 * 35 / 600
    assert adapldp_scale(0.5, 1e-5, delta_f, 0.001, "laplace") == pytest.approx(delta_f / 0.5 * 1000)
    assert adapldp_scale(1.0, 1e-5, 1.0, 0.001, "gaussian") == pytest.approx(6.1063, abs=1e-4)
    assert adapldp_scale(1.0, 1e-5, 1.0, 10.0, "gaussian") == pytest.approx(4.3436, abs=1e-4)
    assert adapldp_scale(2.0, 0.02, 3.0, 1000.0, "gaussian") == pytest.approx(1.5)


def test_laplace_noise_has_its_law() -> None:
    z = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    drawn = laplace(z).numpy()
    assert stats.kstest(drawn, stats.laplace.cdf).pvalue > 1e-3
    assert stats.kstest(drawn * 1.1, stats.laplace.cdf).pvalue < 1e-3


def test_the_turn_by_hand() -> None:
    """moved (3, 0) along step (5, 0): cos = 15 / 15.0001 and arccos(0) = 90 degrees; cos(90 rad) = -0.44807 in the code."""
    sent, moved, step = torch.ones(2), torch.tensor([3.0, 0.0]), torch.tensor([5.0, 0.0])
    right = turned(sent, moved, step, 0.1, degrees=False)
    assert right.tolist() == pytest.approx([1 + 0.1 * 15 / 15.0001, 1.0], abs=1e-6)
    angle = math.degrees(math.acos(15 / 15.0001))
    wrong = turned(sent, moved, step, 0.1)
    assert wrong.tolist() == pytest.approx([1 + 0.1 * math.cos(angle), 1 + 0.1 * math.cos(90)], abs=1e-3)


def test_the_server_standardises_all_scalers() -> None:
    policy = planner(AdapLDP(variant="published"), setting(clients=3, cohort=3))
    uploads = [replace(upload([0.0] * 7, [0.0] * 7), client=1, extras={"scaler": torch.tensor(4.0)})]
    state = policy.observe_all({}, uploads)
    values = np.array([0.001, 4.0, 0.001])
    assert state["scalers"] == pytest.approx(list((values - values.mean()) / (values.std() + 1e-5)), rel=1e-6)
    plan = policy.plan(replace(released([1.0] * 7, 1, [0.5] * 7), client=1, server=state), {})
    assert plan.broadcast["scaler"] == pytest.approx(math.sqrt(2), rel=1e-4)
    assert plan.broadcast["mean"] == pytest.approx(0, abs=1e-9)
    assert plan.broadcast["step"].tolist() == [0.5] * 7
    assert reason_of(plan) == AdapLDP(variant="published").unproven


# --- training, against plain numpy ---


class Fixed:
    """A gradient source with the same gradient in each batch."""

    batches = BatchGradient.batches

    def __call__(self, local: Local, x: Any, y: Any) -> torch.Tensor:
        local.model.grad.copy_(torch.tensor([3.0, 4.0, 0.0, 0.3, 0.0, 0.4, 0.0]))
        return torch.zeros(())


def one_round(round: int, state: dict[str, Any], public: dict[str, Any], law: str) -> tuple[np.ndarray[Any, Any], float]:
    """Ours: two batches of a client of ten examples; gradient norms 5 and 0.5 against a clip of 1, rate 0.1, no momentum."""
    method = AdapLDP(variant="published", law=law, gradient_clip=1.0, turn=0.02)
    steps = {"local_steps": 2, "batch_size": 5, "optimizer": {"lr": 0.1}}
    local = local_of(Layers(LAYERS), Fixed(), training=steps, start=torch.ones(7))
    local.normal = lambda n: torch.linspace(-1, 1, n)
    local.round, local.state, local.plan = round, state, SimpleNamespace(clip=1.0, broadcast=public)
    update, _ = train(local, torch.zeros(10, 1), torch.zeros(10), Scaling(method, 0.5, 1e-5))
    return update.double().numpy(), float(local.extras["scaler"])


@pytest.mark.parametrize("law", ["laplace", "gaussian"])
def test_two_rounds_against_numpy(law: str) -> None:
    z = np.linspace(-1, 1, 7)
    noise = -np.sign(z) * np.log(2 * stats.norm.cdf(-np.abs(z))) if law == "laplace" else z
    order = 1 if law == "laplace" else 2
    grad = np.array([3.0, 4.0, 0.0, 0.3, 0.0, 0.4, 0.0])
    for part in (slice(0, 3), slice(3, 7)):
        grad[part] /= max(1.0, float(np.linalg.norm(grad[part], order)))
    step = np.array([0.2, -0.1, 0.0, 0.1, 0.0, 0.0, 0.3])
    state: dict[str, Any] = {}
    public = {"scaler": 0.001, "mean": 0.001, "step": torch.tensor(step, dtype=torch.float32)}
    ours, scaler = one_round(0, state, public, law)
    first = adapldp_scale(0.5, 1e-5, 2 * 0.1 * 1.0 / 10, 0.001, law)
    sent = 1 - 0.1 * (1 + 0.995) * grad + first * noise
    assert scaler == pytest.approx(0.001)
    np.testing.assert_allclose(ours, sent - 1, rtol=1e-5, atol=1e-6)
    ours, scaler = one_round(3, state, {**public, "scaler": -0.5, "mean": 0.1}, law)
    rate = 0.1 * 0.995**2
    update = -rate * (1 + 0.995) * grad
    assert scaler == pytest.approx(0.6 * 0.6 + 0.4 * np.linalg.norm(update) / (rate * 0.995**2), rel=1e-5)
    second = 1 + update + adapldp_scale(0.5, 1e-5, 2 * rate / 10, scaler, law) * noise
    moved = second - sent
    turn = np.empty(7)
    for part in (slice(0, 3), slice(3, 7)):
        x, y = moved[part], step[part]
        turn[part] = np.cos(np.degrees(np.arccos(x * y / (np.linalg.norm(x) * np.linalg.norm(y) + 1e-4))))
    np.testing.assert_allclose(ours, second * (1 + 0.02 * turn) - 1, rtol=1e-3, atol=2e-4)


# --- training, against the authors' program ---

PICKS = [[0, 1], [1, 2], [0, 1]]
PROGRAM = {
    "laplace": [
        ([-0.751914, -0.429752, -0.138916, 0.110378, 0.349938, 0.618729, -0.054043, 0.050253], 0.001),
        ([-0.760950, -0.455618, -0.157831, 0.119414, 0.375805, 0.637645, -0.053782, 0.049992], 0.001),
        ([-0.770228, -0.456128, -0.146260, 0.132874, 0.376512, 0.622292, -0.048828, 0.044397], 0.151129),
        ([-0.742779, -0.449209, -0.166387, 0.105177, 0.369511, 0.642500, -0.054824, 0.050287], 0.131800),
        ([-0.760866, -0.443780, -0.134807, 0.128606, 0.366147, 0.604865, -0.041522, 0.036743], 0.988632),
        ([-0.768695, -0.475540, -0.157291, 0.140540, 0.397078, 0.643848, -0.046604, 0.040950], 0.658272),
    ],
    "gaussian": [
        ([-0.524852, -0.282418, -0.056823, 0.123752, 0.282052, 0.457189, 0.186364, -0.086730], 0.001),
        ([-0.540001, -0.336541, -0.100159, 0.138902, 0.336175, 0.500525, 0.186709, -0.087075], 0.001),
        ([-0.566629, -0.342539, -0.078085, 0.168227, 0.341877, 0.475163, 0.173354, -0.074912], 0.308371),
        ([-0.509767, -0.330012, -0.121415, 0.111357, 0.329347, 0.518496, 0.165978, -0.067539], 0.319406),
        ([-0.564618, -0.323214, -0.056395, 0.159642, 0.323475, 0.445507, 0.161296, -0.061023], 1.154254),
        ([-0.580884, -0.364847, -0.097963, 0.181396, 0.365405, 0.505110, 0.162227, -0.062175], 0.708005),
    ],
}
"""Weights and scaler that each pick sends, from the loop of liyan2015/AdapLDP-FL (Update.py a183499, main.py and Fed.py of its
history) on a linear network with the examples below; its random numbers replaced by a sweep from -1.5 to 1 in each layer."""


@pytest.mark.parametrize("law", PROGRAM)
def test_three_rounds_are_those_of_the_authors_program(law: str) -> None:
    method = AdapLDP(variant="published", law=law, gradient_clip=0.3)
    policy, objective = planner(method, setting(clients=3, cohort=3)), Scaling(method, 50.0, 1e-5)
    x, y = torch.sin(torch.arange(90.0)).reshape(30, 3), torch.arange(30) % 2
    module = torch.nn.Linear(3, 2)
    model = before = torch.cat([torch.linspace(-0.5, 0.5, 6), torch.tensor([0.2, -0.1])])
    states: dict[int, dict[str, Any]] = {client: {} for client in range(3)}
    server: dict[str, Any] = {}
    expected = iter(PROGRAM[law])
    steps = {"local_steps": 2, "batch_size": 10, "optimizer": {"lr": 0.1, "momentum": 0.5}}
    for round, picks in enumerate(PICKS):
        uploads = []
        for client in picks:
            told = replace(released(model.tolist(), round, before.tolist()), client=client, server=server)
            local = local_of(module, training=steps, start=model)
            local.normal = lambda n: torch.cat([torch.linspace(-1.5, 1, 6), torch.linspace(-1.5, 1, 2)])
            local.round, local.state, local.plan = round, states[client], policy.plan(told, {})
            mine = slice(10 * client, 10 * client + 10)
            update, _ = train(local, x[mine], y[mine], objective)
            weights, scaler = next(expected)
            np.testing.assert_allclose((model + update).numpy(), weights, atol=1e-5)
            assert float(local.extras["scaler"]) == pytest.approx(scaler, rel=3e-5)
            uploads.append(replace(upload(update.tolist(), model.tolist()), client=client, extras=local.extras))
        server = policy.observe_all(server, uploads)
        mean = model + torch.stack([one.vector for one in uploads]).mean(0)
        # in the second round two names of the program mean the same tensors, so that its last global step is zero
        before, model = (mean if round == 0 else model), mean


# --- published ---


def test_published_refuses_sums_and_promises_nothing() -> None:
    s = setting(epsilon=10.0, noise_multiplier=None)
    method = AdapLDP(variant="published")
    with pytest.raises(ConfigError, match=r"privacy\.view = 'server'"):
        method.calibrate(setting(View.AGGREGATE, epsilon=10.0))
    with pytest.raises(ConfigError, match=r"training\.optimizer to sgd"):
        method.calibrate(setting(epsilon=10.0, noise_multiplier=None, training={"optimizer": {"name": "adam"}}))
    assert all(isinstance(e, Unbounded) for view in View for e in method.releases(s, view))
    objective = method.client(s)
    assert isinstance(objective, Scaling)
    assert objective.epsilon == pytest.approx(10.0 / (0.4 * 20))
    claim = method.claim(s)
    assert claim is not None
    assert (claim.epsilon, claim.note) == (10.0, "pure; summed over q T rounds")


# --- proven ---


@given(st.lists(st.floats(0, 50), min_size=20, max_size=20), st.integers(1, 20))
def test_no_path_costs_more_than_constant_noise(norms: list[float], most: int) -> None:
    s = setting(rounds=20, max_participations=most)
    policy, spent = planner(AdapLDP(clip=1.0), s), 0.0
    state = policy.start()
    for t, norm in list(enumerate(norms))[20 - most :]:
        plan = policy.plan(released([0.0] * 7, t), state)
        assert isinstance(plan.noise_std, float)
        spent += plan.noise_std**-2
        state = policy.observe(state, replace(upload([norm] + [0.0] * 6, [0.0] * 7), round=t))
        assert spent <= most / s.z**2 * (1 + 1e-9)
    assert spent == pytest.approx(most / s.z**2)


def test_a_client_that_moved_more_gets_less_noise() -> None:
    policy = planner(AdapLDP(), setting())
    stds = []
    for norm in (0.0, 0.1, 1.0):
        state = policy.observe(policy.start(), upload([norm] + [0.0] * 6, [0.0] * 7))
        plan = policy.plan(released([0.0] * 7, 1), state)
        stds.append(plan.noise_std)
    assert stds[0] > stds[1] > stds[2]
    assert state["scaler"] == pytest.approx(0.6 * 0.001 + 0.4 * 1.0 / 0.1)


def test_the_server_turns_what_was_released() -> None:
    public = {"sent": torch.tensor([0.0, 0, 0, 1, 0, 0, 0]), "step": torch.tensor([1.0, 0, 0, 0, 0, 0, 0])}
    one = replace(upload([2.0, 0, 0, 0, 0, 0, 0], [0.0] * 7), plan=Plan(clip=1.0, broadcast=public))
    model = torch.tensor([1.0, 0, 0, 1, 0, 0, 0])
    step = stepped(AdapLDP(turn=0.1), [one], model)
    assert step.tolist() == pytest.approx([3.0 * (1 + 0.1 * 3 / 3.0001) - 1, 0, 0, 0, 0, 0, 0], abs=1e-5)
    assert stepped(AdapLDP(turn=0.0), [one], model).tolist() == one.vector.tolist()


def test_proven_needs_a_fixed_cohort() -> None:
    with pytest.raises(ConfigError, match=r"training\.sampling = 'fixed'"):
        AdapLDP().calibrate(setting(View.AGGREGATE, sampling="poisson"))


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_published_learns_at_its_claim(law: str) -> None:
    """12 clients of 120 digits, 6 rounds, a claim of 100: the Gaussian learns; the first Laplace round is 1,000 times noisier."""
    config = digits(
        {"name": "adapldp", "variant": "published", "law": law}, rounds=6, privacy={"epsilon": 100.0, "view": "server"}
    )
    first, again = (trained(job_of(config)) for _ in range(2))
    assert first.model.equal(again.model)
    noise = [row["noise_norm"] for row in first.history]
    if law == "gaussian":
        assert first.history[-1]["test_accuracy"] > 0.6
        assert noise[0] / noise[1] == pytest.approx(1.4, abs=0.2)
    else:
        assert noise[0] > 500 * noise[1]
