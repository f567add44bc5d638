"""Several models at once: their gradients with stacked parameters, and dense networks as rows of one tensor.

Only one client thread runs at a time, so no locks are needed.

Matrix products may round differently with the memory layout of their operands, and elementwise functions at the end of a vector.
So rows and batches are padded to whole vectors, and batches to a length that depends only on the client's own number of examples.
Before a shape is first used, a test with random numbers checks that rows do not affect each other (`keeps_apart`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import repeat
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.rnn import pad_sequence

from fedveil.models.lora import LoraLinear
from fedveil.models.modules import GlobalMean, MaxPool2x2, ResidualBlock, TokenMixer
from fedveil.tasks.classification import Classification
from fedveil.training.local import Local, Plain, forward_precision
from fedveil.training.params import called_with

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.round import ClientTask, Context, Failure, Work
    from fedveil.tasks.task import Task
    from fedveil.training.local import Client, GradientSource, LocalSpec
    from fedveil.training.params import FlatModel, Layout

    Forward = Callable[[dict[str, Tensor], Tensor], Tensor]
    "Function from the parameters [n, ...] of each layer and examples [n, b, ...] to outputs [n, b, ...]."
    Losses = Callable[[Tensor, Tensor], Tensor]
    "Function from outputs [n, b, ...] and targets [n, b, ...] to the loss of each example [n, b]."


@dataclass
class Request:
    """Request for a batch's gradient by the client whose model is row `row`; the answer is its loss, or an exception."""

    row: int
    local: Local
    source: GradientSource
    x: Tensor
    y: Tensor
    answer: Tensor | BaseException | None = None


class _Abandoned(KeyboardInterrupt):
    """Raised in a client thread whose round was abandoned; not a failure of its client."""


