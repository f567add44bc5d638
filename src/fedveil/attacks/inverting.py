"""Inverting Gradients (Geiping et al. 2020): cosine distance, signed Adam, a box and total variation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks import labels
from fedveil.attacks.attack_types import Bounds, CapturedUpload, Knowledge, ModelFn, OnStep, Reconstruction, Trial
from fedveil.attacks.attempt import Attempt
from fedveil.attacks.descent import adam
from fedveil.attacks.matching import Target, cosine


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of horizontal neighbours plus that of vertical ones (last two dimensions), or along a signal."""
    variation = (x[..., 1:] - x[..., :-1]).abs().mean()
    return variation + (x[..., 1:, :] - x[..., :-1, :]).abs().mean() if x.ndim == 4 else variation


@dataclass(frozen=True)
class IG:
    """Minimise 1 - cosine similarity of gradients + tv * total variation, by Adam on signed gradients inside the box.

    steps: 4,800 by default, 24,000 in the published script. lr falls tenfold at 3/8, 5/8 and 7/8 of the steps.
    tv: weight >= 0; published values run from 1e-6 to 1e-1. restarts: starts from N(0, 1), ranked by the cosine distance alone.
    """

    steps: int = 4800
    restarts: int = 1
    lr: float = 0.1
    tv: float = 1e-3

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
        y = labels.infer(case.targets[0], case.n, knowledge, bounds, rng)
        return case.conclude("ig", self, [self._trial(case, y, trial) for trial in range(self.restarts)])

    def _trial(self, case: Attempt, y: Tensor, trial: int) -> Trial:
        x = case.gaussian(case.n)

        def loss() -> Tensor:
            return distance(case.targets, x, y) + (self.tv * total_variation(x) if self.tv else 0.0)

        report = case.reporter("ig", trial, self.restarts, self.steps)
        steps, reason = adam(loss, x, self.steps, self._rate, case.bounds, report, signed=True)
        return Trial(x.detach(), y, float(distance(case.targets, x, y).detach()), steps, steps + 1, reason)

    def _rate(self, step: int) -> float:
        return self.lr * 0.1 ** sum(8 * step >= k * self.steps for k in (3, 5, 7))


def distance(targets: Sequence[Target], x: Tensor, y: Tensor) -> Tensor:
    """Cosine distance of the candidate's gradient, averaged over the uploads."""
    return torch.stack([cosine(t, t.simulate(x, y)) for t in targets]).mean()
