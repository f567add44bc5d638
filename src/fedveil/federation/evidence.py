"""What a task keeps of a model's answers to examples, batch by batch, and what it makes of those of one client."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.errors import ConfigError
from fedveil.release.noise import Randomness
from fedveil.tasks.task import in_full

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.tasks.task import Evidence, Task
    from fedveil.training.params import FlatModel

_BATCH = 1000
"""Examples at once."""
_STATISTICS_BATCH = 256
"""At most so many at once where statistics of batches are estimated."""
_NUMBERS = 2**24
"""Of the network's output at once, where an example has many: a score for each symbol at each place."""


def evidence(task: Task, model: FlatModel, x: Tensor, y: Tensor) -> Evidence:
    """What the task keeps of the examples [n, ...] and targets [n, ...] of a test, on the CPU.

    Batch normalisation uses the statistics that are loaded, and they stay. What layers draw is the same for any examples,
    whatever was tested before: else a public score would show how many examples a client's own test has.
    """
    kept, device = model.buffers(), model.vector.device
    model.eval()
    try:
        with torch.inference_mode(), Randomness(0).forward(device, "tests"):
            size = _BATCH if y.dim() == 1 else _fitting(model, x[:2].to(device))
            parts = zip(torch.split(x, size), torch.split(y, size), strict=True)
            found = [task.evidence(_output(model, bx.to(device)).cpu(), by) for bx, by in parts]
    finally:
        model.train()
        if kept.numel():
            model.load_buffers(kept)
    return tuple(torch.cat(part) for part in zip(*found, strict=True))


def estimated_statistics(model: FlatModel, x: Tensor) -> Tensor:
    """The batch statistics of a model on public examples [n, ...]: the mean over batches of nearly one size."""
    device = model.vector.device
    batches = (part.to(device) for part in torch.tensor_split(x, -(-len(x) // _STATISTICS_BATCH)))
    with torch.no_grad(), Randomness(0).forward(device, "statistics"):
        return model.estimated_buffers(partial(_output, model), batches).to("cpu")


def _output(model: FlatModel, x: Tensor) -> Tensor:
    try:
        output: Tensor = model.module(x.clone())  # into which it may write
        return in_full(output)
    except Exception as error:
        reason = (str(error) or "-").splitlines()[0]
        raise ConfigError(
            f"model: {type(model.module).__name__} fails on a test batch of {len(x)} examples: {type(error).__name__}: {reason}; "
            f"it has to take batches of any size"
        ) from error


def _fitting(model: FlatModel, two: Tensor) -> int:
    """How many examples at once, by the output of two."""
    numbers = _output(model, two).numel() // len(two)
    return min(_BATCH, max(2, _NUMBERS // numbers))


def own_score(task: Task, model: FlatModel, x: Tensor, y: Tensor) -> float | None:
    """The main metric on one client's examples by themselves; None without any.

    Nobody else's data bear on it, not even by a rounding.
    """
    if not len(y):
        return None
    (score,) = task.client_scores(np.array([0, len(y)]), *evidence(task, model, x, y))
    return score


def evaluation_counts(task: Task, model: FlatModel, x: Tensor, y: Tensor) -> Tensor:
    """How many of a client's examples the model gets right and wrong [2], private; zeros without examples.

    Where the task's main metric is no accuracy, it divides the number of examples in its own proportion.
    """
    score = own_score(task, model, x, y)
    if score is None or math.isnan(score):
        return torch.zeros(2)
    right = len(y) * min(max(score, 0.0), 1.0)
    return torch.tensor([right, len(y) - right])
