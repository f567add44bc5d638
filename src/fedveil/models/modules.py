"""From a list of layers to torch modules; nothing here is needed to know a network's size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedveil.models.layers import (
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
from fedveil.models.pool2x2 import MaxPool2x2
from fedveil.training.cores import process_state

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "sigmoid": nn.Sigmoid, "tanh": nn.Tanh, "softplus": nn.Softplus}


class ResidualBlock(nn.Module):
    """body(x) + shortcut(x)."""

    def __init__(self, body: nn.Sequential, shortcut: nn.Sequential) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        """Sum of both branches; an empty shortcut passes x on."""
        out: Tensor = self.body(x) + self.shortcut(x)
        return out


class LastState(nn.LSTM):
    """One-layer LSTM that takes (batch, channels, length) and returns its last hidden state (batch, hidden)."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Hidden state after the last time step."""
        _, (state, _) = super().forward(x.permute(2, 0, 1))
        return state[0]


class TokenMixer(nn.Module):
    """Transformer blocks over the pixels of (batch, channels, height, width), and the mean of what comes out of each.

    Every parameter belongs to a layer whose per-example gradient is known by hand, positions included (a table).
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
        """(batch, channels, height, width) to (batch, channels)."""
        tokens = x.flatten(2).transpose(1, 2)
        order = torch.arange(tokens.shape[1], device=x.device).expand(len(x), -1)
        mixed: Tensor = self.norm(self.blocks(tokens + self.positions(order)))
        return mixed.mean(1)


class GlobalMean(nn.Module):
    """Mean over all dimensions after the channels."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, ...) to (batch, channels)."""
        return x.flatten(2).mean(2)


def initialised(layers: Iterable[Layer], shape: Shape, seed: int) -> nn.Sequential:
    """The network with torch's default initialisation drawn from `seed`; the global random state is put back."""
    with process_state(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return sequential(layers, shape)


def sequential(layers: Iterable[Layer], shape: Shape) -> nn.Sequential:
    """The layers as one nn.Sequential; layers without parameters are named by kind and position."""
    children: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (layer, input_shape) in enumerate(walk(layers, shape)):
        children[getattr(layer, "name", f"{type(layer).__name__.lower()}{i}")] = module(layer, input_shape)
    return nn.Sequential(children)


def zeroed(linear: nn.Linear) -> nn.Linear:
    """The layer with all parameters 0."""
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return linear


def module(layer: Layer, shape: Shape) -> nn.Module:
    """The torch module of one layer whose input has `shape` (without the batch)."""
    match layer:
        case Conv():
            convolution = nn.Conv2d if len(shape) == 3 else nn.Conv1d
            return convolution(shape[0], layer.out, layer.kernel, layer.stride, layer.padding, bias=layer.bias)
        case Linear():
            return zeroed(nn.Linear(shape[0], layer.out)) if layer.zero else nn.Linear(shape[0], layer.out)
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
