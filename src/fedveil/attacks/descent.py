"""The two ways down a matching loss: L-BFGS and Adam on signed gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedveil.attacks.attack_types import Bounds
from fedveil.attacks.attempt import Report

LineSearch = Literal["strong_wolfe"] | None


def lbfgs(
    loss: Callable[[], Tensor],
    variables: Sequence[Tensor],
    steps: int,
    tolerance: float,
    line_search: LineSearch,
    report: Report,
    stall: int = 5,
) -> tuple[list[Tensor], float, int, int, str]:
    """L-BFGS with rate 1, history 100 and 20 inner iterations per step, from the present values of `variables`.

    Ends below `tolerance`, at a loss that is not finite, or after `stall` steps without change. Returns the best values seen,
    the loss at exactly these values, steps, closures and the reason for stopping.
    """
    optimizer = torch.optim.LBFGS(list(variables), lr=1.0, max_iter=20, history_size=100, line_search_fn=line_search)
    closures = 0

    def closure() -> Tensor:
        nonlocal closures
        closures += 1
        value = loss()
        for variable, grad in zip(variables, torch.autograd.grad(value, list(variables)), strict=True):
            variable.grad = grad
        return value.detach()

    best, best_loss, unchanged, reason, done = [v.detach().clone() for v in variables], math.inf, 0, "steps exhausted", steps
    for step in range(1, steps + 1):
        before = [v.detach().clone() for v in variables]
        value = float(optimizer.step(closure))  # type: ignore[no-untyped-call]
        if value < best_loss:
            best, best_loss = before, value
        report(step, value)
        same = all(torch.equal(b, v.detach()) for b, v in zip(before, variables, strict=True))
        unchanged = unchanged + 1 if same else 0
        ended = {"not finite": not math.isfinite(value), "below tolerance": value < tolerance, "stalled": unchanged >= stall}
        if any(ended.values()):
            reason, done = next(why for why, holds in ended.items() if holds), step
            break
    last = float(closure())
    if last < best_loss:
        best, best_loss = [v.detach().clone() for v in variables], last
    return best, best_loss, done, closures, reason


def adam(
    loss: Callable[[], Tensor],
    x: Tensor,
    rates: Sequence[float],
    bounds: Bounds,
    report: Report,
    signed: bool,
    langevin: Callable[[int], Tensor] | None = None,
) -> tuple[int, str]:
    """Adam on x (changed in place), projected into the box after every step; returns steps done and the reason for stopping.

    rates: the learning rate of each step. signed: use the sign of the gradient. langevin: step -> noise added to x, in units of
    the rate.
    """
    optimizer = torch.optim.Adam([x], lr=rates[0])
    low, high = bounds.edges()
    for step, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        value = loss()
        reached = float(value.detach())
        if not math.isfinite(reached):
            return step, "not finite"
        (grad,) = torch.autograd.grad(value, x)
        x.grad = grad.sign() if signed else grad
        optimizer.step()
        with torch.no_grad():
            if langevin is not None:
                x.add_(langevin(step), alpha=rate)
            x.copy_(torch.minimum(torch.maximum(x, low), high))
        report(step + 1, reached)
    return len(rates), "steps exhausted"
