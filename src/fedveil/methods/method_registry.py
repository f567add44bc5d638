"""Methods by name: built-in methods from the table, and user-defined methods registered by plugins."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from pydantic import ValidationError

from fedveil.errors import ConfigError, refusal
from fedveil.methods.base import Method, MethodConfig
from fedveil.methods.method_table import METHOD_TABLE
from fedveil.registry import Registry

Kind = TypeVar("Kind", bound=MethodConfig)

METHODS: Registry[type[MethodConfig]] = Registry(
    "method.name", "method", METHOD_TABLE, "a method of your own needs its file in run.plugins"
)


def register(kind: type[Kind]) -> type[Kind]:
    """Register a user-defined method by its name; a decorator of its configuration class.

    Raises:
        ConfigError: a part of `Method` is missing, or the name is taken.
    """
    parts = [part for part in vars(Method) if not part.startswith("_")]
    missing = [part for part in parts if not hasattr(kind, part) and part not in kind.model_fields]
    if kind.release is MethodConfig.release:
        missing.append("release")
    name = kind.model_fields["name"].default if "name" in kind.model_fields else None
    if missing or not isinstance(name, str):
        lacks = ", ".join(missing) or 'name: Literal["..."] = "..."'
        raise ConfigError(f"{kind.__qualname__} is not a method yet: it lacks {lacks} (see fedveil.methods.base.Method)")
    METHODS.add(name, kind, kind)
    return kind


def method_from(options: dict[str, Any]) -> Method:
    """Return the method that `options` describe: `name`, and the parameters of that method.

    Raises:
        ConfigError: unknown name or parameter, or an invalid value.
    """
    kind = METHODS.find(str(options.get("name")))
    try:
        method: Method = kind(**options)
    except ValidationError as error:
        raise refusal(error, kind, "method.") from None
    return method


def description(name: str) -> str:
    """Return a method's docstring, its reconstructed parts, and its parameters with their defaults."""
    kind = METHODS.find(name)
    defaults = "\n".join(f"  {key} = {_default(kind, key)}" for key in kind.model_fields if key != "name")
    rebuilt = f"\n\nReconstructed, not read in a source: {kind.reconstructed}." if kind.reconstructed else ""
    return f"{name}: {inspect.getdoc(kind)}{rebuilt}\n\nDefaults:\n{defaults}"


def _default(kind: type[MethodConfig], key: str) -> str:
    """Return a parameter's default, and that of the published variant if it differs."""
    default = kind.model_fields[key].default
    return f"{kind.proven_defaults[key]!r} (published: {default!r})" if key in kind.proven_defaults else repr(default)
