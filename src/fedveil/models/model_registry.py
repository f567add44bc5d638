"""Names of the networks, their sizes without torch, and how to build them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from fedveil.errors import ConfigError, nearest
from fedveil.models import networks as net
from fedveil.models.layers import DoesNotFit, Layer, Shape, Shapes, all_parameter_shapes
from fedveil.registry import Registry

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelKind:
    """A network: one line about it, its options, and its layers from (input shape, classes, options)."""

    summary: str
    options: type[BaseModel]
    layers: Callable[[Shape, int, Any], tuple[Layer, ...]]


_KINDS = {
    "linear": ModelKind("softmax regression; takes any input", net.LinearOptions, net.linear),
    "mlp": ModelKind("fully connected network; takes any input", net.MlpOptions, net.mlp),
    "lenet5": ModelKind("LeNet-5, ReLU and max-pooling by default", net.Lenet5Options, net.lenet5),
    "lenet-dlg": ModelKind("the small sigmoid LeNet of gradient inversion attacks", net.LenetDlgOptions, net.lenet_dlg),
    "cnn2": ModelKind("2 convolutions, 2 fully connected layers", net.Cnn2Options, net.cnn2),
    "cnn3": ModelKind("3 convolutions, 3 fully connected layers", net.Cnn3Options, net.cnn3),
    "resnet18": ModelKind("ResNet-18 for small images, group normalisation by default", net.ResnetOptions, net.resnet18),
    "resnet34": ModelKind("ResNet-34 for small images, group normalisation by default", net.ResnetOptions, net.resnet34),
    "resnet152": ModelKind("ResNet-152 for small images, group normalisation by default", net.ResnetOptions, net.resnet152),
    "vit-small": ModelKind("ViT-Small for small images: patches, 12 transformer blocks", net.VitOptions, net.vit_small),
    "cnn-lstm": ModelKind("2 convolutions and an LSTM, for signals (channels, length)", net.CnnLstmOptions, net.cnn_lstm),
}
MODELS: Registry[ModelKind] = Registry("model.name", "model", _KINDS)


def names() -> list[str]:
    """The names of all networks, in the order of the registry."""
    return list(MODELS)


def options_model(name: str) -> type[BaseModel]:
    """The options of network `name` as a frozen pydantic model that refuses unknown keys.

    Raises ConfigError for an unknown name.
    """
    return MODELS.find(name).options


def shapes(name: str, input_shape: Shape, classes: int, **options: Any) -> Shapes:
    """Shapes of the parameters of a network by name, in the order of `named_parameters()`; needs no torch.

    input_shape: one example, without the batch: (channels, height, width), (channels, length) or (features,).
    classes: width of the last layer, such as the number of classes; at least 1. options: those of `options_model(name)`.
    Raises ConfigError for an unknown name or option, an impossible value, or an input the network cannot take.
    """
    return all_parameter_shapes(_layers(name, input_shape, classes, options), tuple(input_shape))


def size(name: str, input_shape: Shape, classes: int, **options: Any) -> int:
    """Number of parameters of a network; arguments and errors as `shapes`."""
    return sum(math.prod(shape) for shape in shapes(name, input_shape, classes, **options).values())


def build(name: str, input_shape: Shape, classes: int, seed: int, **options: Any) -> nn.Sequential:
    """A network in float32, initialised as torch does by default but from `seed` alone; global random state is untouched.

    The network takes (batch, *input_shape) and returns logits (batch, classes); its last layer is the classifier, so
    `model[:-1]` computes the features. seed: integer from 0 to 2**63 - 1. Other arguments and errors as `shapes`.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ConfigError(f"seed is {seed!r}; give an integer from 0 to 2**63 - 1")
    layers = _layers(name, input_shape, classes, options)
    from fedveil.models import modules

    return modules.initialised(layers, tuple(input_shape), seed)


def _layers(name: str, input_shape: Shape, classes: int, options: dict[str, Any]) -> tuple[Layer, ...]:
    entry = MODELS.find(name)
    if not input_shape or any(isinstance(side, bool) or not isinstance(side, int) or side < 1 for side in input_shape):
        raise ConfigError(f"input_shape is {input_shape!r}; give positive integers such as (1, 28, 28), (9, 128) or (561,)")
    if isinstance(classes, bool) or not isinstance(classes, int) or classes < 1:
        raise ConfigError(f"classes is {classes!r}; give an integer of at least 1")
    layers = entry.layers(tuple(input_shape), classes, _checked(name, entry.options, options))
    try:
        all_parameter_shapes(layers, tuple(input_shape))
    except DoesNotFit as error:
        fitting = ", ".join(other for other in MODELS if _fits(other, tuple(input_shape), classes))
        raise DoesNotFit(
            f"{name} cannot take inputs of shape {tuple(input_shape)}: {error}; models that can: {fitting}"
        ) from None
    return layers


def _fits(name: str, input_shape: Shape, classes: int) -> bool:
    entry = MODELS[name]
    try:
        all_parameter_shapes(entry.layers(input_shape, classes, entry.options()), input_shape)
    except DoesNotFit:
        return False
    return True


def _checked(name: str, model: type[BaseModel], options: dict[str, Any]) -> BaseModel:
    for key in options:
        if key not in model.model_fields:
            allowed = ", ".join(model.model_fields)
            raise ConfigError(f"model {name} has no option {key!r}{nearest(key, model.model_fields)}; it takes {allowed}")
    try:
        return model(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"][:1])
        raise ConfigError(f"model {name}: {key} = {options.get(key)!r} is not possible: {first['msg'].lower()}") from None
