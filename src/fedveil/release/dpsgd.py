"""DP-SGD inside a client: record-level privacy for what local training produces (Abadi et al. 2016).

Each step takes a Poisson batch, clips each example's gradient, adds Gaussian noise to the sum and divides by the expected
batch size. Because the noise is in every gradient, whatever training makes of them may leave.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedveil.release.per_example import Block, norms, per_example_gradients, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.release.noise import Randomness
    from fedveil.release.plan import DpSgd
    from fedveil.training.local import Local


@dataclass(frozen=True)
class PerExampleGradient:
    """The gradient source of DP-SGD (see `fedveil.training.local.GradientSource`).

    Args:
        plan: what each step does. randomness: of batches and noise. key: (round, client).
        gradients: (module, x, y) -> the gradient of each example in blocks, and the loss [n] of each.
    """

    plan: DpSgd
    randomness: Randomness
    key: tuple[int, int]
    gradients: Callable[[torch.nn.Module, Tensor, Tensor], tuple[list[Block], Tensor]] = per_example_gradients

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Poisson batches: each example joins each of the planned steps with the planned rate; a batch may be empty."""
        local.steps = self.plan.steps
        draw = self.randomness.secret("examples", *self.key)
        for _ in range(self.plan.steps):
            chosen = torch.from_numpy(draw.random(len(y)) < self.plan.rate)
            yield x[chosen], y[chosen]

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Write (sum of clipped gradients + noise) / expected batch size into the gradient; returns the mean loss."""
        model = local.model
        model.grad.zero_()
        loss = model.vector.new_zeros(())
        if len(y):
            blocks, losses = self.gradients(model.module, x, y)
            factors = (self.plan.clip / norms(blocks).clamp_min(1e-30)).clamp_max(1.0) * (1 - 1e-6)
            model.grad.copy_(weighted_sum(blocks, factors))
            loss = losses.mean()
        noise = self.randomness.normal(len(model.grad), "step", *self.key, local.step)
        model.grad.add_(noise.to(model.grad.device), alpha=self.plan.noise_multiplier * self.plan.clip)
        expected = self.plan.rate * max(local.examples, 1)
        model.grad.div_(expected)
        std = self.plan.noise_multiplier * self.plan.clip / expected
        local.noised_gradient(model.grad.new_tensor([n * std**2 for n in model.layout.sizes]))
        return loss
