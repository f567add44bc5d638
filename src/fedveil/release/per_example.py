"""The gradient of each example of a batch, for any network that treats examples apart.

Three routes, from fast to slow, each for what the one before cannot do:

1. By hand: one forward and backward pass over the batch, with taps at known layers (`by_hand`, `layer_rules.RULES`).
2. `torch.func`, where a parameter is used outside of known layers.
3. One backward pass for each example, where the network cannot be transformed: it looks at values to decide what to do, or
   writes examples into a tensor that was made without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.func import grad_and_value, vmap

from fedveil.release import by_hand
from fedveil.release.by_hand import Losses, trainable
from fedveil.release.gradient_blocks import Block, Dense
from fedveil.training.params import called_with

if TYPE_CHECKING:
    from torch import Tensor, nn


def per_example_gradients(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The gradient of each example's loss in the trainable parameters, in the order of `named_parameters`, and the losses [n].

    The network must treat examples apart from each other: no batch normalisation by statistics of the batch.

    Args:
        x: examples [n, ...], numbers or tokens. y: targets [n, ...]. losses_of: (outputs, targets) -> one loss an example, [n].
    """
    if len(y) == 1:
        return one_by_one(module, x, y, losses_of)
    plan = by_hand.plan_for(module, x, y, losses_of)
    if plan.shapes is not None:
        try:
            return by_hand.gradients(module, x, y, losses_of, plan)
        except Exception:
            pass
    if plan.transforms:
        try:
            return transformed(module, x, y, losses_of)
        except Exception:
            pass
    return one_by_one(module, x, y, losses_of)


def transformed(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same by `torch.func`."""
    fixed = {name: p.detach() for name, p in module.named_parameters()}
    wanted = {name: fixed.pop(name) for name in trainable(module)}
    fixed |= dict(module.named_buffers())

    def loss(p: dict[str, Tensor], one: Tensor, target: Tensor) -> Tensor:
        return losses_of(called_with(module, p | fixed, one[None]), target[None])[0]

    with by_hand.transformable(module):
        found, each = vmap(grad_and_value(loss), in_dims=(None, 0, 0), randomness="different")(wanted, x, y)
    return [Dense(g.flatten(1)) for g in found.values()], each


def one_by_one(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same by one backward pass for each example."""
    parameters = list(trainable(module).values())
    each, found = [], []
    for i in range(len(y)):
        (loss,) = losses_of(module(x[i : i + 1]), y[i : i + 1])
        found.append(torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True))
        each.append(loss.detach())
    return [Dense(torch.stack(g).flatten(1)) for g in zip(*found, strict=True)], torch.stack(each)
