"""Networks by name, built-in and user-defined: their options, sizes and builders."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedveil.errors import ConfigError, nearest, refusal
from fedveil.models import networks as net
from fedveil.models.networks import DoesNotFit, Layer, Shape, Shapes, all_parameter_shapes
from fedveil.models.parts import KEYS
from fedveil.registry import Registry

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class ModelKind:
    """Built-in network: a summary, its options, and a function from (input shape, classes, options) to layers."""

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
MODELS: Registry[ModelKind] = Registry("model.name", "model", _KINDS, kind="built-in model")


def names() -> list[str]:
    """Return the names of all built-in networks, in registry order."""
    return list(MODELS)


def options_model(name: str) -> type[BaseModel]:
    """Return the options of network `name` as a frozen pydantic model that refuses unknown keys.

    Raises ConfigError for an unknown name.
    """
    return MODELS.find(name).options


def shapes(name: str, input_shape: Shape, classes: int, **options: Any) -> Shapes:
    """Return the parameter shapes of a network by name, in the order of `named_parameters()`, without torch.

    input_shape: of one example: (channels, height, width), (channels, length) or (features,).
    classes: width of the last layer, such as the number of classes; at least 1. options: those of `options_model(name)`.
    Raises ConfigError for an unknown name or option, an invalid value, or an input that the network cannot take.
    """
    return all_parameter_shapes(_layers(name, input_shape, classes, options), tuple(input_shape))


def size(name: str, input_shape: Shape, classes: int, **options: Any) -> int:
    """Return the number of parameters of a network; arguments and errors as in `shapes`."""
    return sum(math.prod(shape) for shape in shapes(name, input_shape, classes, **options).values())


def build(name: str, input_shape: Shape, classes: int, seed: int, **options: Any) -> nn.Sequential:
    """Build a network in float32 with torch's default initialisation from `seed`, without changing global random state.

    The network takes (batch, *input_shape) and returns logits (batch, classes); its last layer is the classifier, so
    `model[:-1]` computes the features. seed: integer from 0 to 2**63 - 1. Other arguments and errors as in `shapes`.
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


Make = TypeVar("Make", bound=Callable[..., Any])
_PASSED_IF_NAMED = ("input_shape", "outputs")


@dataclass(frozen=True)
class UserModel:
    """User-defined model: a function or class that makes it, and the pydantic model of its options, if any."""

    make: Callable[..., Any]
    options: type[BaseModel] | None = None


OWN_MODELS: Registry[UserModel] = Registry("model.name", "model", {}, "a model of your own needs its file in run.plugins")


def register_model(name: str, options: type[BaseModel] | None = None) -> Callable[[Make], Make]:
    """Register a user-defined model by its name; a decorator of a module class, or of a function that makes an nn.Module.

    It is called with its options as keywords, and with `input_shape` and `outputs` if it has arguments of these names.

    Args:
        options: pydantic model of the options; by default they are the arguments, checked by their annotations.

    Raises:
        ConfigError: a missing or taken name, or options with the name of a key of the section `model`.
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise ConfigError('register_model needs the name of the model, without a colon: @register_model("my-net")')

    def decorate(make: Make) -> Make:
        if name in MODELS:
            raise ConfigError(f"the name {name!r} of {make.__qualname__} belongs to a model of fedveil: choose another")
        if reserved := sorted({*KEYS} & {*(_arguments(make) if options is None else options.model_fields)}):
            raise ConfigError(f"{make.__qualname__}: {', '.join(reserved)} are keys of the section model: rename these options")
        OWN_MODELS.add(name, UserModel(make, options), make)
        return make

    return decorate


def made(own: UserModel, options: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """Make a user-defined model with torch's random numbers from `seed`, restoring their global state.

    Raises:
        ConfigError: an unknown, missing or invalid option; or the result is not an nn.Module.
    """
    import torch

    arguments = _checked_own(own, options)
    requested = {"input_shape": input_shape, "outputs": outputs}
    arguments |= {name: value for name, value in requested.items() if name in inspect.signature(own.make).parameters}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        module = own.make(**arguments)
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"model: {_title(own.make)} makes a {type(module).__name__}: it must make a torch.nn.Module")
    return module


def _checked_own(own: UserModel, options: Mapping[str, Any]) -> dict[str, Any]:
    if own.options is not None:
        try:
            return dict(own.options(**options))
        except ValidationError as error:
            raise refusal(error, own.options, "model.") from None
    arguments, hints = _arguments(own.make), _hints(own.make)
    anything = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(own.make).parameters.values())
    for key in options:
        if key not in arguments and not anything:
            allowed = f"it takes {', '.join(arguments)}" if arguments else "it takes none"
            raise ConfigError(f"model.{key}: {_title(own.make)} has no option {key!r}{nearest(key, arguments)}; {allowed}")
    missing = [key for key, p in arguments.items() if p.default is p.empty and key not in options]
    if missing:
        raise ConfigError(f"model.{missing[0]}: {_title(own.make)} needs {', '.join(missing)}: give them in the section model")
    return {key: _typed(key, value, hints.get(key, Any)) for key, value in options.items()}


def _typed(key: str, value: Any, hint: Any) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"model.{key} = {value!r} is not possible: {message[0].lower()}{message[1:]}") from None


def _arguments(make: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments that are options."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(make).parameters.items() if p.kind in named and name not in _PASSED_IF_NAMED}


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(make.__init__ if inspect.isclass(make) else make)
    except (NameError, TypeError):  # annotations with names imported only for type checking
        return {}


def _title(make: Callable[..., Any]) -> str:
    return f"{make.__module__}.{make.__qualname__}" if hasattr(make, "__qualname__") else type(make).__name__
