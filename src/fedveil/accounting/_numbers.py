"""Checks of arguments and root finding, shared by the theorems."""

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
    """Run a function under numpy's default floating-point error handling, regardless of the caller's `np.seterr`."""

    @wraps(function)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with np.errstate(all="warn", under="ignore"):
            return function(*args, **kwargs)

    return wrapper


def non_negative(name: str, value: float) -> float:
    """Return `value` if it is finite and >= 0; raise ConfigError otherwise."""
    if not (value >= 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be finite and >= 0, got {value}")
    return float(value)


def positive(name: str, value: float) -> float:
    """Return `value` if it is finite and > 0; raise ConfigError otherwise."""
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name} must be finite and > 0, got {value}")
    return float(value)


def probability(name: str, value: float) -> float:
    """Return `value` if it lies in [0, 1]; raise ConfigError otherwise."""
    if not 0 <= value <= 1:
        raise ConfigError(f"{name} must lie in [0, 1], got {value}")
    return float(value)


def open_probability(name: str, value: float) -> float:
    """Return `value` if it lies in (0, 1); raise ConfigError otherwise."""
    if not 0 < value < 1:
        raise ConfigError(f"{name} must lie strictly between 0 and 1, got {value}")
    return float(value)


def at_least(name: str, value: int, least: int) -> int:
    """Return `value` if it is an integer >= `least`; raise ConfigError otherwise."""
    if value != int(value) or value < least:
        raise ConfigError(f"{name} must be an integer >= {least}, got {value}")
    return int(value)


def vector(name: str, values: Sequence[float] | NDArray[np.float64], *, finite: bool = True) -> NDArray[np.float64]:
    """Return `values` as a non-empty 1-d array of numbers >= 0 (inf only with `finite=False`); raise ConfigError otherwise."""
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or array.size == 0:
        raise ConfigError(f"{name} must be a non-empty list of numbers, got shape {array.shape}")
    allowed = (array >= 0) & (np.isfinite(array) | (not finite))
    if not allowed.all():
        raise ConfigError(f"{name} must hold {'finite ' * finite}numbers >= 0, got {array[~allowed][:3].tolist()}")
    return array


def least_below(curve: Callable[[float], float], target: float, high: float) -> float:
    """Return the least argument in [0, high] where a decreasing curve is <= target, rounded up by at most 1e-13 relatively."""
    low = 0.0
    if curve(low) <= target:
        return low
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > target else (low, middle)
    return high


def crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """Return the sign change of a monotone `f` in [low, high], to the last bit, by regula falsi (Illinois) and bisection."""
    at_low, at_high = f(low), f(high)
    for turn in range(400):
        middle = low + (high - low) / 2
        if not low < middle < high or at_low == 0:
            return low if at_low == 0 else high
        if turn % 3 and at_low != at_high:
            guess = low + (high - low) * (at_low / (at_low - at_high))
            middle = guess if low < guess < high else middle
        value = f(middle)
        if value == 0:
            return middle
        if (value > 0) == (at_low > 0):
            low, at_low, at_high = middle, value, at_high / 2
        else:
            high, at_high, at_low = middle, value, at_low / 2
    return high
