"""GradInversion (Yin et al. 2021): squared distance, image priors, normalisation statistics and agreement of several starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fedveil.attacks.attack_types import Trial
from fedveil.attacks.attempt import Attack, Attempt
from fedveil.attacks.descent import adam
from fedveil.attacks.inverting import total_variation
from fedveil.attacks.labels import unique_labels
from fedveil.attacks.matching import Target, averaged, mean_power, squared
from fedveil.attacks.simulate import BATCH_NORMS


@dataclass(frozen=True)
class GradInversion(Attack):
    """Adam from several starts at once on matching + total variation + L2 + batch-norm statistics + distance to their mean.

    steps: 20,000 published; seeds: joint starts, 8 published. lr warms up over `warmup` steps and falls along a cosine.
    langevin: noise per step in units of the rate (0.2 published, 0.01 in a public implementation).
    matching, tv, l2, bn, group: weights >= 0 of the terms; the first batch normalisation counts ten times. The
    published weight of `matching` is 1e-4, for large networks; on small ones its gradient would not outweigh the priors'.
    A gradient of norm below 1 (a clipped one) is matched in units of its own, for the same reason.
    unique: labels are the classes of smallest min_j dW[c, j] (no label twice); else label counts.
    The group term uses the pixel mean of the starts, without registration. Starts are ranked by the matching term alone.
    """

    name: ClassVar[str] = "gradinversion"
    steps: int = 2000
    seeds: int = 4
    lr: float = 0.1
    warmup: int = 50
    langevin: float = 0.01
    matching: float = 1.0
    tv: float = 1e-4
    l2: float = 1e-6
    bn: float = 0.1
    group: float = 0.01
    unique: bool = False

    def trials(self, attempt: Attempt) -> list[Trial]:
        guessed = self.unique and attempt.knowledge.labels is None
        y = unique_labels(attempt.targets[0], attempt.n) if guessed else attempt.labels()
        x, targets = attempt.gaussian(self.seeds, attempt.n), attempt.targets

        def noise(step: int) -> Tensor:
            return self.langevin * torch.randn(x.shape, generator=attempt.rng)

        def loss() -> Tensor:
            return torch.stack([self._objective(targets, start, y) for start in x]).sum() + self.group * disagreement(x)

        report, langevin = attempt.reporter(self.name, 0, 1, self.steps), noise if self.langevin else None
        rates = [self._rate(step) for step in range(self.steps)]
        steps, reason = adam(loss, x, rates, attempt.bounds, report, signed=False, langevin=langevin)
        losses = [float(averaged(squared, targets, start, y).detach()) for start in x]
        return [Trial(x[i].detach(), y, losses[i], steps, steps + 1, reason) for i in range(self.seeds)]

    def _objective(self, targets: Sequence[Target], x: Tensor, y: Tensor) -> Tensor:
        match, power = averaged(squared, targets, x, y), mean_power(targets).clamp(1e-30, 1.0)
        priors = self.tv * total_variation(x) + self.l2 * (x.square().sum() + 1e-12).sqrt()
        return self.matching * match / power + priors + self.bn * statistics_distance(targets[0].module, x)

    def _rate(self, step: int) -> float:
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - self.warmup) / max(self.steps - self.warmup, 1)))


def disagreement(x: Tensor) -> Tensor:
    """Sum over the starts of the distance between a start and the pixel mean of all. x: (seeds, n, *shape)."""
    difference = x - x.mean(0, keepdim=True)
    return (difference.flatten(1).square().sum(1) + 1e-12).sqrt().sum()


def statistics_distance(module: nn.Module, x: Tensor) -> Tensor:
    """Sum over batch normalisations of |mean - running mean| + |variance - running variance|, the first ten times.

    0 where the model has none, or where their statistics are not known (`CapturedUpload.bn_mode` "train").
    """
    layers = [m for m in module.modules() if isinstance(m, BATCH_NORMS) and m.running_mean is not None]
    if not layers:
        return torch.zeros(())
    inputs: list[Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, positional: inputs.append(positional[0])) for m in layers]
    try:
        module(x)
    finally:
        for hook in hooks:
            hook.remove()
    total = torch.zeros(())
    for i, (layer, entering) in enumerate(zip(layers, inputs, strict=True)):
        channels = entering.transpose(0, 1).flatten(1)
        mean, variance = layer.running_mean, layer.running_var
        assert mean is not None
        assert variance is not None
        distance = (channels.mean(1) - mean).norm() + (channels.var(1, unbiased=False) - variance).norm()
        total = total + (10 if i == 0 else 1) * distance
    return total
