"""Losses and gradients of every task: against torch in a loop over single examples, and against hand mathematics."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.data.catalogue import IGNORED
from fedveil.errors import ConfigError
from fedveil.gradients.gradient_blocks import rows
from fedveil.gradients.per_example import per_example_gradients
from fedveil.tasks.survival import Survival
from fedveil.tasks.task import Task
from fedveil.tasks.task_registry import task_from
from task_runs import BY_EXAMPLE, CLASSES, PLACES, SIDE, TASKS

N = 7


def one(name: str) -> Task:
    return task_from(TASKS[name])


def example(name: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, ...] and targets of a task."""
    g = torch.Generator().manual_seed(seed)

    def classes(*shape: int, ignored: bool = False) -> torch.Tensor:
        found = torch.randint(0, CLASSES, (N, *shape), generator=g)
        return found.masked_fill(torch.rand(found.shape, generator=g) < 0.3, IGNORED) if ignored else found

    survived = torch.stack([torch.rand(N, generator=g) * 5, torch.arange(N) % 3 > 0], 1)
    return {
        "classification": lambda: (torch.randn(N, CLASSES, generator=g), classes()),
        "binary": lambda: (torch.randn(N, 1, generator=g), torch.arange(N) % 2),
        "multi-label": lambda: (torch.randn(N, 4, generator=g), (torch.rand(N, 4, generator=g) > 0.5).float()),
        "regression": lambda: (torch.randn(N, 1, generator=g), 3 * torch.randn(N, generator=g)),
        "segmentation": lambda: (torch.randn(N, CLASSES, SIDE, SIDE, generator=g), classes(SIDE, SIDE, ignored=True)),
        "token-prediction": lambda: (torch.randn(N, PLACES, CLASSES, generator=g), classes(PLACES, ignored=True)),
        "cox": lambda: (torch.randn(N, 1, generator=g), survived),
        "hazards": lambda: (torch.randn(N, 4, generator=g), survived),
    }[name]()


# --- one example, with torch's losses and plain Python ----------------------------------------------------------------


def weighted_class(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out[None], y[None]) * [1.0, 2.0, 0.5][int(y)]


