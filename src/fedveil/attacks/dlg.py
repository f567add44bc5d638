"""Deep Leakage from Gradients (Zhu et al. 2019) and its form with the label read off first, iDLG (Zhao et al. 2020)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedveil.attacks import labels
from fedveil.attacks.descent import LineSearch, conclude, examples, lbfgs
from fedveil.attacks.matching import Target, read, squared
from fedveil.attacks.types import Bounds, Knowledge, ModelFn, OnStep, Progress, Result, Trial, Upload


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
        uploads: Sequence[Upload],
        model_fn: ModelFn,
        state: Mapping[str, Tensor],
        knowledge: Knowledge,
        bounds: Bounds,
        rng: torch.Generator,
        on_step: OnStep | None = None,
    ) -> Result:
        """Reconstruct the examples behind `uploads`; see `Attack.run`."""
        started = time.perf_counter()
        targets, n = read(uploads, model_fn, state, knowledge), examples(uploads, knowledge)
        fixed = None if knowledge.labels is None else labels.infer(targets[0], n, knowledge, bounds, rng)
        trials = _starts("dlg", self, targets, fixed, n, bounds, rng, on_step)
        return conclude("dlg", self, trials, uploads, knowledge, bounds, rng, started)


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
        uploads: Sequence[Upload],
        model_fn: ModelFn,
        state: Mapping[str, Tensor],
        knowledge: Knowledge,
        bounds: Bounds,
        rng: torch.Generator,
        on_step: OnStep | None = None,
    ) -> Result:
        """Reconstruct the examples behind `uploads`; see `Attack.run`."""
        started = time.perf_counter()
        targets, n = read(uploads, model_fn, state, knowledge), examples(uploads, knowledge)
        fixed = labels.infer(targets[0], n, knowledge, bounds, rng)
        trials = _starts("idlg", self, targets, fixed, n, bounds, rng, on_step)
        return conclude("idlg", self, trials, uploads, knowledge, bounds, rng, started)


def _starts(
    name: str,
    config: DLG | IDLG,
    targets: Sequence[Target],
    fixed: Tensor | None,
    n: int,
    bounds: Bounds,
    rng: torch.Generator,
    on_step: OnStep | None,
) -> list[Trial]:
    trials: list[Trial] = []
    tolerance = config.tolerance * float(torch.stack([t.power() for t in targets]).mean())
    for trial in range(config.restarts):
        if trials and trials[-1].loss < tolerance:
            break

        def report(step: int, loss: float, trial: int = trial) -> None:
            if on_step is not None:
                on_step(Progress(name, trial, config.restarts, step, config.steps, loss))

        x = torch.randn((n, *bounds.shape), generator=rng).requires_grad_(True)
        variables = [x]
        if fixed is None:
            classes = targets[0].module(x[:1].detach()).shape[1]
            variables.append(torch.randn((n, classes), generator=rng).requires_grad_(True))

        def loss(variables: Sequence[Tensor] = variables) -> Tensor:
            y = fixed if fixed is not None else variables[1].softmax(1)
            return torch.stack([squared(t, t.simulate(variables[0], y)) for t in targets]).mean()

        values, reached, steps, closures, reason = lbfgs(loss, variables, config.steps, tolerance, config.line_search, report)
        y = fixed if fixed is not None else values[1].argmax(1)
        trials.append(Trial(values[0], y, reached, steps, closures, reason))
    return trials
