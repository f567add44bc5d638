"""Torch modules from lists of layers, with a faster 2x2 max-pooling.

torch's kernel visits contiguous images window by window. This module compares whole columns, then whole rows, by two vectorised
maxima. Ties go to the first coordinate of the window in reading order, as in torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedveil.models.networks import (
    Act,
    Conv,
    Flatten,
    GlobalAverage,
    Layer,
    Linear,
    Lstm,
    Norm,
    Pool,
    Residual,
    Shape,
    Transformer,
    walk,
)
from fedveil.training.cores import process_state

# Whether a transform of torch.func is active; only a private function of torch tells. If torch lacks this function,
# `_UnderTransforms` is always used, which needs only public functions: a training step of LeNet-5 then takes 6 to 11 % longer
# (batches of 1 to 100 images, one thread, medians of ten runs).
_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)


class MaxPool2x2(nn.Module):
    """`nn.MaxPool2d(2)`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the maximum of each 2x2 window."""
        return max_pool_2x2(x)


def max_pool_2x2(x: Tensor) -> Tensor:
    """Return `F.max_pool2d(x, 2)`, the maximum over 2x2 windows of images, with gradients of every order.

    x: [batch, channels, height, width]. torch's kernel is used for odd sides, other memory formats and precisions, and on GPUs
    unless results must be deterministic, since its gradient there is not. A window with NaN gives NaN, as in torch, but its
    gradient may go to another coordinate. Forward-mode differentiation is not supported.
    """
    height, width = x.shape[-2:]
    here = x.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
    suits = here and x.dtype in (torch.float32, torch.float64) and x.is_contiguous()
    if not suits or height % 2 or width % 2:
        return F.max_pool2d(x, 2)
    pooled: Tensor = _UnderTransforms.apply(x)[0] if _transformed() else _MaxPool.apply(x)  # type: ignore[no-untyped-call]
    return pooled


def _pool(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the maxima, a mask by row (1.0 if from the right column), and a mask by window (1.0 if from the lower row)."""
    left, right = (x[..., i::2].clone(memory_format=torch.contiguous_format) for i in (0, 1))
    wide = torch.maximum(left, right)
    from_right = right.gt_(left)
    upper, lower = wide[..., 0::2, :], wide[..., 1::2, :]
    return torch.maximum(upper, lower), from_right, lower.clone(memory_format=torch.contiguous_format).gt_(upper)


def _spread(grad: Tensor, from_right: Tensor, from_lower: Tensor) -> Tensor:
    lower = grad * from_lower
    wide = torch.stack((grad - lower, lower), -2).reshape(from_right.shape)
    right = wide * from_right
    # complex numbers are stored as pairs, which is the fastest way to interleave two tensors
    return torch.view_as_real(torch.complex(wide - right, right)).reshape(*wide.shape[:-1], 2 * wide.shape[-1])


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        pooled, *masks = _pool(x)
        ctx.save_for_backward(*masks)
        return pooled

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _spread(grad, *ctx.saved_tensors)


class _UnderTransforms(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _pool(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(*output[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *masks: Tensor) -> Tensor:
        return _spread(grad, *ctx.saved_tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int], x: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
        x = x.movedim(in_dims[0], 0)
        folded = _UnderTransforms.apply(x.flatten(0, 1))  # type: ignore[no-untyped-call]
        return tuple(part.unflatten(0, x.shape[:2]) for part in folded), (0, 0, 0)


_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "softplus": nn.Softplus}


class ResidualBlock(nn.Module):
    """Residual block: body(x) + shortcut(x)."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Sequential) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both branches; an empty shortcut is the identity."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


class LastState(nn.LSTM):
    """One-layer LSTM that takes (batch, channels, length) and returns its last hidden state (batch, hidden)."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Return the hidden state after the last time step."""
        _, (state, _) = super().forward(x.permute(2, 0, 1))
        return state[0]


class TokenMixer(nn.Module):
    """Transformer blocks over the pixels of (batch, channels, height, width), averaged over the output tokens.

    Every parameter, including the positions (a table), belongs to a layer whose per-example gradient has a closed form.
    """

    def __init__(self, width: int, tokens: int, spec: Transformer) -> None:
        super().__init__()
        self.positions = nn.Embedding(tokens, width)
        nn.init.normal_(self.positions.weight, std=0.02)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        made = (nn.TransformerEncoderLayer(width, spec.heads, spec.hidden, **options) for _ in range(spec.depth))  # type: ignore[arg-type]
        self.blocks = nn.Sequential(*made)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, height, width) to (batch, channels)."""
        tokens = x.flatten(2).transpose(1, 2)
        order = torch.arange(tokens.shape[1], device=x.device).expand(len(x), -1)
        mixed: Tensor = self.norm(self.blocks(tokens + self.positions(order)))
        return mixed.mean(1)


class GlobalMean(nn.Module):
    """Mean over all dimensions after the channels."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, channels, ...) to (batch, channels)."""
        return x.flatten(2).mean(2)


def initialised(layers: Iterable[Layer], shape: Shape, seed: int) -> nn.Sequential:
    """Build the network with torch's default initialisation from `seed`, restoring the global random state."""
    with process_state(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return sequential(layers, shape)


def sequential(layers: Iterable[Layer], shape: Shape) -> nn.Sequential:
    """Build the layers as one nn.Sequential; layers without parameters are named by kind and position."""
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (layer, input_shape) in enumerate(walk(layers, shape)):
        children[getattr(layer, "name", f"{type(layer).__name__.lower()}{i}")] = module(layer, input_shape)
    return nn.Sequential(children)


def _zeroed(linear: nn.Linear) -> nn.Linear:
    """Set all parameters of a layer to 0 and return it."""
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear


def module(layer: Layer, shape: Shape) -> nn.Module:
    """Build the torch module of one layer whose input has `shape` (without the batch)."""
    match layer:
        case Conv():
            convolution = nn.Conv2d if len(shape) == 3 else nn.Conv1d
            return convolution(shape[0], layer.out, layer.kernel, layer.stride, layer.padding, bias=layer.bias)
        case Linear():
            return _zeroed(nn.Linear(shape[0], layer.out)) if layer.zero else nn.Linear(shape[0], layer.out)
        case Norm():
            if layer.kind == "group":
                return nn.GroupNorm(layer.groups, shape[0])
            return nn.BatchNorm2d(shape[0]) if len(shape) == 3 else nn.BatchNorm1d(shape[0])
        case Lstm():
            return LastState(shape[0], layer.hidden)
        case Transformer():
            return TokenMixer(shape[0], shape[1] * shape[2], layer)
        case Act():
            return _ACTIVATIONS[layer.kind]()
        case Pool():
            if len(shape) == 3 and layer.kind == "max" and layer.size == 2:
                return MaxPool2x2()
            if len(shape) == 3:
                return nn.MaxPool2d(layer.size) if layer.kind == "max" else nn.AvgPool2d(layer.size)
            return nn.MaxPool1d(layer.size) if layer.kind == "max" else nn.AvgPool1d(layer.size)
        case GlobalAverage():
            return GlobalMean()
        case Flatten():
            return nn.Flatten()
        case Residual():
            return ResidualBlock(sequential(layer.body, shape), sequential(layer.shortcut, shape))