class ClientThread:
    """Thread that runs `work` and stops at each gradient request; starts at once, and returns at the first stop.

    Attributes:
        request: the pending request. result: what `work` returned or raised, once it has ended.
    """

    def __init__(self, work: Callable[[ClientThread], Work | Failure]) -> None:
        self.request: Request | None = None
        self.result: Work | Failure | BaseException | None = None
        self._work, self._given_up = work, False
        self._go: SimpleQueue[None] = SimpleQueue()
        self._stopped: SimpleQueue[None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.resume()

    def resume(self) -> None:
        """Let the thread run, with its request answered, until the next request or its end."""
        self._go.put(None)
        self._stopped.get()

    def gradient(self, request: Request) -> Tensor:
        """Wait until the request is answered, and return the answer; called inside the thread."""
        self.request = request
        self._stopped.put(None)
        self._go.get()
        if self._given_up:
            raise _Abandoned
        self.request = None
        if isinstance(request.answer, BaseException):
            raise request.answer
        assert request.answer is not None
        return request.answer

    def give_up(self) -> None:
        """End the thread at its current request."""
        self._given_up = True
        self._go.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._go.get()
        try:
            self.result = self._work(self)
        except BaseException as error:
            self.result = error
        self._stopped.put(None)


@dataclass(frozen=True)
class InStep:
    """Gradient source that computes its gradients together with those of other threads."""

    inner: GradientSource
    lane: ClientThread
    row: int

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Return the batches of the inner source."""
        return self.inner.batches(local, x, y)

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Request the gradient; it is in `local.model.grad` when this returns."""
        return self.lane.gradient(Request(self.row, local, self.inner, x, y))


_log = logging.getLogger(__name__)

_STACKED: frozenset[type[nn.Module]] = frozenset(
    (
        *(nn.Sequential, nn.Identity, nn.Linear, NonDynamicallyQuantizableLinear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid, nn.Tanh),
        *(nn.Softplus, nn.Softsign, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm),
        *(LoraLinear, GlobalMean, MaxPool2x2, ResidualBlock, TokenMixer),
    )
)
"""Layers with the same gradients in a stack, whose outputs do not depend on the padding of a batch."""
_STACKED_IF: dict[type[nn.Module], Callable[[Any], bool]] = {
    nn.Flatten: lambda layer: layer.start_dim > 0,
    nn.Unflatten: lambda layer: isinstance(layer.dim, int) and layer.dim > 0,
    nn.Dropout: lambda layer: layer.p == 0 or not layer.training,
    nn.BatchNorm1d: lambda layer: not layer.training,
    nn.BatchNorm2d: lambda layer: not layer.training,
    nn.BatchNorm3d: lambda layer: not layer.training,
    nn.Embedding: lambda layer: (
        layer.padding_idx is None and layer.max_norm is None and not (layer.sparse or layer.scale_grad_by_freq)
    ),
    nn.MultiheadAttention: lambda layer: layer.batch_first and layer.dropout == 0,
    nn.TransformerEncoderLayer: lambda layer: layer.activation_relu_or_gelu > 0,
}
"""Layers for which the same is true with these options."""


ONE_BY_ONE = "clients are trained one at a time, because the network cannot be stacked: %s"


def one_by_one_because(model: FlatModel, task: Task) -> str:
    """Return why the gradients of several models in one pass may differ from those of each alone; empty if they do not.

    Only built-in networks, and those made solely of torch's own layers, are known to be right: `torch.func` does not run hooks on
    tensors, does not see inside scripts, and skips options that change gradients, such as the padding row of a table.
    """
    module = model.module
    if task.is_user_defined or not task.by_example:
        return f"the loss of task.name = {task.name!r} is not a built-in mean over examples"
    if any(isinstance(part, _BatchNorm) and part.training for part in module.modules()):
        return "its batch normalisation takes statistics of whole batches"
    for name, part in module.named_modules():
        allowed = type(part) in _STACKED or (type(part) in _STACKED_IF and _STACKED_IF[type(part)](part))
        if not allowed:
            options = " with these options" if type(part) in _STACKED_IF else ""
            whose = f"{name or 'the network'} is a {type(part).__name__}{options}"
            return f"{whose}, which is not known to have the same gradients in a stack"
    if model.has_user_code:
        return "it has hooks, or functions of its own in the place of a layer's"
    return ""


class Stack:
    """n models of the same network as rows of one tensor, and the computation of their gradients.

    As many requests as fit are answered together; after memory runs out, half as many. The network must be one that
    `one_by_one_because` allows.

    Attributes:
        vectors, grads: [n, d]. models: each on its rows. together: models in one pass.
    """

    def __init__(self, model: FlatModel, spec: LocalSpec, n: int, task: Task) -> None:
        self._forward, self.layout, self.spec, self.task = vectorised(model.module), model.layout, spec, task
        self.vectors = model.vector.new_zeros(n, model.layout.dimension)
        self.grads = torch.zeros_like(self.vectors)
        self.models = [model.copy_into(*rows) for rows in zip(self.vectors, self.grads, strict=True)]
        self.together = n

    def answer(self, requests: Sequence[Request]) -> None:
        """Write each request's gradient into its model, and its loss (or an exception) into the request."""
        left = sorted(requests, key=lambda request: request.row)
        while left:
            part = left[: self.together]
            if self._try_answer(part):
                left = left[len(part) :]

    def _try_answer(self, part: Sequence[Request]) -> bool:
        """Answer some requests; return False if memory ran out, so that fewer must be tried."""
        if len(part) == 1:
            _alone(part[0])
            return True
        try:
            self._stacked(part)
        except torch.OutOfMemoryError:
            self.together = len(part) // 2
            _log.warning(
                "memory ran out: %d clients at once from now on (run.clients_at_once lowers it from the start)", self.together
            )
            return False
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            for request in part:
                _alone(request)
            if not any(isinstance(request.answer, BaseException) for request in part):
                self.together = 1
                _log.warning(ONE_BY_ONE, (str(error).splitlines() or [type(error).__name__])[0])
        return True

    def _stacked(self, part: Sequence[Request]) -> None:
        x, y, weights = padded([r.x for r in part], [r.y for r in part])
        rows = _on_device(tuple(r.row for r in part), self.vectors.device)
        vectors = self.vectors if len(part) == len(self.vectors) else self.vectors[rows]
        losses, grads = gradients((self._forward, self.layout, by_example(self.task)), self.spec, vectors, x, y, weights)
        self.grads.index_copy_(0, rows, grads)
        for request, loss in zip(part, losses.unbind(), strict=True):
            request.answer = loss


def _alone(request: Request) -> None:
    try:
        request.answer = request.source(request.local, request.x, request.y)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        request.answer = error


def padded(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return batches of several clients as one tensor each: examples [n, b, ...], targets [n, b, ...], weights [n, b] for means.

    Short batches are padded with their own first example, at weight 0. No batch may be empty.
    """
    sizes = tuple(map(len, ys))
    x, y = (torch.stack([_filled(part, max(sizes)) for part in parts]) for parts in (xs, ys))
    return x, y, _weights(sizes, x.dtype if x.is_floating_point() else torch.float32, x.device)


@lru_cache(maxsize=64)
def _weights(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return 1 / size at the first `size` places of each row [n, longest]; cached, so that a GPU need not wait for it."""
    lengths = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1)
    return torch.where(torch.arange(max(sizes)) < lengths, 1.0 / lengths, 0.0).to(device, dtype)


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def _filled(part: Tensor, length: int) -> Tensor:
    missing = length - len(part)
    return part if not missing else torch.cat([part, part[:1].expand(missing, *part.shape[1:])])


def vectorised(module: nn.Module) -> Forward:
    """Return the forward pass of any network, vectorised over models."""
    return vmap(partial(called_with, module), randomness="different")


def by_example(task: Task) -> Losses:
    """Return a loss function for several models, computed as for one batch of all their examples."""
    return lambda output, y: task.losses(output.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])


