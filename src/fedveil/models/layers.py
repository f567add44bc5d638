"""A network as a list of layers: enough to know every parameter's name and shape without torch.

`fedveil.models.modules` turns the same list into torch modules, so there is one description of each network.
Shapes leave out the batch: (channels, height, width), (channels, length) or (features,).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from fedveil.errors import ConfigError

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Activation = Literal["relu", "sigmoid", "tanh", "softplus"]


class DoesNotFit(ConfigError):
    """An input shape that a network cannot take."""


@dataclass(frozen=True)
class Conv:
    """Convolution over one or two dimensions, as many as the input has."""

    name: str
    out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True


@dataclass(frozen=True)
class Linear:
    """Fully connected layer; `zero` starts it at zero."""

    name: str
    out: int
    zero: bool = False


@dataclass(frozen=True)
class Norm:
    """Normalisation with a learned scale and shift per channel; `groups` is for kind "group" only."""

    name: str
    kind: Literal["group", "batch"]
    groups: int = 1


@dataclass(frozen=True)
class Lstm:
    """One-layer LSTM over (channels, length); its output is the last hidden state."""

    name: str
    hidden: int


@dataclass(frozen=True)
class Transformer:
    """Learned positions, `depth` pre-norm transformer blocks and a layer norm over a grid of tokens; its output is their mean."""

    name: str
    depth: int
    heads: int
    hidden: int


@dataclass(frozen=True)
class Act:
    """Activation, coordinate by coordinate."""

    kind: Activation = "relu"


@dataclass(frozen=True)
class Pool:
    """Pooling over windows of `size` that do not overlap; an incomplete window at the end is dropped."""

    kind: Literal["max", "avg"] = "max"
    size: int = 2


@dataclass(frozen=True)
class GlobalAverage:
    """Mean of each channel."""


@dataclass(frozen=True)
class Flatten:
    """All coordinates in one row."""


@dataclass(frozen=True)
class Residual:
    """body(x) + shortcut(x); an empty shortcut is the identity."""

    name: str
    body: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()


Layer = Conv | Linear | Norm | Lstm | Transformer | Act | Pool | GlobalAverage | Flatten | Residual


def output_shape(layer: Layer, shape: Shape) -> Shape:
    """Shape of `layer`'s output for an input of `shape`, both without the batch.

    Raises DoesNotFit where the layer cannot take that input.
    """
    match layer:
        case Conv():
            _need(len(shape) in (2, 3), layer.name, shape, "(channels, height, width) or (channels, length)")
            return (layer.out, *_windows(layer.name, shape, layer.kernel, layer.stride, layer.padding))
        case Pool():
            return (shape[0], *_windows(f"{layer.kind}-pooling", shape, layer.size, layer.size, 0))
        case Linear():
            _need(len(shape) == 1, layer.name, shape, "(features,)")
            return (layer.out,)
        case Lstm():
            _need(len(shape) == 2, layer.name, shape, "(channels, length)")
            return (layer.hidden,)
        case Transformer():
            _need(len(shape) == 3, layer.name, shape, "(channels, height, width)")
            if shape[0] % layer.heads:
                raise ConfigError(f"{layer.name}: {layer.heads} heads do not divide {shape[0]} channels")
            return (shape[0],)
        case GlobalAverage():
            return (shape[0],)
        case Flatten():
            return (math.prod(shape),)
        case Norm():
            if layer.kind == "group" and shape[0] % layer.groups:
                raise ConfigError(f"{layer.name}: {layer.groups} groups do not divide {shape[0]} channels")
            return shape
        case Act():
            return shape
        case Residual():
            return through(layer.body, shape)


def parameter_shapes(layer: Layer, shape: Shape) -> Shapes:
    """Shapes of `layer`'s parameters, by name, in the order of torch's `named_parameters()`."""
    match layer:
        case Conv():
            weight: Shape = (layer.out, shape[0], *([layer.kernel] * (len(shape) - 1)))
            return {f"{layer.name}.weight": weight} | ({f"{layer.name}.bias": (layer.out,)} if layer.bias else {})
        case Linear():
            return {f"{layer.name}.weight": (layer.out, shape[0]), f"{layer.name}.bias": (layer.out,)}
        case Norm():
            return {f"{layer.name}.weight": (shape[0],), f"{layer.name}.bias": (shape[0],)}
        case Lstm():
            gates = 4 * layer.hidden
            weights: Shapes = {"weight_ih_l0": (gates, shape[0]), "weight_hh_l0": (gates, layer.hidden)}
            return {f"{layer.name}.{k}": v for k, v in (weights | {"bias_ih_l0": (gates,), "bias_hh_l0": (gates,)}).items()}
        case Transformer():
            blocks = {f"blocks.{i}.{k}": v for i in range(layer.depth) for k, v in _block_shapes(shape[0], layer.hidden).items()}
            around: Shapes = {"norm.weight": (shape[0],), "norm.bias": (shape[0],)}
            found = {"positions.weight": (math.prod(shape[1:]), shape[0])} | blocks | around
            return {f"{layer.name}.{k}": v for k, v in found.items()}
        case Residual():
            body = {f"{layer.name}.body.{k}": v for k, v in all_parameter_shapes(layer.body, shape).items()}
            shortcut = {f"{layer.name}.shortcut.{k}": v for k, v in all_parameter_shapes(layer.shortcut, shape).items()}
            return body | shortcut
        case Act() | Pool() | GlobalAverage() | Flatten():
            return {}


def _block_shapes(width: int, hidden: int) -> Shapes:
    """Of one `nn.TransformerEncoderLayer`."""
    return {
        "self_attn.in_proj_weight": (3 * width, width),
        "self_attn.in_proj_bias": (3 * width,),
        "self_attn.out_proj.weight": (width, width),
        "self_attn.out_proj.bias": (width,),
        "linear1.weight": (hidden, width),
        "linear1.bias": (hidden,),
        "linear2.weight": (width, hidden),
        "linear2.bias": (width,),
        **{f"norm{i}.{part}": (width,) for i in (1, 2) for part in ("weight", "bias")},
    }


def all_parameter_shapes(layers: Iterable[Layer], shape: Shape) -> Shapes:
    """Shapes of the parameters of a whole list of layers, by name and in order."""
    return {k: v for layer, input_shape in walk(layers, shape) for k, v in parameter_shapes(layer, input_shape).items()}


def walk(layers: Iterable[Layer], shape: Shape) -> Iterator[tuple[Layer, Shape]]:
    """Every layer with the shape of its input; raises DoesNotFit at the first layer that cannot take it."""
    for layer in layers:
        following = output_shape(layer, shape)
        yield layer, shape
        shape = following


def through(layers: Iterable[Layer], shape: Shape) -> Shape:
    """Shape of the last layer's output."""
    for layer in layers:
        shape = output_shape(layer, shape)
    return shape


def _windows(name: str, shape: Shape, kernel: int, stride: int, padding: int) -> Shape:
    sides = tuple((side + 2 * padding - kernel) // stride + 1 for side in shape[1:])
    if any(side < 1 for side in sides):
        raise DoesNotFit(f"{name} (window {kernel}) does not fit into what reaches it, of shape {shape}")
    return sides


def _need(holds: bool, name: str, shape: Shape, wanted: str) -> None:
    if not holds:
        raise DoesNotFit(f"{name} takes inputs of shape {wanted}, not {shape}")
