"""Inverting Gradients (Geiping et al. 2020): cosine distance, signed Adam, a box and total variation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedveil.attacks.attack_types import Trial
from fedveil.attacks.attempt import Attack, Attempt
from fedveil.attacks.descent import adam
from fedveil.attacks.matching import Target, averaged, cosine


def total_variation(x: Tensor) -> Tensor:
    """Mean absolute difference of horizontal neighbours plus that of vertical ones (last two dimensions), or along a signal."""
    variation = (x[..., 1:] - x[..., :-1]).abs().mean()
    return variation + (x[..., 1:, :] - x[..., :-1, :]).abs().mean() if x.ndim == 4 else variation


@dataclass(frozen=True)
class IG(Attack):
    """Minimise 1 - cosine similarity of gradients + tv * total variation, by Adam on signed gradients inside the box.

    steps: 4,800 by default, 24,000 in the published script. lr falls tenfold at 3/8, 5/8 and 7/8 of the steps.
    tv: weight >= 0; published values run from 1e-6 to 1e-1. restarts: starts from N(0, 1), ranked by the cosine distance alone.
    """

    name: ClassVar[str] = "ig"
    steps: int = 4800
    restarts: int = 1
    lr: float = 0.1
    tv: float = 1e-3

    def trials(self, attempt: Attempt) -> list[Trial]:
        y = attempt.labels()
        return [self._trial(attempt, y, trial) for trial in range(self.restarts)]

    def _trial(self, attempt: Attempt, y: Tensor, trial: int) -> Trial:
        x, targets = attempt.gaussian(attempt.n), attempt.targets

        def loss() -> Tensor:
            return averaged(self._distance, targets, x, y) + (self.tv * total_variation(x) if self.tv else 0.0)

        report = attempt.reporter(self.name, trial, self.restarts, self.steps)
        rates = [self._rate(step) for step in range(self.steps)]
        steps, reason = adam(loss, x, rates, attempt.bounds, report, signed=True)
        return Trial(x.detach(), y, float(averaged(self._distance, targets, x, y).detach()), steps, steps + 1, reason)

    def _distance(self, target: Target, candidate: Tensor) -> Tensor:
        return cosine(target, candidate)

    def _rate(self, step: int) -> float:
        return self.lr * 0.1 ** sum(8 * step >= k * self.steps for k in (3, 5, 7))