def gradients(
    learned: tuple[Forward, Layout, Losses], spec: LocalSpec, vectors: Tensor, x: Tensor, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss [n] and gradient [n, d] of each model on its own batch, clipped to V row by row if the spec says so.

    Args:
        learned: the forward pass, the layers of the network, and the losses of its outputs.
        vectors: parameters [n, d]. x, y, weights: as returned by `padded`.
    """
    forward, layout, losses_of = learned
    leaf = vectors.detach().requires_grad_()
    parts = zip(layout.names, layout.shapes, torch.split(leaf, layout.sizes, 1), strict=True)
    parameters = {name: part.view(-1, *shape) for name, shape, part in parts}
    with forward_precision(spec, x.device):
        output = forward(parameters, x)
    losses = (losses_of(output.to(vectors.dtype), y) * weights).sum(1)
    (grads,) = torch.autograd.grad(losses.sum(), leaf)
    if spec.batch_clip is not None:
        norms = torch.linalg.vector_norm(grads, dim=1, keepdim=True)
        grads.mul_((spec.batch_clip / norms.clamp_min(1e-30)).clamp_max(1.0))
    return losses.detach(), grads


_LEAST_CLIENTS = 32
"""Number of clients per round from which stacking is chosen automatically."""
_MOST_PRODUCTS = 2**21
"""Largest product of parameters and batch size for which it is chosen: above, matrix products dominate the time."""

_ALIGNED = 32
"""Numbers in two of the longest vectors that processors work on."""
_DENSE = (nn.Flatten, nn.Identity, nn.Linear, nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softplus)


def obstacle(model: FlatModel, spec: LocalSpec, objective: Client, task: Task) -> str:
    """Return why clients cannot be stacked in such a run, or an empty string."""
    if not _is_dense(model):
        return "its network is not a flattening of examples and then dense layers, all of them trained"
    if type(objective) is not Plain or objective.penalty is not None:
        return "its method has local training of its own"
    if task.is_user_defined or not task.by_example:
        return "its loss is not a built-in mean over examples"
    if spec.precision != "float32" or model.vector.device.type != "cpu":
        return "it does not compute in float32 on a CPU"
    return ""


def _is_dense(model: FlatModel) -> bool:
    parts = [(name, part) for name, part in model.module.named_modules(remove_duplicate=False) if type(part) is not nn.Sequential]
    layers = [f"{name}.{parameter}" for name, part in parts for parameter, _ in part.named_parameters(recurse=False)]
    flat = [part for _, part in parts if isinstance(part, nn.Flatten)]
    return (
        all(type(part) in _DENSE for _, part in parts)
        and [(part.start_dim, part.end_dim) for part in flat] == [(1, -1)]
        and parts[0][1] is flat[0]
        and layers == list(model.layout.names)
        and not model.has_user_code
    )


def worthwhile(model: FlatModel, spec: LocalSpec, clients: int) -> bool:
    """Return whether stacking so many clients per round is faster (docs/performance.md)."""
    return clients >= _LEAST_CLIENTS and model.layout.dimension * spec.batch_size <= _MOST_PRODUCTS


def dense(module: nn.Module) -> Forward:
    """Return the forward pass of a dense network for n models, [n, b, ...] to [n, b, out], with one matrix product per layer.

    Internally examples are columns, because products with the gradients are then faster in the backward pass.
    """

    def columns(part: nn.Module, name: str, parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        if isinstance(part, nn.Sequential):
            for child_name, child in part.named_children():
                x = columns(child, f"{name}{child_name}.", parameters, x)
            return x
        if isinstance(part, nn.Linear):
            weight, bias = parameters[f"{name}weight"], parameters.get(f"{name}bias")
            return torch.bmm(weight, x) if bias is None else torch.baddbmm(bias.unsqueeze(2), weight, x)
        return x if isinstance(part, nn.Flatten | nn.Identity) else cast("Tensor", part(x))

    return lambda parameters, x: columns(module, "", parameters, x.flatten(2).transpose(1, 2)).transpose(1, 2)


def losses_of(task: Task) -> Losses:
    """Return a loss function for the models of a stack; with few classes it is faster with examples as columns."""
    if type(task) is not Classification:
        return by_example(task)
    return lambda output, y: task.losses(output.transpose(1, 2), y)


@dataclass
class Rows:
    """Models of a stack, in the role of `Local.model`. vector, grad: [n, d]."""

    vector: Tensor
    grad: Tensor

    def load(self, vector: Tensor) -> None:
        """Set the parameters of every model to `vector` [d]."""
        self.vector.copy_(vector)


def aligned(n: int, d: int) -> Tensor:
    """Return zeros [n, d] whose rows all have the same memory alignment."""
    return torch.zeros(n, filled(d))[:, :d]


def filled(n: int) -> int:
    return -(-n // _ALIGNED) * _ALIGNED


class StackedGradient:
    """Gradient source for clients with equal batch shapes, with batches [n, b, ...] and gradients [n, d]; see `BatchGradient`."""

    def __init__(self, context: Context, forward: Forward, tasks: Sequence[ClientTask]) -> None:
        self._learned, clients = (forward, context.model.layout, losses_of(context.task)), context.clients
        self._randomness, self._tasks = context.randomness, tasks
        ends = clients.offsets[[[task.client, task.client + 1] for task in tasks]]
        self._starts, self._sizes = (torch.from_numpy(part) for part in (ends[:, :1], np.diff(ends)))
        self._weights = torch.empty(0)

    def batches(self, local: Local, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `local.steps` batches; x, y: the examples and targets of all clients."""
        left, size = local.steps, local.spec.batch_size
        sizes, most = self._sizes.flatten().tolist(), int(self._sizes.max())
        if most <= size:  # one batch per pass: its order only affects rounding
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
        """Return the first `sizes` [n, 1] examples and targets of each client's `order` [n, b], padded with its first."""
        index = torch.arange(filled(order.shape[1]))
        valid = index < sizes
        places = (order.gather(1, torch.where(valid, index, 0)) + self._starts).view(-1)
        self._weights = torch.where(valid, 1.0 / sizes.double(), 0.0).float()
        examples, targets = (part.index_select(0, places).view(*valid.shape, *part.shape[1:]) for part in (x, y))
        return examples, targets

    def __call__(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        losses, local.model.grad = gradients(self._learned, local.spec, local.model.vector, x, y, self._weights)
        return losses


def keeps_apart(learned: tuple[Forward, Layout, Losses], spec: LocalSpec, shape: tuple[int, int], x: Tensor, y: Tensor) -> bool:
    """Return whether each row of a stack gets the same bits as when computed alone, for batches of that length.

    Args:
        shape: rows and length. x, y: empty examples and targets, of the right shapes and types.
    """
    draw, layout = torch.Generator().manual_seed(0), learned[1]
    examples, targets = torch.randn(*shape, *x.shape[1:], generator=draw), y.new_zeros(*shape, *y.shape[1:])
    weights, vectors = torch.rand(*shape, generator=draw), aligned(shape[0], layout.dimension)
    vectors.normal_(generator=draw).mul_(0.1)
    together = gradients(learned, spec, vectors, examples, targets, weights)
    for row in range(shape[0]):
        single, part = aligned(1, layout.dimension), slice(row, row + 1)
        single.copy_(vectors[part])
        alone = gradients(learned, spec, single, examples[part].clone(), targets[part], weights[part].clone())
        if not all(torch.equal(a[part], b) for a, b in zip(together, alone, strict=True)):
            return False
    return True
