"""Flags by which a class says something of its own code, such as `common`, and when they count.

A class inherits its base's flags, and may replace the code that they speak of. Then they say nothing until it says them again.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

_ANY_NAME = ("__getattribute__", "__getattr__")
"""Functions by which a class may replace all the others."""


def speaks_for(owner: object, flag: str, *parts: str) -> bool:
    """Whether a flag is true and was said of the code that runs.

    It counts where the class that declares it is at or below, in the method resolution order, each class that defines one of
    the parts, or anything else of the class that their code names. A flag that only the instance has is one of the class whose
    `__init__` it has.

    Args:
        parts: attributes that the flag speaks of; those that do not exist are left out.
    """
    if not getattr(owner, flag, False):
        return False
    kind, own = type(owner), getattr(owner, "__dict__", {})
    declared = _place(kind, flag)
    if math.isinf(declared) and flag in own:
        declared = _place(kind, "__init__")
    if math.isinf(declared) or _replaced(kind, own, parts):
        return False
    return declared <= min(_place(kind, name) for name in _reached(kind, parts))


def _replaced(kind: type, own: dict[str, Any], parts: tuple[str, ...]) -> bool:
    """Whether the instance has a function of its own in the place of one of its class."""
    hidden = own.keys() & {name for one in kind.__mro__ for name, part in vars(one).items() if isinstance(part, FunctionType)}
    return bool(hidden & (_reached(kind, parts) | set(parts)))


def _place(kind: type, name: str) -> float:
    """How far up the first class is that defines or annotates that attribute; infinite where none does."""
    return next((i for i, one in enumerate(kind.__mro__) if name in vars(one) or name in inspect.get_annotations(one)), math.inf)


def _reached(kind: type, parts: tuple[str, ...]) -> set[str]:
    """The parts, and what their code names of the class, and that code in turn; no fields, which are data."""
    fields = {*getattr(kind, "__dataclass_fields__", ()), *getattr(kind, "model_fields", ())} - {*parts}
    found, waiting = set[str](), [*parts, *_ANY_NAME]
    while waiting:
        name = waiting.pop()
        defined = [vars(one)[name] for one in kind.__mro__ if name in vars(one)]
        if name not in found and (defined or name in parts) and name not in fields:
            found.add(name)
            waiting += [inner for part in defined for code in _codes(part) for inner in _names(code)]
    return found


def _codes(part: Any) -> Iterator[CodeType]:
    """The code of a function, a method or a property."""
    part = getattr(part, "__func__", getattr(part, "fget", getattr(part, "func", part)))
    while callable(part):
        if isinstance(part, FunctionType):
            yield part.__code__
        part = getattr(part, "__wrapped__", None)


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Names that code uses, with the functions inside it; none with two underscores, which every class has."""
    inner = [_names(one) for one in code.co_consts if isinstance(one, CodeType)]
    return frozenset(name for name in code.co_names if not name.startswith("__")).union(*inner)


__all__ = ["speaks_for"]
