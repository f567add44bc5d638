"""The gradient of each example of a batch: an example is a call, so nothing of another one is in the reach of a user's code.

Three routes:

1. By hand (`by_hand`), for networks of ours and an `nn.Sequential` of torch's own layers: one forward and backward pass over the
   batch. A loss of the user's own is handed one example at a time all the same.
2. `torch.func.vmap` over single examples, for every other network.
3. A loop over single examples, where the network cannot be transformed: it looks at values to decide what to do, or writes
   examples into a tensor that was made without them.

Made-up examples at made-up weights choose the route (`plan_for`): were they the client's, or the weights those that the process
meets first, how all gradients are rounded would follow from them. No error on a client's examples leads to another route.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.func import grad_and_value, vmap
from torch.nn.modules.batchnorm import _NormBase

from fedveil.release import by_hand
from fedveil.release.by_hand import Losses, Shapes, trainable
from fedveil.release.gradient_blocks import Block, Dense, rows
from fedveil.release.layer_rules import RULES
from fedveil.release.noise import Randomness
from fedveil.release.taps import Taps, installed
from fedveil.tasks.task import Task
from fedveil.training.params import called_with

if TYPE_CHECKING:
    from collections.abc import Hashable

    from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """The route of a network's gradients.

    Args:
        shapes: of each tapped output for one example; None where they are not found by hand.
        transforms: whether `torch.func` can do the network.
    """

    shapes: Shapes | None = None
    transforms: bool = True


def per_example_gradients(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The gradient of each example's loss in the trainable parameters, in the order of `named_parameters`, and the losses [n].

    Args:
        x: examples [n, ...], numbers or tokens. y: targets [n, ...]. losses_of: (outputs, targets) -> one loss an example, [n].
    """
    if len(y) == 1:
        return one_by_one(module, x, y, losses_of)
    plan = plan_for(module, x, y, losses_of)
    if plan.shapes is not None:
        return by_hand.gradients(module, x, y, _apart(losses_of), plan.shapes)
    return (transformed if plan.transforms else one_by_one)(module, x, y, losses_of)


def transformed(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same by `torch.func`."""
    parameters = trainable(module)
    wanted = {name: p.detach() for name, p in parameters.items()}

    def loss(values: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return losses_of(called_with(module, values, one[None]), target[None])[0]

    with _transformable(module):
        found, each = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")(wanted, x, y)
    return [Dense(g.reshape(len(y), p.numel())) for g, p in zip(found.values(), parameters.values(), strict=True)], each


def one_by_one(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same by one backward pass for each example."""
    parameters = list(trainable(module).values())
    each, found = [], []
    for i in range(len(y)):
        (loss,) = losses_of(module(x[i : i + 1]), y[i : i + 1])
        found.append(_backward(loss, parameters))
        each.append(loss.detach())
    stacked = (torch.stack(g) for g in zip(*found, strict=True))
    return [Dense(g.reshape(len(y), p.numel())) for g, p in zip(stacked, parameters, strict=True)], torch.stack(each)


def _backward(loss: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    """Dense gradients; zeros where the loss follows from none of the parameters."""
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in parameters]
    return [g.to_dense() for g in torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)]


def _apart(losses: Losses) -> Losses:
    """Losses of which each is computed from its own example alone, unless they are those of a task of ours."""
    owner = getattr(losses, "__self__", None)
    if isinstance(owner, Task) and not owner.own:
        return losses
    return vmap(lambda output, target: losses(output[None], target[None])[0], randomness="different")


@contextmanager
def _transformable(module: nn.Module) -> Iterator[None]:
    """Known layers compute in ways that `torch.func` can transform; what it does slowly it does without a warning."""
    with installed(Taps(live=False), module, RULES), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="There is a performance drop")
        yield


# --- the route ---------------------------------------------------------------------------------------------------------

_PLANS: WeakKeyDictionary[nn.Module, dict[Hashable, Plan]] = WeakKeyDictionary()
_MOST_PLANS = 64


