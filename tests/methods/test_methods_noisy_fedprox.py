"""Noisy-FedProx: the pull of the penalty in training and in the bound, Theorem 4 beside composition."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.last_iterate import final_mu_constant
from fedveil.accounting.types import Adjacency, Gaussian, View
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.methods.run_cost import events_in_view
from fedveil.methods.setting import Setting
from fedveil.papers.convergent_dp.claim import claim_fedprox, linear_loss_mu
from fedveil.papers.convergent_dp.method import NoisyFedProx, trajectory
from method_kit import digits, setting, update_of

CLIPPED_STEPS = {"optimizer": {"lr": 0.5}, "batch_clip": 2.0}
TRAINING = {"local_steps": 3, "batch_clip": 2.0, "optimizer": {"lr": 0.1}, "clients_per_round": 12}


def prox(view: View = View.AGGREGATE, steps: int = 3, **changes: Any) -> Setting:
    training = {**CLIPPED_STEPS, "local_steps": steps}
    return setting(view, training=training, **{"rounds": 4, "noise_multiplier": None, **changes})


def mu_of(events: Any) -> float:
    assert all(isinstance(e, Gaussian) for e in events), events
    return math.sqrt(sum(e.count * e.mu**2 for e in events))


@pytest.mark.parametrize("alpha", [0.4, 1.0, 3.0])
def test_bound_by_hand(alpha: float) -> None:
    """r = |1 - 0.5 alpha|; three steps of length 1, earlier ones shrunk: 1 + r + r^2; beyond eta alpha = 1 signs alternate."""
    r = abs(1 - 0.5 * alpha)
    assert trajectory(prox(), alpha).tolist() == pytest.approx([1 + r + r * r])


def test_bound_stops_growing_with_the_number_of_steps() -> None:
    """(V / alpha)(1 - (1 - eta alpha)^K) for V = 2, alpha = 0.5: at most 4, where Noisy-FedAvg is at V eta K = 100."""
    many = prox(steps=100)
    assert trajectory(many, 0.5)[0] == pytest.approx(4.0, rel=1e-9)
    assert trajectory(many)[0] == pytest.approx(100.0)
    assert NoisyFedProx(proximal=0.5, sigma=1.0).clip_norm(
        NoisyFedProx(proximal=0.5, sigma=1.0).calibrate(many)
    ) == pytest.approx(4.0)


def test_training_adds_the_penalty_after_the_clip() -> None:
    """A gradient that never turns, always clipped: steps of rate * V, the earlier ones pulled back: 1 + 0.8 + 0.64 of them."""
    network, method = torch.nn.Linear(1, 2, bias=False), {"name": "noisy-fedprox", "proximal": 0.4, "sigma": 1e-9}
    torch.nn.init.zeros_(network.weight)
    x, y = torch.full((1, 1), 10.0), torch.tensor([0])
    wide, steep = (
        float(update_of(method, network, x, y, local_steps=3, batch_clip=clip, optimizer={"lr": 0.5}).norm())
        for clip in (2.0, 1e-3)
    )
    assert wide <= trajectory(prox(), 0.4)[0] * (1 + 1e-6)
    assert steep == pytest.approx(0.5e-3 * (1 + 0.8 + 0.64), rel=1e-4)


def test_composition_by_hand() -> None:
    """alpha = 0.4: C = 2.44; sigma 1.22 on each of 4 uploads: mu = 2 an upload; a sum hides 3 noises, and 4 rounds double it."""
    method = NoisyFedProx(proximal=0.4, sigma=1.22)
    s = method.calibrate(prox())
    assert mu_of(method.releases(s, View.AGGREGATE)) == pytest.approx(4 / math.sqrt(3))
    assert mu_of(method.releases(s, View.SERVER)) == pytest.approx(4.0)


def test_claim_is_theorem_4_and_only_beyond_the_smoothness() -> None:
    method = NoisyFedProx(proximal=3.0, smoothness=2.0, sigma=1.5)
    claim = method.claim(method.calibrate(prox()))
    printed = claim_fedprox(clip=2.0, proximal=3.0, smoothness=2.0, rounds=4, clients=4, noise_std=1.5)
    assert claim is not None
    assert claim.epsilon == pytest.approx(epsilon_of(printed, claim.delta))
    equal = NoisyFedProx(proximal=2.0, smoothness=2.0, sigma=1.5)
    assert equal.claim(equal.calibrate(prox())) is None


def test_claim_lies_below_what_linear_losses_give_away() -> None:
    method = NoisyFedProx(proximal=1.0, smoothness=0.5, sigma=1.5)
    s = method.calibrate(prox(rounds=100, adjacency=Adjacency.REPLACE_ONE))
    attained = linear_loss_mu(np.full(100, 2 * trajectory(s, 1.0)[0] / 4), 4, 1.5)
    claim = method.claim(s)
    assert claim is not None
    assert claim.epsilon < epsilon_of(attained, s.delta) / 2
    assert mu_of(method.releases(s, View.AGGREGATE)) * math.sqrt(3 / 4) == pytest.approx(attained), "one noise of four is known"


def test_bound_on_the_last_model_uses_the_maps_of_the_penalty() -> None:
    """K = 1: d' <= (|1 - eta alpha| + eta L) d + eta alpha d = (1 + eta L) d, and a client moves the mean by 2 V eta / n."""
    method = NoisyFedProx(proximal=0.4, sigma=0.05, project_to=1.0, assumed_smoothness=0.01)
    s = method.calibrate(prox(View.FINAL, steps=1, rounds=5000, adjacency=Adjacency.REPLACE_ONE))
    grid = 2.0**-29 * math.sqrt(s.layout.dimension) * (1 + 1 / 4)  # of uploads with noise 0.05, and of whole shifts of their mean
    by_hand = final_mu_constant(1 + 0.5 * 0.01, 2 * 2.0 * 0.5 / 4 + grid + 2.0**-20, 5000, 1.0, 0.05 / 2)
    assert mu_of(events_in_view(method, s, View.FINAL)) == pytest.approx(by_hand, rel=1e-9)
    assert by_hand < mu_of(method.releases(s, View.AGGREGATE)) / 2


def test_it_needs_less_noise_than_without_the_penalty() -> None:
    """alpha = 2 at rate 0.2 over 10 steps: C falls from 2 V to 0.99 V, and with it the noise for the same epsilon."""
    training = {**TRAINING, "local_steps": 10, "optimizer": {"lr": 0.2}}
    methods: list[dict[str, Any]] = [{"name": "noisy-fedprox", "proximal": 2.0}, {"name": "noisy-fedavg"}]
    (_, s), (_, without) = (calibrated_setting(digits(m, training=training, privacy={"epsilon": 200.0})) for m in methods)
    assert s.z == pytest.approx(without.z)
    assert trajectory(s, 2.0)[0] == pytest.approx(1 - 0.6**10)
    assert trajectory(without)[0] == pytest.approx(4.0)
