"""The built-in networks as lists of layers: every parameter's name and shape without torch.

`fedveil.models.modules` turns the same lists into torch modules, so each network has a single description.
Shapes omit the batch: (channels, height, width), (channels, length) or (features,).

docs/models.md marks the sizes that a paper does not state; their defaults are fedveil's choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedveil.errors import ConfigError

Shape = tuple[int, ...]
Shapes = dict[str, Shape]
Activation = Literal["relu", "sigmoid", "tanh", "softplus"]


class DoesNotFit(ConfigError):
    """Raised for an input shape that a network cannot take."""


@dataclass(frozen=True)
class Conv:
    """Convolution over the one or two spatial dimensions of the input."""

    name: str
    out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    bias: bool = True


@dataclass(frozen=True)
class Linear:
    """Fully connected layer; `zero` initialises it with zeros."""

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
    """Learned positions, `depth` pre-norm transformer blocks and a layer norm over a grid of tokens, averaged over tokens."""

    name: str
    depth: int
    heads: int
    hidden: int


@dataclass(frozen=True)
class Act:
    """Elementwise activation."""

    kind: Activation = "relu"


@dataclass(frozen=True)
class Pool:
    """Pooling over non-overlapping windows of `size`; an incomplete window at the end is dropped."""

    kind: Literal["max", "avg"] = "max"
    size: int = 2


@dataclass(frozen=True)
class GlobalAverage:
    """Mean of each channel."""


@dataclass(frozen=True)
class Flatten:
    """Flattening to one dimension."""


@dataclass(frozen=True)
class Residual:
    """Residual block, body(x) + shortcut(x); an empty shortcut is the identity."""

    name: str
    body: tuple[Layer, ...]
    shortcut: tuple[Layer, ...] = ()


Layer = Conv | Linear | Norm | Lstm | Transformer | Act | Pool | GlobalAverage | Flatten | Residual


def _output_shape(layer: Layer, shape: Shape) -> Shape:
    """Return the shape of `layer`'s output for an input of `shape`, both without the batch.

    Raises DoesNotFit if the layer cannot take that input.
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


def _parameter_shapes(layer: Layer, shape: Shape) -> Shapes:
    """Return the shapes of `layer`'s parameters, by name, in the order of torch's `named_parameters()`."""
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
            parameters = {"positions.weight": (math.prod(shape[1:]), shape[0])} | blocks | around
            return {f"{layer.name}.{k}": v for k, v in parameters.items()}
        case Residual():
            body = {f"{layer.name}.body.{k}": v for k, v in all_parameter_shapes(layer.body, shape).items()}
            shortcut = {f"{layer.name}.shortcut.{k}": v for k, v in all_parameter_shapes(layer.shortcut, shape).items()}
            return body | shortcut
        case Act() | Pool() | GlobalAverage() | Flatten():
            return {}


def _block_shapes(width: int, hidden: int) -> Shapes:
    """Return the parameter shapes of one `nn.TransformerEncoderLayer`."""
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
    """Return the parameter shapes of a list of layers, by name and in order."""
    return {k: v for layer, input_shape in walk(layers, shape) for k, v in _parameter_shapes(layer, input_shape).items()}


def walk(layers: Iterable[Layer], shape: Shape) -> Iterator[tuple[Layer, Shape]]:
    """Yield every layer with the shape of its input; raise DoesNotFit at the first layer that cannot take it."""
    for layer in layers:
        following = _output_shape(layer, shape)
        yield layer, shape
        shape = following


def through(layers: Iterable[Layer], shape: Shape) -> Shape:
    """Return the shape of the last layer's output."""
    for layer in layers:
        shape = _output_shape(layer, shape)
    return shape


