"""The gradients of a batch's examples from one forward and backward pass, for networks that are made of known layers alone.

Row i of what each layer sees is example i by construction: no code but torch's and fedveil's runs in a known network, and its
layers, with their options and with as many dimensions as they are handed, neither mix nor reorder the rows of a batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fedveil.release.gradient_blocks import Block, Dense, combined
from fedveil.release.layer_rules import RULES
from fedveil.release.taps import NoRule, Taps, installed
from fedveil.training.params import trained_parameters

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
"""Files of torch whose layers treat the rows of a batch apart, as said below; recurrent ones return several tensors."""


_LEAST: Mapping[type, int] = {
    **dict.fromkeys((nn.Linear, nn.GroupNorm, nn.ConstantPad1d, nn.ZeroPad1d), 2),
    **dict.fromkeys((nn.Conv1d, nn.ConvTranspose1d, nn.ConstantPad2d, nn.ZeroPad2d, nn.Fold, nn.MultiheadAttention), 3),
    **dict.fromkeys((nn.Conv2d, nn.ConvTranspose2d, nn.ConstantPad3d, nn.ZeroPad3d, nn.Unfold, nn.Softmax2d), 4),
    **dict.fromkeys((nn.PixelShuffle, nn.PixelUnshuffle), 4),
    **dict.fromkeys((nn.Conv3d, nn.ConvTranspose3d), 5),
}
"""Dimensions that a batch has at least; with fewer a layer takes what it is handed for one example, or reaches across them."""
_WITHIN: Mapping[type, str] = {
    **dict.fromkeys((nn.Softmax, nn.Softmin, nn.LogSoftmax, nn.GLU, nn.Unflatten), "dim"),
    nn.Flatten: "start_dim",
}
"""Layers that work along a dimension, which must not be that of the examples, and its name."""


def _require_rows(layer: Any, inputs: tuple[Tensor, ...]) -> None:
    """Raise NoRule where a layer, as it is called, would not treat the rows of a batch apart."""
    x, along = inputs[0], _WITHIN.get(type(layer))
    if x.dim() < _LEAST.get(type(layer), len(getattr(layer, "normalized_shape", ())) + 1):
        raise NoRule
    if along is not None and not (isinstance(dim := getattr(layer, along), int) and dim % x.dim()):
        raise NoRule


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
    if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
        return False
    if isinstance(part, nn.MultiheadAttention) and not part.batch_first:
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


def gradients(module: nn.Module, x: Tensor, y: Tensor, losses: Losses) -> tuple[list[Block], Tensor]:
    """The blocks of the trainable parameters of a known network, in order, and the losses [n].

    Raises:
        NoRule: the options of a layer do not fit its rule, or it does not treat rows apart.
    """
    parameters, n = list(trained_parameters(module).values()), len(y)
    taps = Taps(parameters, strict=True)
    checks = [part.register_forward_pre_hook(_require_rows) for part in module.modules() if type(part).__module__ in _LAYERS]
    try:
        with installed(taps, module, RULES):
            each = losses(module(x), y)
    finally:
        for check in checks:
            check.remove()
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