def plan_for(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> Plan:
    """The plan for batches of such examples, found once for a network and kept.

    Only the shapes and types of the examples are looked at, and of the weights that train: it is the same whenever it is found.
    """
    plans = _PLANS.setdefault(module, {})
    key = _key(module, x, y, losses)
    if key not in plans:
        with Randomness(0).forward(x.device, "route"):  # the same numbers each time, and none of the run's
            found = _found(module, *_made_up(x, y), losses)
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[key] = found
    return plans[key]


def _key(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> Hashable:
    owner = getattr(losses, "__self__", losses)  # a method is another object each time, and so may be its owner
    kind = getattr(losses, "__func__", None), owner if type(owner).__hash__ is not None else type(owner)
    flags = tuple(
        (layer.training, *(p is not None and p.requires_grad for p in layer._parameters.values())) for layer in module.modules()
    )
    return x.shape[1:], x.dtype, x.device, y.shape[1:], y.dtype, kind, flags


def _found(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> Plan:
    loop = Plan(transforms=False)
    if by_hand.hooked(module):
        return loop  # a copy would lack the hooks
    try:
        made = _with_made_up_weights(module)
        with _transformable(made):
            vmap(lambda one, target: losses(made(one[None]), target[None]), randomness="different")(x, y)
        _require_no_decision_on_weights(made, x, y, losses)
    except Exception:
        return loop
    if by_hand.known(module):
        try:
            return Plan(by_hand.shapes_of(made, x, y, _apart(losses)))
        except Exception:
            pass
    return Plan(transforms=_transforms(made, x, y, losses))


def _made_up(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Two examples and targets of the same shapes and types: numbers from 0 to 1; of whole ones, tokens 0 and 1 and class 0.

    The second example is all ones, and each row of the first is zeros after its first place: one example's places in a row, and
    the places of both in turn, are never the same tokens; and neither example is all padding where 0 pads.
    """
    draw = torch.Generator().manual_seed(0)

    def like(values: Tensor, second: int) -> Tensor:
        made = torch.zeros(2, *values.shape[1:])
        if values.is_floating_point():
            made.uniform_(generator=draw)
        else:
            made[1] = second
            if values.dim() > 1 and values.shape[-1] > 1:
                made[0, ..., 0] = second
        return made.to(values.device, values.dtype)

    return like(x, 1), like(y, 0)


def _with_made_up_weights(module: nn.Module) -> nn.Module:
    """A copy, which shares the frozen parameters. Matrices are random and scaled by what goes into them, vectors lie around 1.

    None are zero, as where a layer starts, since that hides what the layer is handed. Statistics of batches are 0 and 1.

    Raises:
        ValueError: a layer copies itself otherwise.
    """
    made = deepcopy(module, {id(p): p for p in module.parameters() if not p.requires_grad})
    draw, own = torch.Generator().manual_seed(0), {p.data_ptr() for p in trainable(module).values()}
    if any(p.data_ptr() in own for p in trainable(made).values() if p.numel()):
        raise ValueError("the copy has the weights of the network itself")
    with torch.no_grad():
        for p in trainable(made).values():
            if p.dim() > 1:
                p.copy_(torch.randn(p.shape, generator=draw) / math.sqrt(max(1, p[0].numel())))
            else:
                p.copy_(torch.rand(p.shape, generator=draw) + 0.5)
    for layer in made.modules():
        parameters = list(layer.parameters())
        if isinstance(layer, _NormBase) and (not parameters or any(p.requires_grad for p in parameters)):
            layer.reset_running_stats()
    return made


def _require_no_decision_on_weights(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> None:
    """Else the network is another one at other weights, of which made-up ones show nothing."""
    parameters = trainable(module)

    def loss(own: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return losses(called_with(module, own, one[None]), target[None])

    weights = {name: torch.stack([p.detach(), p.detach()]) for name, p in parameters.items()}
    with _transformable(module):
        vmap(loss, randomness="different")(weights, x, y)


def _transforms(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> bool:
    """Whether `torch.func` gives the gradients of the backward pass, one example at a time, from the same random numbers.

    It does not see weights that the network reaches other than as its parameters.
    """
    for one, target in zip(x[:, None], y[:, None], strict=True):
        found = []
        for route in (transformed, one_by_one):
            try:
                with Randomness(0).forward(x.device, "route"):
                    found.append(rows(route(module, one, target, losses)[0]))
            except Exception:
                return False
        if not bool((found[0] - found[1]).norm() <= 1e-2 * found[1].norm() + 1e-30):
            return False
    return True
