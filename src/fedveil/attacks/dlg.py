"""Deep Leakage from Gradients (Zhu et al. 2019) and its form with the label read off first, iDLG (Zhao et al. 2020)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedveil.attacks.attack_types import Trial
from fedveil.attacks.attempt import Attack, Attempt
from fedveil.attacks.descent import LineSearch, lbfgs
from fedveil.attacks.matching import averaged, mean_power, squared


@dataclass(frozen=True)
class DLG(Attack):
    """Minimise the squared distance of gradients jointly over the examples and their soft labels, by L-BFGS, without a box.

    steps: outer steps of 20 inner ones. restarts: starts from N(0, 1), ended early by one whose distance is below
    `tolerance` times the squared norm of what was received (1e-9 is near the resolution of float32).
    line_search: None is the published optimizer; strong Wolfe succeeds from more starts.
    Labels are known if `Knowledge.labels` is given. Fails on ReLU networks, whose gradients are not smooth in the input.
    """

    name: ClassVar[str] = "dlg"
    steps: int = 300
    restarts: int = 4
    tolerance: float = 1e-9
    line_search: LineSearch = "strong_wolfe"

    def labels(self, attempt: Attempt) -> Tensor | None:
        """The labels where they are known; else they are variables."""
        return None if attempt.knowledge.labels is None else attempt.labels()

    def trials(self, attempt: Attempt) -> list[Trial]:
        """One candidate for each start, until one is below the tolerance.

        L-BFGS stops at absolute changes, so a gradient of norm below 1 (a clipped one) is matched in units of its own.
        """
        fixed, power, trials = self.labels(attempt), float(mean_power(attempt.targets)), list[Trial]()
        tolerance, scale = self.tolerance * max(power, 1.0), 1 / min(max(power, 1e-30), 1.0)
        for trial in range(self.restarts):
            if trials and trials[-1].loss * scale < tolerance:
                break
            variables = [attempt.gaussian(attempt.n)]
            if fixed is None:
                classes = attempt.targets[0].module(variables[0][:1].detach()).shape[1]
                variables.append(torch.randn((attempt.n, classes), generator=attempt.rng).requires_grad_(True))

            def loss(variables: Sequence[Tensor] = variables) -> Tensor:
                y = fixed if fixed is not None else variables[1].softmax(1)
                return scale * averaged(squared, attempt.targets, variables[0], y)

            report = attempt.reporter(self.name, trial, self.restarts, self.steps)
            values, reached, steps, closures, reason = lbfgs(loss, variables, self.steps, tolerance, self.line_search, report)
            y = fixed if fixed is not None else values[1].argmax(1)
            trials.append(Trial(values[0], y, reached / scale, steps, closures, reason))
        return trials


@dataclass(frozen=True)
class IDLG(DLG):
    """DLG with the labels fixed beforehand: known, or read from the last layer (one example: its most negative bias gradient).

    Fields as in `DLG`; the public implementation stops at an absolute 1e-6, without line search, from one start.
    """

    name: ClassVar[str] = "idlg"

    def labels(self, attempt: Attempt) -> Tensor:
        """The labels that are known, or those read off the upload."""
        return attempt.labels()
