"""Models of one's own: a function or a class that makes an nn.Module, its options, and how it is called."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from fedveil.errors import ConfigError, nearest, refusal
from fedveil.models.model_registry import MODELS
from fedveil.models.parts import KEYS
from fedveil.registry import Registry

if TYPE_CHECKING:
    from torch import nn

Make = TypeVar("Make", bound=Callable[..., Any])
_ASKED = ("input_shape", "outputs")


@dataclass(frozen=True)
class OwnModel:
    """What makes a model: a function or class, and the pydantic model of its options where it has one."""

    make: Callable[..., Any]
    options: type[BaseModel] | None = None


OWN_MODELS: Registry[OwnModel] = Registry("model.name", "model", {})


def register_model(name: str, options: type[BaseModel] | None = None) -> Callable[[Make], Make]:
    """Make a model of one's own known by its name: a decorator of a function that makes an nn.Module, or of its class.

    It is called with its options as keywords, and with `input_shape` and `outputs` if it has arguments of these names.

    Args:
        options: pydantic model of the options; left out, they are the arguments, checked by their annotations.

    Raises:
        ConfigError: no name, or one that another model has; options with the name of a key of the section `model`.
    """
    if not isinstance(name, str) or not name or ":" in name:
        raise ConfigError('register_model needs the name of the model, without a colon: @register_model("my-net")')

    def decorate(make: Make) -> Make:
        if name in MODELS:
            raise ConfigError(f"the name {name!r} of {make.__qualname__} belongs to a model of fedveil: choose another")
        if reserved := sorted({*KEYS} & {*(_arguments(make) if options is None else options.model_fields)}):
            raise ConfigError(f"{make.__qualname__}: {', '.join(reserved)} are keys of the section model: rename these options")
        OWN_MODELS.add(name, OwnModel(make, options), make)
        return make

    return decorate


def made(own: OwnModel, options: Mapping[str, Any], input_shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """What the function or class makes, with torch's random numbers from `seed`; their global state is put back.

    Raises:
        ConfigError: unknown, missing or impossible option; or what it makes is no nn.Module.
    """
    import torch

    arguments = _checked(own, options)
    asked = {"input_shape": input_shape, "outputs": outputs}
    arguments |= {name: value for name, value in asked.items() if name in inspect.signature(own.make).parameters}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        found = own.make(**arguments)
    if not isinstance(found, torch.nn.Module):
        raise ConfigError(f"model: {_title(own.make)} makes a {type(found).__name__}: it must make a torch.nn.Module")
    return found


def _checked(own: OwnModel, options: Mapping[str, Any]) -> dict[str, Any]:
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
    """The arguments that are options."""
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {name: p for name, p in inspect.signature(make).parameters.items() if p.kind in named and name not in _ASKED}


def _hints(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(make.__init__ if inspect.isclass(make) else make)
    except (NameError, TypeError):  # annotations of names that only a type checker imports
        return {}


def _title(make: Callable[..., Any]) -> str:
    return f"{make.__module__}.{make.__qualname__}" if hasattr(make, "__qualname__") else type(make).__name__
