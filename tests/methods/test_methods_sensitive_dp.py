"""Sensitive DP: the published noise worked out by hand over three rounds; what the proven clips follow, and what they cost."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedveil.accounting.types import Adjacency, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import plan_mu
from fedveil.papers.ladp_fl.baselines import RawHistory, SensitiveDP
from fedveil.training.local import BatchGradient, Local, Plain, train
from method_kit import LAYERS, Layers, digits, job_of, local_of, planner, released, setting, trained, upload

TWO_PASSES = {"local_epochs": 2, "batch_clip": 20.0}


class Moves:
    """A gradient source under which the model moves by `size` along its first coordinate in a round of one batch."""

    batches = BatchGradient.batches

    def __init__(self, size: float) -> None:
        self.size = size

    def __call__(self, local: Local, x: Any, y: Any) -> torch.Tensor:
        local.model.grad.copy_(torch.tensor([-self.size, 0, 0, 0, 0, 0, 0]))
        return torch.zeros(())


def noise_of(size: float, start: float, state: dict[str, Any], **options: Any) -> float:
    """The noise std of a round in which the client moves by `size`; one coordinate of the model is `start`; c = 3, bound 10."""
    objective = RawHistory(method=SensitiveDP(variant="published", **options), multiplier=3.0, reach=10.0)
    model = torch.tensor([0.0, start, 0, 0, 0, 0, 0])
    steps = {"local_steps": 1, "batch_size": 5, "optimizer": {"lr": 1.0}}
    local = local_of(Layers(LAYERS), Moves(size), training=steps, start=model, state=state, normal=torch.ones)
    update, _ = train(local, torch.zeros(5, 1), torch.zeros(5), objective)
    return float(update[6])


def test_published_noise_by_hand() -> None:
    """beta 0.5, zeta 0.75, kappa 2. Rounds 1 and 2 know too little or reach the bound of 10; round 3 by hand.

    Moves 1, 2, 1 from models 0, 0.4, 0.8: before round 3, a = (1 + 4) / 2, b = (0.16 + 0.16) / 2.
    """
    state: dict[str, Any] = {}
    options = {"memory": 0.5, "own": 0.75, "headroom": 2.0}
    assert noise_of(1.0, 0.0, state, **options) == pytest.approx(30.0)
    assert noise_of(2.0, 0.4, state, **options) == pytest.approx(3 * 4 * math.sqrt(0.75 * 1 + 0.25 * 0.16))
    third = 3 * 4 * math.sqrt(0.75 * 2.5 + 0.25 * 0.16)
    assert noise_of(1.0, 0.8, state, **options) == pytest.approx(third)
    assert state["share"] == pytest.approx(third / 30)
    assert noise_of(1.0, 100.0, state, **options) == pytest.approx(30.0)


def test_published_is_full_dp_first_and_promises_nothing() -> None:
    s = setting(training=TWO_PASSES, epsilon=0.2, noise_multiplier=None, delta=0.02)
    method = SensitiveDP(variant="published")
    objective = method.client(s)
    assert isinstance(objective, RawHistory)
    assert objective.multiplier * objective.reach == pytest.approx(115.03275)
    assert all(isinstance(e, Unbounded) for view in View for e in method.releases(s, view))
    claim = method.claim(s)
    assert claim is not None
    assert claim.epsilon == pytest.approx(0.25 * 20 * 0.2)
    with pytest.raises(ConfigError, match=r"training\.batch_clip"):
        method.calibrate(setting(training={**TWO_PASSES, "batch_clip": None}, epsilon=0.2, noise_multiplier=None))
    with pytest.raises(ValueError, match="lowest"):
        SensitiveDP(clip_range=(2.0, 1.0))


def test_momentum_stretches_the_published_bound() -> None:
    """1 / (1 - mu) times as far, which five steps along one gradient of norm G_c come near to and never pass."""
    plainly: dict[str, Any] = {"local_epochs": 5, "batch_size": 5, "batch_clip": 20.0, "optimizer": {"lr": 0.1}}
    heavy = {**plainly, "optimizer": {"lr": 0.1, "momentum": 0.9}}
    method = SensitiveDP(variant="published")
    bounds = [method.client(setting(training=steps, epsilon=0.2)) for steps in (heavy, plainly)]
    assert all(isinstance(b, RawHistory) for b in bounds)
    with_momentum, plain = (b.reach for b in bounds if isinstance(b, RawHistory))
    assert with_momentum == pytest.approx(10 * plain)
    assert plain == pytest.approx(2 * 0.1 * 5 * 20)
    local = local_of(Layers(LAYERS), Moves(20.0), training=heavy)
    update, _ = train(local, torch.zeros(5, 1), torch.zeros(5), Plain())
    by_hand = 0.1 * 20 * sum(0.9**j for k in range(5) for j in range(k + 1))
    assert float(update.norm()) == pytest.approx(by_hand)
    assert plain / 2 < by_hand < with_momentum / 2
    for optimizer in ({"lr": 0.1, "weight_decay": 0.1}, {"name": "adam", "lr": 0.1}):
        with pytest.raises(ConfigError, match="bounds SGD steps"):
            method.check_published(setting(training={**heavy, "optimizer": optimizer}, epsilon=0.2))


# --- proven ---


def test_clips_follow_released_norms_less_their_noise() -> None:
    """One release (3, 0, 0 | 0, 0, 0, 4) with noise std 1: squares 9 - 3 and 16 - 4; kappa 2: clips 2 sqrt 6 and 2 sqrt 12."""
    policy = planner(SensitiveDP(clip=10.0), setting())
    state = policy.observe({}, upload([3.0, 0, 0, 0, 0, 0, 4.0], [0.0] * 7, 1.0))
    plan = policy.plan(released([0.0] * 7, 1), state)
    assert plan.layer_clip is not None
    assert plan.layer_clip.tolist() == pytest.approx([2 * math.sqrt(6), 2 * math.sqrt(12)])
    again = policy.observe(state, upload([0.0] * 7, [0.0] * 7))
    assert again["own"].tolist() == pytest.approx([0.9 * 6, 0.9 * 12])
    others = policy.observe_all({}, [upload([3.0, 0, 0, 0, 0, 0, 0], [0.0] * 7, 1.0), upload([1.0] + [0.0] * 6, [0.0] * 7, 1.0)])
    assert others["own"].tolist() == pytest.approx([4 - 3 / 2, 0.0])
    mixed = policy.plan(replace(released([0.0] * 7, 1), server=others), state)
    assert mixed.layer_clip is not None
    assert mixed.layer_clip.tolist() == pytest.approx([2 * math.sqrt((6 + 2.5) / 2), 2 * math.sqrt(12 / 2)])


@given(st.lists(st.floats(-9, 9, width=32), min_size=7, max_size=7), st.floats(0, 3), st.sampled_from(list(Adjacency)))
def test_every_plan_costs_its_share_and_stays_in_range(vector: list[float], std: float, adjacency: Adjacency) -> None:
    s = setting(adjacency=adjacency)
    policy = planner(SensitiveDP(), s)
    plan = policy.plan(released([0.0] * 7, 1), policy.observe({}, upload(vector, [0.0] * 7, std)))
    assert plan_mu(plan, s.layout, adjacency.factor) == pytest.approx(adjacency.factor / 2.0, rel=1e-6)
    first = policy.plan(released([0.0] * 7), {}).layer_clip
    assert plan.layer_clip is not None
    assert first is not None
    assert bool(((plan.layer_clip >= 0.1 * first * 0.999) & (plan.layer_clip <= 2.0 * first * 1.001)).all())


def test_the_same_noise_gives_the_same_model() -> None:
    config = digits({"name": "sensitive-dp"}, privacy={"epsilon": 8.0, "view": "aggregate"})
    first, again = trained(job_of(config)), trained(job_of(config))
    assert first.model.equal(again.model)