def yes_or_no(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p = torch.sigmoid(out[0])
    return -2.0 * p.log() if y == 1 else -(1 - p).log()


def labels(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p, weights = torch.sigmoid(out), torch.tensor([1.0, 2.0, 3.0, 0.5])
    return F.binary_cross_entropy(p, y, weight=torch.where(y == 1, weights, 1.0))


def quantity(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    error = (out[0] - (y - 0.5) / 2.0).abs()
    return 0.5 * error**2 if error < 1 else error - 0.5


def picture(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    p, known = out.softmax(0), y != IGNORED
    weights = torch.tensor([1.0, 2.0, 0.5])
    entropy = (F.cross_entropy(out[:, known].T, y[known], reduction="none") * weights[y[known]]).mean()
    each = []
    for c in range(CLASSES):
        found, actual = p[c][known], (y[known] == c).float()
        each.append((2 * (found * actual).sum() + 1) / (found.sum() + actual.sum() + 1))
    return entropy + 0.5 * (1 - sum(each) / CLASSES)


def sequence(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y, ignore_index=IGNORED)


def intervals(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    hazard, (time, event) = torch.sigmoid(out), y.tolist()
    likelihood, low = torch.ones(()), 0.0
    for h, high in zip(hazard, (0.5, 1.0, 2.0, 4.0), strict=True):
        if event and low < time <= high:
            return -(likelihood * h).log()
        if time < high:
            break
        likelihood, low = likelihood * (1 - h), high
    return -likelihood.log()


BY_HAND: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "classification": weighted_class,
    "binary": yes_or_no,
    "multi-label": labels,
    "regression": quantity,
    "segmentation": picture,
    "token-prediction": sequence,
    "hazards": intervals,
}


def test_every_task_is_tried() -> None:
    assert set(BY_HAND) == set(BY_EXAMPLE)


@pytest.mark.parametrize("name", BY_EXAMPLE)
@pytest.mark.parametrize("seed", range(3))
def test_losses_are_those_of_a_loop_over_examples(name: str, seed: int) -> None:
    output, target = example(name, seed)
    expected = torch.stack([BY_HAND[name](o, y) for o, y in zip(output, target, strict=True)])
    task = one(name)
    torch.testing.assert_close(task.losses(output, target), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(task.loss(output, target), expected.mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_what_evaluation_keeps_gives_the_same_loss_in_any_batches(name: str) -> None:
    output, target = example(name)
    task = one(name)
    parts = [task.evidence(output[i : i + 3], target[i : i + 3]) for i in range(0, N, 3)]
    kept = [torch.cat(each) for each in zip(*parts, strict=True)]
    assert all(len(each) == N for each in kept)
    assert task.test_loss(*kept) == pytest.approx(float(task.losses(output, target).mean()), rel=1e-5)


class Head(nn.Module):
    """A network whose output has the shape of a task's."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.map = shape, nn.Linear(6, math.prod(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.map(x).unflatten(1, self.shape)
        return out


class Recurrent(Head):
    """The same behind a network without gradients by hand."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__(shape)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


@pytest.mark.parametrize("kind", [Head, Recurrent])
@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_gradients_of_examples_are_those_of_a_loop(name: str, kind: type[Head]) -> None:
    output, target = example(name)
    torch.manual_seed(1)
    module, x = kind(output.shape[1:]), torch.randn(N, 6)
    blocks, losses = per_example_gradients(module, x, target, one(name).losses)
    for i in range(N):
        loss = BY_HAND[name](module(x[i : i + 1])[0], target[i])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])
        torch.testing.assert_close(rows(blocks)[i], expected, rtol=1e-4, atol=1e-6)
        assert losses[i].item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["segmentation", "token-prediction"])
def test_an_example_without_a_known_place_teaches_nothing_of_classes(name: str) -> None:
    output, target = example(name)
    leaf = output.requires_grad_()
    losses = one(name).losses(leaf, torch.full_like(target, IGNORED))
    assert bool(losses.isfinite().all())
    assert not torch.autograd.grad(losses.sum(), leaf)[0].any()


def test_dice_of_a_picture_of_two_places() -> None:
    """Probabilities 3/4 and 1/2 of class 1 on targets 1 and 0: class 1 has (2 * 3/4 + 1) / (5/4 + 1 + 1), class 0 the rest."""
    output = torch.tensor([[[[0.0, 0.0]], [[math.log(3.0), 0.0]]]])
    task = task_from({"name": "segmentation", "cross_entropy": 0.0})
    expected = 1 - ((2 * 0.75 + 1) / (1.25 + 1 + 1) + (2 * 0.5 + 1) / (0.75 + 1 + 1)) / 2
    assert float(task.losses(output, torch.tensor([[[1, 0]]]))) == pytest.approx(expected)


# --- the partial likelihood -------------------------------------------------------------------------------------------


def cox_by_hand(score: list[float], time: list[float], event: list[int], efron: bool) -> float:
    """Event time by event time, as in a textbook."""
    total, deaths = 0.0, 0
    for t in sorted(set(time)):
        dead = [i for i in range(len(time)) if time[i] == t and event[i]]
        there = sum(math.exp(score[i]) for i in range(len(time)) if time[i] >= t)
        of_dead = sum(math.exp(score[i]) for i in dead)
        for rank, i in enumerate(dead):
            total += math.log(there - (rank / len(dead) * of_dead if efron else 0.0)) - score[i]
        deaths += len(dead)
    return total / deaths if deaths else 0.0


TIES = ([0.3, -0.5, 1.2, 0.1, -0.2, 0.7], [2.0, 2.0, 2.0, 3.0, 3.0, 5.0], [1, 1, 0, 1, 1, 1])


@pytest.mark.parametrize("ties", ["efron", "breslow"])
@pytest.mark.parametrize(
    ("score", "time", "event"),
    [TIES, ([0.0, 0.0], [1.0, 2.0], [1, 1]), ([0.4, 2.0, -1.0], [1.0, 1.0, 1.0], [1, 1, 1]), ([0.4, 1.0], [1.0, 2.0], [0, 0])],
)
def test_cox_is_that_of_a_textbook(score: list[float], time: list[float], event: list[int], ties: Any) -> None:
    task = Survival(ties=ties)
    target = torch.tensor([time, [float(e) for e in event]]).T
    found = task.loss(torch.tensor(score)[:, None], target)
    assert float(found) == pytest.approx(cox_by_hand(score, time, event, ties == "efron"), rel=1e-5)
    shuffled = torch.randperm(len(score), generator=torch.Generator().manual_seed(1))
    assert float(task.loss(torch.tensor(score)[shuffled, None], target[shuffled])) == pytest.approx(float(found), rel=1e-5)


def test_cox_of_two_who_are_alike_is_half_of_log_2() -> None:
    target = torch.tensor([[1.0, 1.0], [2.0, 1.0]])
    assert float(Survival().loss(torch.zeros(2, 1), target)) == pytest.approx(math.log(2) / 2)


def test_efron_and_breslow_differ_by_ties_alone() -> None:
    score, target = torch.tensor(TIES[0])[:, None], torch.tensor([TIES[1], TIES[2]]).T
    apart = [float(Survival(ties=ties).loss(score, target)) for ties in ("efron", "breslow")]
    assert apart[0] < apart[1]
    target = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0], TIES[2]]).T
    apart = [float(Survival(ties=ties).loss(score, target)) for ties in ("efron", "breslow")]
    assert apart[0] == pytest.approx(apart[1])


@pytest.mark.parametrize("ties", ["efron", "breslow"])
def test_the_gradient_of_cox_is_that_of_finite_differences_and_stays_finite(ties: Any) -> None:
    target = torch.tensor([TIES[1], TIES[2]], dtype=torch.float64).T
    score = torch.tensor(TIES[0], dtype=torch.float64)[:, None].requires_grad_()
    assert torch.autograd.gradcheck(lambda s: Survival(ties=ties).loss(s, target), (score,))
    far = torch.tensor([300.0, -300.0, 0.0, 200.0, -200.0, 100.0])[:, None].requires_grad_()
    loss = Survival(ties=ties).loss(far, target.float())
    (slope,) = torch.autograd.grad(loss, far)
    assert bool(loss.isfinite())
    assert bool(slope.isfinite().all())


def test_cox_has_no_loss_for_an_example() -> None:
    assert not Survival().by_example
    with pytest.raises(ConfigError, match="no loss for each example: take 'hazards'"):
        Survival().losses(torch.zeros(2, 1), torch.ones(2, 2))
