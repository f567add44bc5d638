"""Evidence: the statistics that a task needs of a model's outputs, computed batch by batch, and scores of one client."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.errors import ConfigError
from fedveil.release.noise import Randomness
from fedveil.tasks.classification import SCORE_EDGES, counts_scores
from fedveil.tasks.task import in_full

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.tasks.task import Evidence, Task
    from fedveil.training.params import FlatModel

_BATCH = 1000
"""Largest number of examples in a batch."""
_STATISTICS_BATCH = 256
"""Largest batch size for estimating batch statistics."""
_NUMBERS = 2**24
"""Largest number of outputs in a batch, for examples with many: a score for each symbol at each place."""
_EDGES = torch.tensor(SCORE_EDGES, dtype=torch.float64)


def evidence(task: Task, model: FlatModel, x: Tensor, y: Tensor) -> Evidence:
    """Return the task's evidence on test examples [n, ...] and targets [n, ...], on the CPU.

    Batch normalisation uses the loaded statistics and leaves them unchanged. Random layers draw the same numbers in every test;
    otherwise a public score would reveal how many examples a client's test set has.
    """
    device = model.vector.device
    with _testing(model):
        size = _BATCH if y.dim() == 1 else _fitting(model, x[:2].to(device))
        parts = zip(torch.split(x, size), torch.split(y, size), strict=True)
        results = [task.evidence(_output(model, bx.to(device)).cpu(), by) for bx, by in parts]
    return tuple(torch.cat(part) for part in zip(*results, strict=True))


@contextmanager
def _testing(model: FlatModel) -> Iterator[Callable[[], None]]:
    """Set the model's mode of tests, and seed the random layers; yield a function that seeds them again.

    The batch statistics and the generators are as before at the end.
    """
    buffers, device = model.buffers(), model.vector.device
    model.eval()
    try:
        with torch.inference_mode(), Randomness(0).forward(device, "tests") as again:
            yield again
    finally:
        model.train()
        if buffers.numel():
            model.load_buffers(buffers)


def estimated_statistics(model: FlatModel, x: Tensor) -> Tensor:
    """Return a model's batch statistics on public examples [n, ...]: the mean over batches of nearly equal size."""
    device = model.vector.device
    batches = (part.to(device) for part in torch.tensor_split(x, -(-len(x) // _STATISTICS_BATCH)))
    with torch.no_grad(), Randomness(0).forward(device, "statistics"):
        return model.estimated_buffers(partial(_output, model), batches).to("cpu")


def _output(model: FlatModel, x: Tensor) -> Tensor:
    try:
        output: Tensor = model.module(x.clone())  # a copy, because the network may write into its input
        return in_full(output)
    except Exception as error:
        reason = (str(error) or "-").splitlines()[0]
        raise ConfigError(
            f"model: {type(model.module).__name__} fails on a test batch of {len(x)} examples: {type(error).__name__}: {reason}; "
            f"it has to take batches of any size"
        ) from error


def _fitting(model: FlatModel, two: Tensor) -> int:
    """Return a batch size that suits the size of the network's output on two examples."""
    numbers = _output(model, two).numel() // len(two)
    return min(_BATCH, max(2, _NUMBERS // numbers))


def client_score(task: Task, model: FlatModel, x: Tensor, y: Tensor) -> float | None:
    """Return the main metric on one client's examples, or None without examples.

    No other client's data influences it, not even through rounding.
    """
    if not len(y):
        return None
    (score,) = task.client_scores(np.array([0, len(y)]), *evidence(task, model, x, y))
    return score


def evaluation_counts(task: Task, model: FlatModel, x: Tensor, y: Tensor) -> Tensor:
    """Return how many of a client's examples the model gets right and wrong [2], private; zeros without examples.

    If the main metric is the area under the ROC curve, the result is the number of scores in each bin, by class [2, bins]. If it
    is another one than accuracy, the number of examples is split in proportion to it.
    """
    return _counted(task, len(y), evidence(task, model, x, y) if len(y) else ())


def _counted(task: Task, number: int, results: Evidence) -> Tensor:
    """Return the counts of so many examples, from their evidence."""
    if counts_scores(task):
        return _scores_in_bins(*results) if number else torch.zeros(2, len(SCORE_EDGES) + 1)
    score = task.client_scores(np.array([0, number]), *results)[0] if number else None
    if score is None or math.isnan(score):
        return torch.zeros(2)
    right = number * min(max(score, 0.0), 1.0)
    return torch.tensor([right, number - right])


def _scores_in_bins(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the number of scores in each bin, by class [2, bins]; NaN is in none."""
    logits, counts = logits.reshape(-1), torch.zeros(2, len(SCORE_EDGES) + 1)
    valid = ~logits.isnan()
    bins = torch.bucketize(logits[valid].double(), _EDGES, right=True)
    return counts.index_put_(((targets[valid] == 1).long(), bins), torch.ones(len(bins)), accumulate=True)


def cells_by_record(task: Task, model: FlatModel, x: Tensor, y: Tensor, *, strict: bool = False) -> Tensor:
    """Return the counts of each example alone, flat [n, m], private: no example changes another one's, not even by rounding.

    Each example has a pass of its own, because in a batch the rounding of a row depends on the number of rows. An example on
    which the network fails, or whose output is not finite, has zeros. What the network writes into its parameters is undone.

    Args:
        strict: the examples are public, so a failure raises.
    """
    shape = evaluation_counts(task, model, x[:0], y[:0]).numel()
    cells, device = torch.zeros(len(y), shape), model.vector.device
    before, buffers = model.vector.clone(), model.buffers()
    with _testing(model) as seed_again:
        for i, (record, target) in enumerate(zip(x.unsqueeze(1).unbind(), y.unsqueeze(1).unbind(), strict=True)):
            try:
                results = task.evidence(_output(model, record.to(device)).cpu(), target)
                if all(bool(part.isfinite().all()) for part in results):
                    cells[i] = _counted(task, 1, results).reshape(-1)
            except KeyboardInterrupt:
                raise
            except BaseException:
                if strict:
                    raise
            model.vector.copy_(before)
            if buffers.numel():
                model.load_buffers(buffers)
            if any(part.training for part in model.module.modules()):
                model.eval()
            seed_again()
    return cells
