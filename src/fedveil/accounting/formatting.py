"""Numbers as text: the one place that says how many digits an epsilon or a percentage has."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number(value: float, digits: int = 4) -> str:
    """A number in so many significant digits; an epsilon is only ever shown beside its unit, adjacency, view and delta."""
    return f"{value:.{digits}g}"


def epsilon(value: float, unbounded: str = "inf") -> str:
    """An epsilon in four digits, or the word for one that is not bounded."""
    return unbounded if math.isinf(value) else number(value)


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
