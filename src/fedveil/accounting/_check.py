"""Shared by the theorems: NaN, infinite and out-of-range values are refused, never corrected; numpy computes by its defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def numpy_defaults(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function under numpy's default treatment of floating-point errors, whatever a program has set with `np.seterr`."""

    @wraps(function)
    def computed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with np.errstate(all="warn", under="ignore"):
            return function(*args, **kwargs)

    return computed


def non_negative(name: str, value: float) -> float:
    """`value` if it is finite and >= 0, else ConfigError."""
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be finite and >= 0, got {value}")
    return float(value)


def positive(name: str, value: float) -> float:
    """`value` if it is finite and > 0, else ConfigError."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be finite and > 0, got {value}")
    return float(value)


def probability(name: str, value: float) -> float:
    """`value` if it lies in [0, 1], else ConfigError."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must lie in [0, 1], got {value}")
    return float(value)


def open_probability(name: str, value: float) -> float:
    """`value` if it lies in (0, 1), else ConfigError."""
    if not 0 < value < 1:
        raise ConfigError(f"{name} must lie strictly between 0 and 1, got {value}")
    return float(value)


def at_least(name: str, value: int, least: int) -> int:
    """`value` if it is an integer >= `least`, else ConfigError."""
    if value != int(value) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {value}")
    return int(value)


def vector(name: str, values: Sequence[float] | NDArray[np.float64], *, finite: bool = True) -> NDArray[np.float64]:
    """`values` as a non-empty one-dimensional array of numbers >= 0, infinite ones only if not `finite`, else ConfigError."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ConfigError(f"{name} must be a non-empty list of numbers, got shape {array.shape}")
    allowed = (array >= 0) & (np.isfinite(array) | (not finite))
    if not allowed.all():
        raise ConfigError(f"{name} must hold {'finite ' * finite}numbers >= 0, got {array[~allowed][:3].tolist()}")
    return array
