"""The gradient of each example of a batch: by hand where layers are linear maps or convolutions, else by torch.func.

By hand, one backward pass gives the slope of the losses at each layer's output; an example's gradient of a layer is the product
of that slope with the layer's input (for a convolution, with the windows of its input).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional as F

if TYPE_CHECKING:
    from torch import Tensor

Block = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""One parameter's gradient for each example: [n, k], or the factors [n, o] and [n, i] of which it is the outer product."""

Losses = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(output [n, ...], targets [n, ...]) -> the loss of each example [n]."""

_Call = tuple[nn.Module, torch.Tensor, torch.Tensor]


def per_example_gradients(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The gradient of the loss of each example, parameter by parameter, and the losses [n].

    The network must treat examples apart from each other: no batch normalisation.
    """
    layers = [layer for layer in module.modules() if next(layer.parameters(recurse=False), None) is not None]
    known = sum(len(list(layer.parameters(recurse=False))) for layer in layers) == len(list(module.parameters()))
    if known and all(map(_by_hand, layers)):
        calls, losses = _slopes(module, layers, x, y, losses_of)
        if [layer for layer, _, _ in calls] == layers:
            return [block for call in calls for block in _blocks(*call)], losses
    return transformed(module, x, y, losses_of)


def norms(blocks: list[Block]) -> Tensor:
    """The L2 norm of each example's gradient [n], in float64; that of an outer product is the product of norms."""
    squares = [_squares(b) if isinstance(b, torch.Tensor) else _squares(b[0]) * _squares(b[1]) for b in blocks]
    return torch.stack(squares).sum(0).sqrt()


def weighted_sum(blocks: list[Block], weights: Tensor) -> Tensor:
    """The sum of the examples' gradients by `weights` [n], as a flat vector [d], in float64."""
    parts = [
        weights @ b.double() if isinstance(b, torch.Tensor) else (b[0].double() * weights[:, None]).T @ b[1].double()
        for b in blocks
    ]
    return torch.cat([part.flatten() for part in parts])


def rows(blocks: list[Block]) -> Tensor:
    """The flat gradient of each example [n, d]."""
    return torch.cat([b if isinstance(b, torch.Tensor) else _outer(*b) for b in blocks], dim=1)


def _squares(part: Tensor) -> Tensor:
    return part.double().square().sum(1)


def _outer(left: Tensor, right: Tensor) -> Tensor:
    return (left[:, :, None] * right[:, None, :]).flatten(1)


# --- by hand -----------------------------------------------------------------------------------------------------------


def _by_hand(layer: nn.Module) -> bool:
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.dilation == (1, 1) and layer.padding_mode == "zeros" and layer.padding != "same"
    return type(layer) is nn.Linear


def _slopes(module: nn.Module, layers: list[nn.Module], x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[_Call], Tensor]:
    """Each layer's input and the slope of the losses at its output, in the order of use; and the losses [n].

    Parameters need no gradient here: the backward pass leaves out their sums, and what lies before the first layer. There are no
    calls where something was overwritten in place, since its value at the layer is then lost.
    """
    used: list[_Call] = []
    versions: list[int] = []

    def remember(layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        used.append((layer, inputs[0].detach(), output))
        versions.extend((inputs[0]._version, output._version))

    hooks = [layer.register_forward_hook(remember) for layer in layers]
    try:
        constants = {name: p.detach() for name, p in module.named_parameters()}
        logits = functional_call(module, constants, (x.detach().requires_grad_(),))
    finally:
        for hook in hooks:
            hook.remove()
    losses = losses_of(logits, y)
    if versions != [tensor._version for _, inputs, output in used for tensor in (inputs, output)]:
        return [], losses.detach()
    slopes = torch.autograd.grad(losses.sum(), [output for _, _, output in used], materialize_grads=True)
    return [(layer, inputs, slope) for (layer, inputs, _), slope in zip(used, slopes, strict=True)], losses.detach()


def _blocks(layer: nn.Module, inputs: Tensor, slope: Tensor) -> list[Block]:
    """Weight, and bias where there is one."""
    weight: Block
    if isinstance(layer, nn.Conv2d):
        slope = slope.flatten(2)
        weight, bias = torch.bmm(slope, _windows(layer, inputs)).flatten(1), slope.sum(2)
    elif inputs.dim() == 2:
        weight, bias = (slope, inputs), slope
    else:
        slope, inputs = slope.flatten(1, -2), inputs.flatten(1, -2)
        weight, bias = torch.bmm(slope.mT, inputs).flatten(1), slope.sum(1)
    return [weight] if layer.bias is None else [weight, bias]


def _windows(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """What a convolution sees at each of its places [n, places, channels * kernel]; on a CPU much faster than `F.unfold`."""
    (height, width), (down, right) = layer.kernel_size, layer.stride
    windows = F.pad(x, layer._reversed_padding_repeated_twice).unfold(2, height, down).unfold(3, width, right)
    return windows.permute(0, 1, 4, 5, 2, 3).reshape(len(x), x.shape[1] * height * width, -1).mT


# --- by torch.func -----------------------------------------------------------------------------------------------------


def transformed(module: nn.Module, x: Tensor, y: Tensor, losses_of: Losses) -> tuple[list[Block], Tensor]:
    """The same as `per_example_gradients` for any network."""
    params = {name: p.detach() for name, p in module.named_parameters()}
    buffers = dict(module.named_buffers())

    def loss(p: dict[str, Tensor], one: Tensor, label: Tensor) -> Tensor:
        return losses_of(functional_call(module, (p, buffers), (one.unsqueeze(0),)), label.unsqueeze(0)).squeeze(0)

    gradients, losses = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(params, x, y)
    return [g.flatten(1) for g in gradients.values()], losses
