"""GradInversion (Yin et al. 2021): squared distance, image priors, normalisation statistics and agreement of several starts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedveil.attacks import labels
from fedveil.attacks.attack_types import Bounds, CapturedUpload, Knowledge, ModelFn, OnStep, Reconstruction, Trial
from fedveil.attacks.attempt import Attempt
from fedveil.attacks.descent import adam
from fedveil.attacks.inverting import total_variation
from fedveil.attacks.matching import Target, squared

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@dataclass(frozen=True)
class GradInversion:
    """Adam from several starts at once on matching + total variation + L2 + batch-norm statistics + distance to their mean.

    steps: 20,000 published; seeds: joint starts, 8 published. lr warms up over `warmup` steps and falls along a cosine.
    langevin: noise per step in units of the rate (0.2 published, 0.01 in a public implementation).
    matching, tv, l2, bn, group: weights >= 0 of the terms; the first batch normalisation counts ten times. The
    published weight of `matching` is 1e-4, for large networks; on small ones its gradient would not outweigh the priors'.
    A gradient of norm below 1 (a clipped one) is matched in units of its own, for the same reason.
    unique: labels are the classes of smallest min_j dW[c, j] (no label twice); else label counts.
    The group term uses the pixel mean of the starts, without registration. Starts are ranked by the matching term alone.
    """

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

    def run(
        self,
        uploads: Sequence[CapturedUpload],
        model_fn: ModelFn,
        state: Mapping[str, Tensor],
        knowledge: Knowledge,
        bounds: Bounds,
        rng: torch.Generator,
        on_step: OnStep | None = None,
    ) -> Reconstruction:
        """Reconstruct the examples behind `uploads`; see `Attack.run`."""
        case = Attempt.of(uploads, model_fn, state, knowledge, bounds, rng, on_step)
        if self.unique and knowledge.labels is None:
            y = labels.unique_labels(case.targets[0], case.n)
        else:
            y = labels.infer(case.targets[0], case.n, knowledge, bounds, rng)
        return case.conclude("gradinversion", self, self._trials(case, y))

    def _trials(self, case: Attempt, y: Tensor) -> list[Trial]:
        x, targets = case.gaussian(self.seeds, case.n), case.targets

        def noise(step: int) -> Tensor:
            return self.langevin * torch.randn(x.shape, generator=case.rng)

        def loss() -> Tensor:
            return torch.stack([self._objective(targets, start, y) for start in x]).sum() + self.group * disagreement(x)

        report, langevin = case.reporter("gradinversion", 0, 1, self.steps), noise if self.langevin else None
        steps, reason = adam(loss, x, self.steps, self._rate, case.bounds, report, signed=False, langevin=langevin)
        losses = [float(torch.stack([squared(t, t.simulate(start, y)) for t in targets]).mean().detach()) for start in x]
        return [Trial(x[i].detach(), y, losses[i], steps, steps + 1, reason) for i in range(self.seeds)]

    def _objective(self, targets: Sequence[Target], x: Tensor, y: Tensor) -> Tensor:
        match = torch.stack([squared(t, t.simulate(x, y)) for t in targets]).mean()
        priors = self.tv * total_variation(x) + self.l2 * (x.square().sum() + 1e-12).sqrt()
        power = torch.stack([t.power() for t in targets]).mean().clamp(1e-30, 1.0)
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
    layers = [m for m in module.modules() if isinstance(m, _BATCH_NORMS) and m.running_mean is not None]
    if not layers:
        return torch.zeros(())
    inputs: list[Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, given: inputs.append(given[0])) for m in layers]
    try:
        module(x)
    finally:
        for hook in hooks:
            hook.remove()
    total = torch.zeros(())
    for i, (layer, given) in enumerate(zip(layers, inputs, strict=True)):
        channels = given.transpose(0, 1).flatten(1)
        mean, variance = layer.running_mean, layer.running_var
        assert mean is not None
        assert variance is not None
        distance = (channels.mean(1) - mean).norm() + (channels.var(1, unbiased=False) - variance).norm()
        total = total + (10 if i == 0 else 1) * distance
    return total
