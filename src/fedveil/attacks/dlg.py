"""Deep Leakage from Gradients (Zhu et al. 2019) and its form with the label read off first, iDLG (Zhao et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks import labels
from fedveil.attacks.attack_types import Bounds, CapturedUpload, Knowledge, ModelFn, OnStep, Reconstruction, Trial
from fedveil.attacks.attempt import Attempt
from fedveil.attacks.descent import LineSearch, lbfgs
from fedveil.attacks.matching import squared


@dataclass(frozen=True)
class DLG:
    """Minimise the squared distance of gradients jointly over the examples and their soft labels, by L-BFGS, without a box.

    steps: outer steps of 20 inner ones. restarts: starts from N(0, 1), ended early by one whose distance is below
    `tolerance` times the squared norm of what was received (1e-9 is near the resolution of float32).
    line_search: None is the published optimizer; strong Wolfe succeeds from more starts.
    Labels are known if `Knowledge.labels` is given. Fails on ReLU networks, whose gradients are not smooth in the input.
    """

    steps: int = 300
    restarts: int = 4
    tolerance: float = 1e-9
    line_search: LineSearch = "strong_wolfe"

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
        fixed = None if knowledge.labels is None else labels.infer(case.targets[0], case.n, knowledge, bounds, rng)
        return case.conclude("dlg", self, _trials("dlg", self, case, fixed))


@dataclass(frozen=True)
class IDLG:
    """DLG with the labels fixed beforehand: known, or read from the last layer (one example: its most negative bias gradient).

    Fields as in `DLG`; the public implementation stops at an absolute 1e-6, without line search, from one start.
    """

    steps: int = 300
    restarts: int = 4
    tolerance: float = 1e-9
    line_search: LineSearch = "strong_wolfe"

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
        fixed = labels.infer(case.targets[0], case.n, knowledge, bounds, rng)
        return case.conclude("idlg", self, _trials("idlg", self, case, fixed))


def _trials(name: str, config: DLG | IDLG, case: Attempt, fixed: Tensor | None) -> list[Trial]:
    """Starts until one is below the tolerance; without `fixed` labels these are variables too.

    L-BFGS stops at absolute changes, so a gradient of norm below 1 (a clipped one) is matched in units of its own.
    """
    trials: list[Trial] = []
    power = float(torch.stack([t.power() for t in case.targets]).mean())
    tolerance, scale = config.tolerance * max(power, 1.0), 1 / min(max(power, 1e-30), 1.0)
    for trial in range(config.restarts):
        if trials and trials[-1].loss * scale < tolerance:
            break
        variables = [case.gaussian(case.n)]
        if fixed is None:
            classes = case.targets[0].module(variables[0][:1].detach()).shape[1]
            variables.append(torch.randn((case.n, classes), generator=case.rng).requires_grad_(True))

        def loss(variables: Sequence[Tensor] = variables) -> Tensor:
            y = fixed if fixed is not None else variables[1].softmax(1)
            return scale * torch.stack([squared(t, t.simulate(variables[0], y)) for t in case.targets]).mean()

        report = case.reporter(name, trial, config.restarts, config.steps)
        values, reached, steps, closures, reason = lbfgs(loss, variables, config.steps, tolerance, config.line_search, report)
        y = fixed if fixed is not None else values[1].argmax(1)
        trials.append(Trial(values[0], y, reached / scale, steps, closures, reason))
    return trials
