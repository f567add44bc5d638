"""Check of a task on a few examples of the public test set, before training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fedveil.errors import ConfigError
from fedveil.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

_CLOSE = 1e-4
"""Relative difference that rounding may cause between equal losses."""


def check_task(task: Task, output: Tensor, target: Tensor) -> None:
    """Refuse a task whose loss or metrics cannot be used.

    Args:
        output: the network's output for at least two public examples [n, ...], on the CPU. target: their targets.

    Raises:
        ConfigError: an error in the task, a result of the wrong shape, NaN, a loss without a gradient, invalid weights, or
            metrics other than declared.
    """
    _check_loss(task, output, target)
    with _explained(task, output, target):
        evidence = task.evidence(output, target)
        scores = {name: float(value) for name, value in task.scores(*evidence).items()}
        task.test_loss(*evidence)
    declared, given = {metric.name for metric in task.metrics}, set(scores)
    if declared != given:
        raise ConfigError(
            f"task.name = {task.name!r}: `scores` gives {_listed(given)}, and `metrics` declares {_listed(declared)}: both have "
            f"to be the same"
        )


def _check_loss(task: Task, output: Tensor, target: Tensor) -> None:
    leaf = output.detach().requires_grad_()
    with _explained(task, output, target):
        losses = task.losses(leaf, target) if task.by_example else None
        if losses is not None:
            _wrong(task, "`losses`", losses, (len(target),))
        loss = task.loss(leaf, target)
        _wrong(task, "`loss`", loss, ())
        if losses is None:
            return
        _check_weights(task, target)
    if not _same(loss, losses.mean()):
        raise ConfigError(
            f"task.name = {task.name!r}: `loss` gives {loss.item():g}, and the mean of `losses` is {losses.mean().item():g}: "
            f"let it be the mean, or override `loss` alone, if the loss of a batch is none (client level only)"
        )


@contextmanager
def _explained(task: Task, output: Tensor, target: Tensor) -> Iterator[None]:
    """Convert an error of the task's code to a ConfigError with the shapes of its input."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        form = f"; it needs {task.output_form}" if task.output_form else ""
        raise ConfigError(
            f"task.name = {task.name!r} fails on examples of the test set, where the network gives {_shape(output)} and targets "
            f"are {_shape(target)}{form}: {type(error).__name__}: {error}"
        ) from error


def _wrong(task: Task, what: str, value: Tensor, shape: tuple[int, ...]) -> None:
    """Refuse a loss of the wrong shape, a loss that is not finite, and a loss without a gradient."""
    wanted = "[n], one for each example" if shape else "one number"
    problem = ""
    if not isinstance(value, torch.Tensor) or value.shape != shape or not value.is_floating_point():
        problem = f"gives {_shape(value)}; it has to be a tensor of floats, {wanted}"
    elif not bool(value.isfinite().all()):
        problem = "is not finite on examples of the test set, at the initial model: check the constants, and logarithms of 0"
    elif not value.requires_grad:
        problem = "does not depend on the output in a way that has a gradient: compute it with torch, and detach nothing"
    if problem:
        raise ConfigError(f"task.name = {task.name!r}: {what} {problem}")


def _check_weights(task: Task, target: Tensor) -> None:
    """Refuse example weights that are not one positive number each, or exceed the task's `largest_weight`."""
    weights = task.example_weights(target)
    if weights is None:
        return
    positive = isinstance(weights, torch.Tensor) and weights.shape == (len(target),) and bool((weights > 0).all())
    if not positive or float(weights.max()) > (1 + _CLOSE) * task.largest_weight:
        raise ConfigError(
            f"task.name = {task.name!r}: `example_weights` gives {_shape(weights)}; it has to give one positive number for each "
            f"example, [{len(target)}], at most `largest_weight` = {task.largest_weight:g}"
        )


def _same(one: Tensor, other: Tensor) -> bool:
    return math.isclose(one.item(), other.item(), rel_tol=_CLOSE, abs_tol=1e-6)


def _shape(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"[{', '.join(map(str, value.shape))}] of {str(value.dtype).removeprefix('torch.')}"


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
