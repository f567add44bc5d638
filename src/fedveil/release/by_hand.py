"""The gradients of a batch's examples from one forward and backward pass, for networks that are made of known layers alone.

Row i of what each layer sees is example i by construction: no code but torch's and fedveil's runs in a known network, and its
layers, with the options that they have, neither mix nor reorder the rows of a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedveil.release.gradient_blocks import Block, Dense, combined
from fedveil.release.layer_rules import RULES
from fedveil.release.taps import NoRule, Taps, installed

if TYPE_CHECKING:
    from torch import Tensor

Losses = Callable[["Tensor", "Tensor"], "Tensor"]
"""(outputs, targets) -> the loss of each example [n]."""

_LAYERS = frozenset(
    f"torch.nn.modules.{name}"
    for name in (
        *("activation", "batchnorm", "container", "conv", "dropout", "flatten", "fold", "instancenorm", "linear"),
        *("normalization", "padding", "pixelshuffle", "pooling", "sparse", "transformer", "upsampling"),
    )
)
"""Files of torch whose layers treat the rows of a batch apart, but for those below; recurrent ones return several tensors."""


def _within(dim: object) -> bool:
    """Whether a dimension is none of the examples, in a tensor of two dimensions or more."""
    return isinstance(dim, int) and (dim > 0 or dim == -1)


def _by_dimension(layer: Any) -> bool:
    return _within(layer.dim)


def _by_statistics(layer: Any) -> bool:
    return not layer.training and layer.running_mean is not None


_APART_IF: Mapping[type, Callable[[Any], bool]] = {
    **dict.fromkeys((nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.GLU, nn.Unflatten), _by_dimension),
    nn.Flatten: lambda layer: layer.start_dim > 0,
    nn.Softmax2d: lambda layer: False,
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _by_statistics),
    nn.SyncBatchNorm: lambda layer: False,
    nn.MultiheadAttention: lambda layer: layer.batch_first,
}
"""Layers that treat the rows apart with some options."""


def known(module: nn.Module) -> bool:
    """Whether no code but torch's and fedveil's runs in a network, in layers that treat the rows of a batch apart.

    That is a built-in network, or an `nn.Sequential` whose parts have exactly torch's types, without hooks, parametrizations or
    functions of somebody else's. What trains belongs to layers with a rule.
    """
    return all(map(_known_part, module.modules()))


def _known_part(part: nn.Module) -> bool:
    kind, file = type(part), type(part).__module__
    if not file.startswith("fedveil.") and (file not in _LAYERS or getattr(sys.modules[file], kind.__name__, None) is not kind):
        return False
    if kind in _APART_IF and not _APART_IF[kind](part):
        return False
    trained = [p for p in part.parameters(recurse=False) if p.requires_grad]
    if trained and kind not in RULES and kind is not NonDynamicallyQuantizableLinear:  # which is attention's last layer
        return False
    return not any(p._backward_hooks for p in trained) and not any(
        (value and name.endswith("_hooks")) or name == "forward" or _foreign(value) for name, value in vars(part).items()
    )


def _foreign(value: object) -> bool:
    """Whether it is a function of somebody else's, such as the activation of a transformer."""
    if not callable(value) or isinstance(value, type | BuiltinFunctionType):
        return False
    return not (getattr(value, "__module__", None) or "").startswith(("torch.", "fedveil."))


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that train, by name, in order."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def gradients(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> tuple[list[Block], Tensor]:
    """The blocks of the trainable parameters of a known network, in order, and the losses [n].

    Raises:
        NoRule: the options of a layer do not fit its rule.
    """
    parameters, n = list(trainable(module).values()), len(y)
    taps = Taps(parameters, leaf=torch.Tensor.requires_grad_, strict=True)
    with installed(taps, module, RULES):
        each = losses(module(x), y)
    if each.shape != (n,):
        raise NoRule
    slopes: tuple[Tensor | None, ...] = (None,) * len(taps.all)
    if each.requires_grad:
        slopes = torch.autograd.grad(each, [tap.output for tap in taps.all], torch.ones_like(each), allow_unused=True)
    with torch.no_grad():
        return summed(taps.uses(slopes), parameters, n), each.detach()


def summed(uses: Iterable[tuple[int, Callable[..., Block], list[Tensor]]], parameters: Sequence[Tensor], n: int) -> list[Block]:
    """The gradients of all parameters: the sum of what the uses of each contribute; zeros where it has none."""
    parts: dict[int, list[Block]] = {}
    for number, made, (slope, *seen) in uses:
        parts.setdefault(number, []).append(made(slope, n, *seen))
    return [combined(parts[i]) if i in parts else Dense(p.new_zeros(n, p.numel())) for i, p in enumerate(parameters)]
