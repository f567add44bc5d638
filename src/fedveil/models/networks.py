"""The networks, each as its options (what a configuration may set) and the list of its layers.

Sizes that a paper does not state are marked so in docs/models.md; the defaults here are then ours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedveil.models.layers import (
    Act,
    Activation,
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
)

Size = Annotated[int, Field(gt=0, strict=True)]
Layers = tuple[Layer, ...]
_FROZEN = ConfigDict(frozen=True, extra="forbid")


def stage(conv: Conv, activation: Activation = "relu", pool: Literal["max", "avg"] = "max", size: int = 2) -> Layers:
    """Convolution, activation, pooling.

    ReLU runs after max-pooling: the same values and gradients, on a quarter of the coordinates.
    """
    if activation == "relu" and pool == "max":
        return conv, Pool(pool, size), Act(activation)
    return conv, Act(activation), Pool(pool, size)


def head(hidden: Iterable[int], classes: int, activation: Activation = "relu") -> Layers:
    """Flatten, then fully connected layers fc1, fc2, ... of which the last has no activation."""
    widths = tuple(hidden)
    body = tuple(layer for i, width in enumerate(widths, 1) for layer in (Linear(f"fc{i}", width), Act(activation)))
    return Flatten(), *body, Linear(f"fc{len(widths) + 1}", classes)


class LinearOptions(BaseModel):
    """Options of `linear`. start: `zero` begins with the same score for each class, which suits a convex loss."""

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
    """LeNet-5 (LeCun et al. 1998) as it is used today: two 5x5 convolutions with pooling, three fully connected layers."""
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
    training mode). groups: groups of the group normalisation, must divide 64.
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
    """Two convolutions over time with pooling, an LSTM over what is left, one linear layer from its last state."""
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
