from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedveil.attacks import IG, Bounds, CapturedUpload, Knowledge
from fedveil.attacks.attack_types import Trial
from fedveil.attacks.matching import adam, lbfgs
from fedveil.attacks.reconstruction import Attempt

UPLOAD = CapturedUpload({})


def _rosenbrock(v: Tensor) -> Tensor:
    return (1 - v[0]) ** 2 + 100 * (v[1] - v[0] ** 2) ** 2


def test_lbfgs_reaches_the_minimum_and_says_why_it_stopped() -> None:
    v = torch.tensor([-1.0, 1.5], requires_grad=True)
    (best,), loss, steps, closures, reason = lbfgs(lambda: _rosenbrock(v), [v], 50, 1e-10, "strong_wolfe", lambda *_: None)
    assert best.tolist() == pytest.approx([1, 1], abs=1e-3)
    assert loss == pytest.approx(float(_rosenbrock(best)))
    assert reason == "below tolerance"
    assert steps < 50 < closures


def test_lbfgs_returns_the_loss_at_the_values_it_returns() -> None:
    for steps in (1, 2, 3):
        v = torch.tensor([-1.0, 1.5], requires_grad=True)
        (best,), loss, *_ = lbfgs(lambda v=v: _rosenbrock(v), [v], steps, 0.0, None, lambda *_: None)
        assert loss == pytest.approx(float(_rosenbrock(best)), rel=1e-6)


def test_lbfgs_stops_when_nothing_moves_and_when_it_diverges() -> None:
    v = torch.tensor([2.0], requires_grad=True)
    *_, steps, _, reason = lbfgs(lambda: (v * 0).sum() + 1, [v], 100, 0.0, "strong_wolfe", lambda *_: None)
    assert (steps, reason) == (5, "stalled")
    w = torch.tensor([1.0], requires_grad=True)
    *_, reason = lbfgs(lambda: (w / (w - 1) ** 2).sum(), [w], 100, 0.0, None, lambda *_: None)
    assert reason == "not finite"


def test_adam_stays_in_the_box_and_finds_the_corner() -> None:
    x = torch.tensor([[0.5, 0.5]], requires_grad=True)
    seen: list[float] = []
    steps, reason = adam(
        lambda: (x[0, 0] - 5).square() + x[0, 1], x, [0.1] * 60, Bounds((2,)), lambda _, v: seen.append(v), signed=True
    )
    assert x.tolist() == [[1.0, 0.0]]
    assert (steps, len(seen), reason) == (60, 60, "steps exhausted")


def test_the_smallest_matching_loss_wins_whatever_it_shows() -> None:
    trials = [
        Trial(torch.full((1, 2), float(i)), torch.tensor([i]), loss, 1, 1, "end")
        for i, loss in enumerate((0.3, float("nan"), 0.1))
    ]
    attempt = Attempt([UPLOAD], [], 1, Knowledge(n=1), Bounds((2,)), torch.Generator().manual_seed(9), None)
    result = attempt.conclude(IG(), trials)
    assert result.chosen == 2
    assert result.x.tolist() == [[2.0, 2.0]]
    assert result.trial_losses == (0.3, float("inf"), 0.1)
    assert result.seed == 9
