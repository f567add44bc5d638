"""LDP-Fed: the perturbation against its distribution by enumeration, turns of layers, both published forms, the proven one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from torch import Tensor

import method_kit as h
from fedveil.accounting.types import Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Raw
from fedveil.papers.aldp_fl.baselines import LDPFed, NoisyGradients, Ordinal, laplace_variance, truncated_laplace, turn
from fedveil.training.local import BatchGradient, Local, train
from method_kit import planner

LAYERS = {"conv.weight": (2,), "conv.bias": (1,), "fc1.weight": (3,), "fc1.bias": (1,), "fc2.weight": (2,)}
NETWORK = h.layout(LAYERS)


@pytest.mark.parametrize(("value", "rate"), [(0, 0.3), (7, 0.3), (-10, 0.05), (3, 2.0), (10, 1e-9)])
def test_the_perturbation_has_the_distribution_of_the_exponential_mechanism(value: int, rate: float) -> None:
    """P(y | v) proportional to exp(-rate |y - v|) on -10..10, enumerated; a wrong rate fails the same test."""
    grid = np.arange(-10, 11)
    exact = np.exp(-rate * np.abs(grid - value))
    exact /= exact.sum()
    n = 40_000
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5) / n  # equally spaced, so that counts are exact to one

    def counts(used: float) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        drawn = truncated_laplace(torch.full((n,), float(value), dtype=torch.float64), uniform, used, 10.0)
        return np.array([(drawn.numpy() == y).sum() for y in grid])

    assert np.abs(counts(rate) - n * exact).max() <= 1.5
    assert np.abs(counts(rate * 2 + 0.01) - n * exact).max() > 20


def test_far_out_on_a_fine_grid_it_is_a_laplace_variable() -> None:
    """Ten digits, 2 / alpha_p = 1e7 steps of the grid: by Kolmogorov and Smirnov the Laplace distribution of scale 1e-3."""
    uniform = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = truncated_laplace(torch.full((20_000,), 2e9, dtype=torch.float64), uniform, 1e-7, 1e10) / 1e10
    assert stats.kstest(drawn.numpy(), stats.laplace(0.2, 1e-3).cdf).pvalue > 1e-3
    assert stats.kstest(drawn.numpy(), stats.laplace(0.2, 1.1e-3).cdf).pvalue < 1e-3


@pytest.mark.parametrize("scale", [1e-3, 0.3, 2.0, 1e5])
def test_the_variance_of_truncated_laplace_noise(scale: float) -> None:
    """Against quadrature of x^2 e^(-|x| / s) on [-0.5, 0.5]."""
    points = [scale * k for k in (1, 5, 20) if scale * k < 0.5]
    top, mass = (integrate.quad(lambda x, p=p: x**p * math.exp(-x / scale), 0, 0.5, points=points)[0] for p in (2, 0))
    assert laplace_variance(scale, 0.5) == pytest.approx(top / mass, rel=1e-5)


def test_layers_take_turns_from_the_last_to_the_first() -> None:
    """Weight and bias of a layer leave together; three layers, one a round, then two a round."""
    names = {"fc2": [0] * 7 + [1] * 2, "fc1": [0] * 3 + [1] * 4 + [0] * 2, "conv": [1] * 3 + [0] * 6}

    def layers(count: int, round: int) -> list[int]:
        mask = turn(NETWORK, count, round)
        assert mask is not None
        return mask.int().tolist()

    assert [layers(1, t) for t in range(4)] == [names[n] for n in ("fc2", "fc1", "conv", "fc2")]
    assert layers(2, 1) == [a + b for a, b in zip(names["conv"], names["fc2"], strict=True)]
    assert turn(NETWORK, 0, 5) is None
    assert turn(NETWORK, 3, 5) is None


@dataclass
class Known:
    """A gradient source with one gradient for every batch."""

    gradient: list[float]

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        local.model.grad.copy_(torch.tensor(self.gradient))
        return torch.zeros(())

    batches = BatchGradient.batches


def local_of(gradient: list[float], steps: int = 1, normal: float = 0.0) -> Local:
    training = {"local_steps": steps, "batch_size": 5, "optimizer": {"lr": 1.0}}
    local = h.local_of(h.Layers(h.LAYERS), Known(gradient), training=training)
    local.normal = lambda n: torch.full((n,), normal)
    return local


def test_an_ordinal_upload_by_hand() -> None:
    """Values 0.26, 0 and -9 of the layer whose turn it is, c = 1, one digit, alpha 1.2: rate 0.2 a step; normals -1."""
    local = replace(local_of([-0.26, 0.0, 9.0, 1.0, 1.0, 1.0, 1.0], normal=-1.0), round=1)
    objective = Ordinal(bound=1.0, precision=1, alpha=1.2, layers=1)
    sent, _ = train(local, torch.zeros(5, 1), torch.zeros(5, dtype=torch.long), objective)
    grid, level = np.arange(-10, 11), stats.norm.cdf(-1.0)
    expected = []
    for value in (3, 0, -10):
        weights = np.exp(-0.2 * np.abs(grid - value))
        order = [*(value - j for j in range(1, value + 11)), *range(value, 11)]  # outward below, then outward above
        cumulative = np.cumsum([weights[y + 10] for y in order]) / weights.sum()
        expected.append(order[int(np.searchsorted(cumulative, level))] / 10)
    assert sent.tolist() == pytest.approx([*expected, 0, 0, 0, 0])
    assert local.noise_power is not None
    assert local.noise_power.tolist() == pytest.approx([3 * laplace_variance(0.5, 1.0), 0.0])


def test_noisy_gradients_by_hand() -> None:
    """Gradient (3, 0, 0, 4, ...) clipped to 1; noise 2 C / |D| times the factor, normals of 1; two steps at rate 1."""
    local = local_of([3.0, 0, 0, 4.0, 0, 0, 0], steps=2, normal=1.0)
    update, _ = train(local, torch.zeros(10, 1), torch.zeros(10, dtype=torch.long), NoisyGradients(clip=1.0, factor=2.5))
    std = 2 * 1.0 / 10 * 2.5
    assert update.tolist() == pytest.approx([-2 * (g + std) for g in (0.6, 0, 0, 0.8, 0, 0, 0)])
    assert local.noise_power is not None
    assert local.noise_power.tolist() == pytest.approx([2 * 3 * std**2, 2 * 4 * std**2])


def test_published_proves_nothing_and_claims_what_it_claims() -> None:
    s = h.setting(epsilon=4.0, noise_multiplier=None, rounds=8)
    ordinal, gaussian = LDPFed(variant="published"), LDPFed(variant="published", mechanism="gaussian")
    for m in (ordinal, gaussian):
        assert all(isinstance(event, Unbounded) for view in View for event in m.releases(s, view))
        plan = planner(m, s).plan(h.released([0.0] * 7), {})
        assert isinstance(plan, Raw)
        assert plan.make(torch.ones(7)).support is None
        with pytest.raises(ConfigError, match=r"privacy\.epsilon"):
            m.calibrate(h.setting())
    first, second = ordinal.claim(s), gaussian.claim(s)
    assert first is not None
    assert second is not None
    assert (first.epsilon, first.delta, first.scope.unit) == (4.0, 0.0, Unit.CLIENT)
    assert (second.epsilon, second.delta, second.scope.unit) == (4.0, s.delta, Unit.RECORD)
    objective = ordinal.client(s)
    assert isinstance(objective, Ordinal)
    assert objective.alpha == 4.0 / 8
    noisy = gaussian.client(s)
    assert isinstance(noisy, NoisyGradients)
    assert noisy.factor == pytest.approx(math.sqrt(2 * math.log(1250)) / 4)


def test_a_proven_plan_by_hand() -> None:
    """The layers of the round, clip 0.5, z = 2; the clamp is on the sum where that is what leaves."""
    for view, place, clamp in ((View.SERVER, "upload", 0.25), (View.AGGREGATE, "sum", 1.0)):
        s = h.setting(view, LAYERS)
        plan = planner(LDPFed(clip=0.5, bound=0.25, layers_a_round=1), s).plan(h.released([0.0] * 9, round=1), {})
        assert isinstance(plan, Plan)
        assert (plan.clip, plan.noise_std, plan.place, plan.clamp) == (0.5, 1.0, place, clamp)
        assert plan.support is not None
        assert plan.support.int().tolist() == [0, 0, 0, 1, 1, 1, 1, 0, 0]
