"""Numbers as text: the one place that says how many digits an epsilon or a percentage has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal


def number(value: float, digits: int = 4) -> str:
    """A number to the nearest in so many significant digits; bounds are shown by `at_most` and `at_least`.

    An epsilon is only ever shown beside its unit, adjacency, view and delta.
    """
    return f"{value:.{digits}g}"


SLACK = 1e-9
"""What floating-point error may add to a bound, relatively, without moving its last printed digit: a target that is met shows."""


def at_most(value: float, digits: int = 4) -> str:
    """An upper bound, rounded up in its last digit."""
    return _rounded(value * (1 - SLACK), digits, ROUND_CEILING)


def at_least(value: float, digits: int = 4) -> str:
    """A lower bound, rounded down in its last digit."""
    return _rounded(value * (1 + SLACK), digits, ROUND_FLOOR)


def _rounded(value: float, digits: int, rounding: str) -> str:
    return number(float(Context(prec=digits, rounding=rounding).create_decimal(Decimal(value))), digits)


def epsilon(value: float, unbounded: str = "inf", shown: Callable[[float], str] = at_most) -> str:
    """An epsilon in four digits, or the word for one that is not bounded.

    Args:
        shown: `at_most` for what is proven or spent, `at_least` for what an audit found, `number` for what is claimed.
    """
    return unbounded if math.isinf(value) else shown(value)


def percent(share: float, digits: int = 1) -> str:
    """A share as a percentage; a dash where there is none."""
    return "–" if math.isnan(share) else f"{100 * share:.{digits}f} %"


def percent_at_most(share: float) -> str:
    """A share as a percentage, rounded up so that a bound stays a bound."""
    if share >= 1:
        return "100 %"
    digits = 1 if share < 0.999 else min(12, -math.floor(math.log10(100 * (1 - share)) + 1e-9))
    scale = 10**digits
    return f"{math.ceil(100 * share * scale - 1e-9) / scale:.{digits}f} %"


def percent_at_least(share: float) -> str:
    """A confidence as a percentage, rounded down: two decimals, or as many as tell it from certainty."""
    digits = 2 if not 0.9999 < share < 1 else math.ceil(-math.log10(100 * (1 - share)) - 1e-9)
    return f"{math.floor(100 * share * 10**digits + 1e-6) / 10**digits:.15g}%"


def joined(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
