"""The gradients of several models at once: their parameters stacked, the forward pass vectorised over models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING

import torch
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from fedveil.training.local import forward_precision
from fedveil.training.params import called_with

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fedveil.engines.client_thread import Request
    from fedveil.tasks.task import Task
    from fedveil.training.local import LocalSpec
    from fedveil.training.params import FlatModel, Layout

    Forward = Callable[[dict[str, Tensor], Tensor], Tensor]
    """From the parameters [n, ...] of each layer and examples [n, b, ...] to outputs [n, b, ...]."""
    Losses = Callable[[Tensor, Tensor], Tensor]
    """From outputs [n, b, ...] and targets [n, b, ...] to the loss of each example [n, b]."""

_log = logging.getLogger(__name__)


class Stack:
    """n models of the same network as rows of one tensor, and the gradients that they ask for.

    As many requests as fit are answered together. Where memory runs out, half as many are from then on; a network that cannot
    be vectorised (recurrent ones, and batch normalisation, whose statistics padding would change) is served one by one.

    Attributes:
        vectors, grads: [n, d]. models: each on its rows. together: models in one pass.
    """

    def __init__(self, model: FlatModel, spec: LocalSpec, n: int, task: Task) -> None:
        self._forward, self.layout, self.spec, self.task = vectorised(model.module), model.layout, spec, task
        self.vectors = model.vector.new_zeros(n, model.layout.dimension)
        self.grads = torch.zeros_like(self.vectors)
        self.models = [model.another(*rows) for rows in zip(self.vectors, self.grads, strict=True)]
        self.together = n
        if n > 1 and any(isinstance(part, _BatchNorm) and part.training for part in model.module.modules()):
            self._one_at_a_time("its batch normalisation takes statistics of whole batches")
        elif n > 1 and not task.by_example:
            self._one_at_a_time(f"the loss of task.name = {task.name!r} is not a mean over examples")

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
                self._one_at_a_time((str(error).splitlines() or [type(error).__name__])[0])
        return True

    def _stacked(self, part: Sequence[Request]) -> None:
        x, y, weights = padded([r.x for r in part], [r.y for r in part])
        rows = _on_device(tuple(r.row for r in part), self.vectors.device)
        vectors = self.vectors if len(part) == len(self.vectors) else self.vectors[rows]
        losses, grads = gradients((self._forward, self.layout, by_example(self.task)), self.spec, vectors, x, y, weights)
        self.grads.index_copy_(0, rows, grads)
        for request, loss in zip(part, losses.unbind(), strict=True):
            request.answer = loss

    def _one_at_a_time(self, why: str) -> None:
        self.together = 1
        _log.warning("clients are trained one at a time, because the network cannot be stacked: %s", why)


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
