"""Root finding without scipy.optimize, whose import alone takes a quarter of what a privacy statement may."""

from __future__ import annotations

from collections.abc import Callable


def least_below(curve: Callable[[float], float], target: float, high: float) -> float:
    """The least argument in [0, high] at which the falling curve is at most the target, to 1e-13 of itself and from above."""
    low = 0.0
    if curve(low) <= target:
        return low
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > target else (low, middle)
    return high


def crossing(f: Callable[[float], float], low: float, high: float) -> float:
    """Where the monotone `f` changes sign in [low, high], to the last bit: regula falsi (Illinois) guarded by bisection."""
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
