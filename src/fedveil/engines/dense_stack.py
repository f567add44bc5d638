"""Dense networks as rows of one tensor: their forward pass, their batches, and whether rows are kept apart to the bit.

Products of matrices may round differently where their operands lie differently in memory, and elementwise functions where a
vector ends: so rows and batches are filled up to whole vectors, batches to a length that follows from the client's own number of
examples. What the library makes of that is tried with random numbers before a shape is first used (`keeps_apart`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from fedveil.engines.batched_gradient import by_example, gradients
from fedveil.tasks.classification import Classification
from fedveil.training.local import Local, Plain

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.engines.batched_gradient import Forward, Losses
    from fedveil.federation.round import ClientTask, Context
    from fedveil.tasks.task import Task
    from fedveil.training.local import Client, LocalSpec
    from fedveil.training.params import FlatModel, Layout

LEAST_CLIENTS = 32
"""Clients of a round from which stacking is chosen by itself."""
MOST_PRODUCTS = 2**21
"""Parameters times examples of a batch up to which it is: above, the products take the time, not what surrounds them."""

_ALIGNED = 32
"""Numbers: two of the longest vectors that processors work on."""
_DENSE = (nn.Flatten, nn.Identity, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus)


def obstacle(model: FlatModel, spec: LocalSpec, objective: Client, task: Task) -> str:
    """Why clients cannot be stacked in a run of these; empty where they can."""
    if not _is_dense(model):
        return "its network is not a flattening of examples and then dense layers, all of them trained"
    if type(objective) is not Plain or objective.penalty is not None:
        return "its method has local training of its own"
    if task.own or not task.by_example:
        return "its loss is not a built-in mean over examples"
    if spec.precision != "float32" or model.vector.device.type != "cpu":
        return "it does not compute in float32 on a CPU"
    return ""


def _is_dense(model: FlatModel) -> bool:
    parts = [(name, part) for name, part in model.module.named_modules(remove_duplicate=False) if type(part) is not nn.Sequential]
    layers = [f"{name}.{own}" for name, part in parts for own, _ in part.named_parameters(recurse=False)]
    flat = [part for _, part in parts if isinstance(part, nn.Flatten)]
    return (
        all(type(part) in _DENSE for _, part in parts)
        and [(part.start_dim, part.end_dim) for part in flat] == [(1, -1)]
        and parts[0][1] is flat[0]
        and layers == list(model.layout.names)
        and not model.has_own_code
    )


def worthwhile(model: FlatModel, spec: LocalSpec, clients: int) -> bool:
    """Whether stacking so many clients a round makes them faster (docs/performance.md)."""
    return clients >= LEAST_CLIENTS and model.layout.dimension * spec.batch_size <= MOST_PRODUCTS


def dense(module: nn.Module) -> Forward:
    """The forward pass of a dense network for n models: [n, b, ...] to [n, b, out], by one product of matrices a layer.

    Examples are columns within, because their products with the slopes are the faster ones backward.
    """

    def columns(part: nn.Module, name: str, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        if isinstance(part, nn.Sequential):
            for own, child in part.named_children():
                x = columns(child, f"{name}{own}.", parameters, x)
            return x
        if isinstance(part, nn.Linear):
            weight, bias = parameters[f"{name}weight"], parameters.get(f"{name}bias")
            return torch.bmm(weight, x) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, x)
        return x if isinstance(part, nn.Flatten | nn.Identity) else cast("Tensor", part(x))

    return lambda parameters, x: columns(module, "", parameters, x.flatten(2).transpose(1, 2)).transpose(1, 2)


def losses_of(task: Task) -> Losses:
    """The losses of each model's examples; those of few classes take a fraction of the time with the examples as columns."""
    if type(task) is not Classification:
        return by_example(task)
    return lambda output, y: task.losses(output.transpose(1, 2), y)


@dataclass
class Rows:
    """The models of a stack, for `Local.model`. vector, grad: [n, d]."""

    vector: Tensor
    grad: Tensor

    def load(self, vector: Tensor) -> None:
        """Set the parameters of each to `vector` [d]."""
        self.vector.copy_(vector)


def aligned(n: int, d: int) -> Tensor:
    """[n, d], each row aligned as the first."""
    return torch.zeros(n, filled(d))[:, :d]


def filled(n: int) -> int:
    return -(-n // _ALIGNED) * _ALIGNED


class StackedGradient:
    """Batches and gradients of clients whose batches have the same shapes, as [n, b, ...] and [n, d]; see `BatchGradient`."""

    def __init__(self, context: Context, forward: Forward, tasks: Sequence[ClientTask]) -> None:
        self._learned, clients = (forward, context.model.layout, losses_of(context.task)), context.clients
        self._randomness, self._tasks = context.randomness, tasks
        ends = clients.offsets[[[task.client, task.client + 1] for task in tasks]]
        self._starts, self._sizes = (torch.from_numpy(part) for part in (ends[:, :1], np.diff(ends)))
        self._weights = torch.empty(0)

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """`local.steps` batches; x, y: the examples and targets of all clients."""
        left, size = local.steps, local.spec.batch_size
        sizes, most = self._sizes.flatten().tolist(), int(self._sizes.max())
        if most <= size:  # one batch a pass: its order makes no difference but rounding
            batch = self._batch(torch.arange(most).expand(len(sizes), -1), self._sizes, x, y)
            yield from repeat(batch, left)
            return
        draws = [self._randomness.generator("batches", task.released.round, task.client) for task in self._tasks]
        while left > 0:
            orders = pad_sequence([torch.randperm(n, generator=draw) for n, draw in zip(sizes, draws, strict=True)], True)
            for begin in range(0, most, size)[:left]:
                yield self._batch(orders[:, begin : begin + size], (self._sizes - begin).clamp_max(size), x, y)
                left -= 1

    def _batch(self, order: Tensor, sizes: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Examples and targets of the first of each client's `order` [n, b], as many as `sizes` [n, 1]; they fill it up, too."""
        index = torch.arange(filled(order.shape[1]))
        there = index < sizes
        places = (order.gather(1, torch.where(there, index, 0)) + self._starts).view(-1)
        self._weights = torch.where(there, 1.0 / sizes.double(), 0.0).float()
        examples, targets = (part.index_select(0, places).view(*there.shape, *part.shape[1:]) for part in (x, y))
        return examples, targets

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        losses, local.model.grad = gradients(self._learned, local.spec, local.model.vector, x, y, self._weights)
        return losses


def keeps_apart(learned: tuple[Forward, Layout, Losses], spec: LocalSpec, shape: tuple[int, int], x: Tensor, y: Tensor) -> bool:
    """Whether each of so many rows gets, with batches of that length, the same bits as it does alone.

    Args:
        shape: rows and length. x, y: no examples and no targets, of the right shapes and types.
    """
    draw, layout = torch.Generator().manual_seed(0), learned[1]
    examples, targets = torch.randn(*shape, *x.shape[1:], generator=draw), y.new_zeros(*shape, *y.shape[1:])
    weights, vectors = torch.rand(*shape, generator=draw), aligned(shape[0], layout.dimension)
    vectors.normal_(generator=draw).mul_(0.1)
    together = gradients(learned, spec, vectors, examples, targets, weights)
    for row in range(shape[0]):
        own, part = aligned(1, layout.dimension), slice(row, row + 1)
        own.copy_(vectors[part])
        alone = gradients(learned, spec, own, examples[part].clone(), targets[part], weights[part].clone())
        if not all(torch.equal(a[part], b) for a, b in zip(together, alone, strict=True)):
            return False
    return True
