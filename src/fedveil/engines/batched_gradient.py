"""The gradients of several models at once: their parameters stacked, the forward pass vectorised over models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedveil.models.lora import LoraLinear
from fedveil.models.modules import GlobalMean, ResidualBlock, TokenMixer
from fedveil.models.pool2x2 import MaxPool2x2
from fedveil.training.local import forward_precision
from fedveil.training.params import called_with

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.engines.client_thread import Request
    from fedveil.tasks.task import Task
    from fedveil.training.local import LocalSpec
    from fedveil.training.params import FlatModel, Layout

    Forward = Callable[[dict[str, Tensor], Tensor], Tensor]
    """From the parameters [n, ...] of each layer and examples [n, b, ...] to outputs [n, b, ...]."""
    Losses = Callable[[Tensor, Tensor], Tensor]
    """From outputs [n, b, ...] and targets [n, b, ...] to the loss of each example [n, b]."""

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
"""Layers whose gradients are the same for models in a stack, and whose outputs do not depend on the padding of a batch."""
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
"""Layers of which that holds with these options."""


ONE_BY_ONE = "clients are trained one at a time, because the network cannot be stacked: %s"


def one_by_one_because(model: FlatModel, task: Task) -> str:
    """Return why the gradients of several models in one pass may differ from those of each alone; empty if they do not.

    Known to be right are built-in networks, and others of torch's own layers alone: `torch.func` does not run hooks on tensors,
    does not see inside scripts, and skips options that change gradients, such as the padding row of a table.
    """
    module = model.module
    if task.own or not task.by_example:
        return f"the loss of task.name = {task.name!r} is not a built-in mean over examples"
    if any(isinstance(part, _BatchNorm) and part.training for part in module.modules()):
        return "its batch normalisation takes statistics of whole batches"
    for name, part in module.named_modules():
        allowed = type(part) in _STACKED or (type(part) in _STACKED_IF and _STACKED_IF[type(part)](part))
        if not allowed:
            options = " with these options" if type(part) in _STACKED_IF else ""
            whose = f"{name or 'the network'} is a {type(part).__name__}{options}"
            return f"{whose}, which is not known to have the same gradients in a stack"
    if model.has_own_code:
        return "it has hooks, or functions of its own in the place of a layer's"
    return ""


class Stack:
    """n models of the same network as rows of one tensor, and the gradients that they ask for.

    As many requests as fit are answered together. Where memory runs out, half as many are from then on. The network must be one
    that `one_by_one_because` allows.

    Attributes:
        vectors, grads: [n, d]. models: each on its rows. together: models in one pass.
    """

    def __init__(self, model: FlatModel, spec: LocalSpec, n: int, task: Task) -> None:
        self._forward, self.layout, self.spec, self.task = vectorised(model.module), model.layout, spec, task
        self.vectors = model.vector.new_zeros(n, model.layout.dimension)
        self.grads = torch.zeros_like(self.vectors)
        self.models = [model.another(*rows) for rows in zip(self.vectors, self.grads, strict=True)]
        self.together = n

    def answer(self, requests: Sequence[Request]) -> None:
        """Write each request's gradient into its model and its loss (or what went wrong) into the request."""
        left = sorted(requests, key=lambda request: request.row)
        while left:
            part = left[: self.together]
            if self._answered(part):
                left = left[len(part) :]

    def _answered(self, part: Sequence[Request]) -> bool:
        """Whether this part was answered; if memory ran out, fewer are to be tried."""
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
    """Batches of several clients as one tensor each: examples [n, b, ...], targets [n, b, ...], weights [n, b] that make means.

    Short batches are filled up with their own first example, at weight 0. No batch may be empty.
    """
    sizes = tuple(map(len, ys))
    x, y = (torch.stack([_filled(part, max(sizes)) for part in parts]) for parts in (xs, ys))
    return x, y, _weights(sizes, x.dtype if x.is_floating_point() else torch.float32, x.device)


@lru_cache(maxsize=64)
def _weights(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """1 / size at the first `size` places of each row [n, longest]; kept, so that a GPU need not wait for it at each step."""
    lengths = torch.tensor(sizes, dtype=torch.float64).unsqueeze(1)
    return torch.where(torch.arange(max(sizes)) < lengths, 1.0 / lengths, 0.0).to(device, dtype)


@lru_cache(maxsize=64)
def _on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, device=device)


def _filled(part: Tensor, length: int) -> Tensor:
    missing = length - len(part)
    return part if not missing else torch.cat([part, part[:1].expand(missing, *part.shape[1:])])


def vectorised(module: nn.Module) -> Forward:
    """The forward pass of any network, vectorised over models."""
    return vmap(partial(called_with, module), randomness="different")


def by_example(task: Task) -> Losses:
    """The losses of several models, as of one batch of all their examples."""
    return lambda output, y: task.losses(output.flatten(0, 1), y.flatten(0, 1)).view(y.shape[:2])


def gradients(
    learned: tuple[Forward, Layout, Losses], spec: LocalSpec, vectors: Tensor, x: Tensor, y: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss [n] and the gradient [n, d] of each model on its own batch, clipped to V row by row when the spec says so.

    Args:
        learned: the forward pass, the layers of the network, and the losses of what comes out.
        vectors: parameters [n, d]. x, y, weights: as `padded` gives them.
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