def _windows(name: str, shape: Shape, kernel: int, stride: int, padding: int) -> Shape:
    sides = tuple((side + 2 * padding - kernel) // stride + 1 for side in shape[1:])
    if any(side < 1 for side in sides):
        raise DoesNotFit(f"{name} (window {kernel}) does not fit into what reaches it, of shape {shape}")
    return sides


def _need(holds: bool, name: str, shape: Shape, wanted: str) -> None:
    if not holds:
        raise DoesNotFit(f"{name} takes inputs of shape {wanted}, not {shape}")


Size = Annotated[int, Field(gt=0, strict=True)]
Layers = tuple[Layer, ...]
_FROZEN = ConfigDict(frozen=True, extra="forbid")


def stage(conv: Conv, activation: Activation = "relu", pool: Literal["max", "avg"] = "max", size: int = 2) -> Layers:
    """Return convolution, activation and pooling.

    ReLU runs after max-pooling, with the same values and gradients on a quarter of the coordinates.
    """
    if activation == "relu" and pool == "max":
        return conv, Pool(pool, size), Act(activation)
    return conv, Act(activation), Pool(pool, size)


def head(hidden: Iterable[int], classes: int, activation: Activation = "relu") -> Layers:
    """Return a flattening and fully connected layers fc1, fc2, ...; the last has no activation."""
    widths = tuple(hidden)
    body = tuple(layer for i, width in enumerate(widths, 1) for layer in (Linear(f"fc{i}", width), Act(activation)))
    return Flatten(), *body, Linear(f"fc{len(widths) + 1}", classes)


class LinearOptions(BaseModel):
    """Options of `linear`. start: `zero` starts with equal scores for all classes, which suits a convex loss."""

    model_config = _FROZEN
    start: Literal["random", "zero"] = "random"


def linear(shape: Shape, classes: int, options: LinearOptions) -> Layers:
    """Softmax regression."""
    return Flatten(), Linear("fc1", classes, zero=options.start == "zero")


class MlpOptions(BaseModel):
    """Options of `mlp`; the default is the 2NN of McMahan et al. 2017 (199,210 parameters on 28x28 and 10 classes)."""

    model_config = _FROZEN
    hidden: tuple[Size, ...] = (200, 200)
    activation: Activation = "relu"


def mlp(shape: Shape, classes: int, options: MlpOptions) -> Layers:
    """Fully connected network."""
    return head(options.hidden, classes, options.activation)


class Lenet5Options(BaseModel):
    """Options of `lenet5`.

    padding: pixels added around the input before the first convolution; None means 2 for sides below 32 (28x28 becomes
    LeCun's 32x32; 61,706 parameters on 28x28x1) and 0 otherwise (62,006 on 32x32x3); 0 on 28x28x1 gives 44,426.
    """

    model_config = _FROZEN
    padding: Literal[0, 2] | None = None
    activation: Activation = "relu"
    pool: Literal["max", "avg"] = "max"


def lenet5(shape: Shape, classes: int, options: Lenet5Options) -> Layers:
    """LeNet-5 (LeCun et al. 1998) in its modern form: two 5x5 convolutions with pooling, three fully connected layers."""
    padding = options.padding
    if padding is None:
        padding = 2 if min(shape[1:], default=0) < 32 else 0
    first, second = Conv("conv1", 6, 5, padding=padding), Conv("conv2", 16, 5)
    body = (*stage(first, options.activation, options.pool), *stage(second, options.activation, options.pool))
    return *body, *head((120, 84), classes, options.activation)


class LenetDlgOptions(BaseModel):
    """Options of `lenet-dlg`."""

    model_config = _FROZEN
    activation: Activation = "sigmoid"


def lenet_dlg(shape: Shape, classes: int, options: LenetDlgOptions) -> Layers:
    """The LeNet of gradient inversion (Zhu et al. 2019): three 5x5 convolutions of 12 channels, one linear layer."""
    convs = [Conv(f"conv{i}", 12, 5, stride=stride, padding=2) for i, stride in enumerate((2, 2, 1), 1)]
    return *(layer for conv in convs for layer in (conv, Act(options.activation))), *head((), classes)


class Cnn2Options(BaseModel):
    """Options of `cnn2`; channels (32, 64), hidden 512: the CNN of McMahan et al. 2017 (1,663,370 parameters on 28x28x1)."""

    model_config = _FROZEN
    channels: tuple[Size, Size] = (16, 32)
    hidden: Size = 128
    activation: Activation = "relu"
    pool: Literal["max", "avg"] = "max"


def cnn2(shape: Shape, classes: int, options: Cnn2Options) -> Layers:
    """Two 5x5 same-padded convolutions with pooling, two fully connected layers."""
    convs = (Conv(f"conv{i}", out, 5, padding=2) for i, out in enumerate(options.channels, 1))
    body = tuple(layer for conv in convs for layer in stage(conv, options.activation, options.pool))
    return *body, *head((options.hidden,), classes, options.activation)


class Cnn3Options(BaseModel):
    """Options of `cnn3`."""

    model_config = _FROZEN
    channels: tuple[Size, Size, Size] = (32, 64, 64)
    hidden: tuple[Size, Size] = (128, 64)
    activation: Activation = "relu"
    pool: Literal["max", "avg"] = "max"


def cnn3(shape: Shape, classes: int, options: Cnn3Options) -> Layers:
    """Three 3x3 same-padded convolutions with pooling, three fully connected layers."""
    convs = (Conv(f"conv{i}", out, 3, padding=1) for i, out in enumerate(options.channels, 1))
    body = tuple(layer for conv in convs for layer in stage(conv, options.activation, options.pool))
    return *body, *head(options.hidden, classes, options.activation)


class ResnetOptions(BaseModel):
    """Options of the ResNets.

    norm: "group" (default; no statistics) or "batch" (running statistics are buffers, and batches of one example fail in
    training mode). groups: number of groups of the group normalisation, a divisor of 64.
    """

    model_config = _FROZEN
    norm: Literal["group", "batch"] = "group"
    groups: Size = 32


def resnet18(shape: Shape, classes: int, options: ResnetOptions) -> Layers:
    """ResNet-18 (He et al. 2016) in its CIFAR form: 3x3 stem, no pooling after it."""
    return _resnet((2, 2, 2, 2), False, classes, options)


def resnet34(shape: Shape, classes: int, options: ResnetOptions) -> Layers:
    """ResNet-34 in its CIFAR form."""
    return _resnet((3, 4, 6, 3), False, classes, options)


def resnet152(shape: Shape, classes: int, options: ResnetOptions) -> Layers:
    """ResNet-152 in its CIFAR form, with bottleneck blocks."""
    return _resnet((3, 8, 36, 3), True, classes, options)


def _resnet(depths: tuple[int, ...], bottleneck: bool, classes: int, options: ResnetOptions) -> Layers:
    def conv(i: int, out: int, kernel: int, stride: int = 1) -> Layers:
        return Conv(f"conv{i}", out, kernel, stride, kernel // 2, bias=False), Norm(f"norm{i}", options.norm, options.groups)

    def block(name: str, channels: int, width: int, stride: int) -> Residual:
        if bottleneck:
            out = 4 * width
            body = (*conv(1, width, 1), Act(), *conv(2, width, 3, stride), Act(), *conv(3, out, 1))
        else:
            out = width
            body = (*conv(1, width, 3, stride), Act(), *conv(2, width, 3))
        return Residual(name, body, () if stride == 1 and channels == out else conv(1, out, 1, stride))

    layers: list[Layer] = [*conv(1, 64, 3), Act()]
    channels = 64
    for level, depth in enumerate(depths):
        width = 64 * 2**level
        for i in range(depth):
            layers += [block(f"block{level + 1}_{i + 1}", channels, width, 2 if level and not i else 1), Act()]
            channels = 4 * width if bottleneck else width
    return *layers, GlobalAverage(), Linear("fc", classes)


class CnnLstmOptions(BaseModel):
    """Options of `cnn-lstm`."""

    model_config = _FROZEN
    channels: tuple[Size, Size] = (32, 64)
    hidden: Size = 64


def cnn_lstm(shape: Shape, classes: int, options: CnnLstmOptions) -> Layers:
    """Two convolutions over time with pooling, an LSTM over their output, one linear layer from its last state."""
    convs = (Conv(f"conv{i}", out, 5, padding=2) for i, out in enumerate(options.channels, 1))
    return *(layer for conv in convs for layer in stage(conv)), Lstm("lstm", options.hidden), Linear("fc", classes)


class VitOptions(BaseModel):
    """Options of `vit-small`; patch 4 turns 32x32 pixels into 64 tokens.

    hidden: width inside each block's two linear layers; None means 4 times `width`.
    """

    model_config = _FROZEN
    patch: Size = 4
    width: Size = 384
    depth: Annotated[int, Field(gt=0, le=1000, strict=True)] = 12
    heads: Size = 6
    hidden: Size | None = None


def vit_small(shape: Shape, classes: int, options: VitOptions) -> Layers:
    """ViT-Small (Touvron et al. 2021) for small images: patches as tokens, layer norm only, the mean of all tokens."""
    patches = Conv("patches", options.width, options.patch, options.patch)
    blocks = Transformer("transformer", options.depth, options.heads, options.hidden or 4 * options.width)
    return patches, blocks, Linear("fc", classes)
