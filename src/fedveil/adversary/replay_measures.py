"""What a replay measures of private contributions: their exact norms against what the plan declares, in integer arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.stats import binom

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.mechanism.plan import Plan
    from fedveil.release.release_layout import ReleaseLayout

    Integers = NDArray[np.int64]

CHANCE = 1e-6
"""Batches are called no Poisson draw where the chance of such sizes is below this."""

_HALF = 27


@dataclass(frozen=True)
class Measured:
    """The exact integers of one contribution before its noise, and the bounds that its plan declares.

    Args:
        integers: [D]. parts: (name, start, stop, exponent of the grid step, bound on the L2 norm) of groups of coordinates.
        whole: bound on the first `dimension` coordinates together.
    """

    integers: Integers
    parts: tuple[tuple[str, int, int, int, float], ...]
    whole: float
    dimension: int

    def problem(self, factor: int = 1) -> str:
        """Which norm is above `factor` times its bound; an empty text where none is."""
        total = Fraction(0)
        for name, start, stop, exponent, bound in self.parts:
            square = power(self.integers[start:stop]) * Fraction(4) ** exponent
            if stop <= self.dimension:
                total += square
            if problem := _above(name, square, factor * bound):
                return problem
        return _above("the whole", total, factor * self.whole)

    def less(self, other: Measured) -> Measured:
        """What must be added to `other` for this."""
        return replace(self, integers=self.integers - other.integers)


def measured(integers: Integers, plan: Plan, parts: ReleaseLayout) -> Measured:
    """The integers of an update with extras, as the plan bounds them."""
    grid = [(group, k + plan.mechanism.shift) for group, k in parts.grid(plan)]
    names = [f"extra {name}" for name in parts.extras]
    layers = len(grid) - len(names)
    names = [*(parts.model.names if layers > 1 else ("update",)), *names]
    bounds = [clip for _, _, clip in parts.groups(plan)]
    groups = tuple((n, g.start, g.stop, k, clip) for n, (g, k), clip in zip(names, grid, bounds, strict=True))
    return Measured(integers, groups, plan.clip, parts.model.dimension)


def power(integers: Integers) -> int:
    """The sum of squares [n], exactly."""
    if integers.size and int(np.abs(integers).max()) >= 2 ** (2 * _HALF):
        return sum(int(v) ** 2 for v in integers)
    high, low = integers >> _HALF, integers & (2**_HALF - 1)
    sums = [_blockwise(a * b) for a, b in ((high, high), (high, low), (low, low))]
    return (sums[0] << 2 * _HALF) + (sums[1] << (_HALF + 1)) + sums[2]


def planned_stds(plan: Plan, parts: ReleaseLayout) -> NDArray[np.float64]:
    """The std of the noise that the plan puts on each coordinate [D], in units of what leaves."""
    sizes = [group.stop - group.start for group, _, _ in parts.groups(plan)]
    stds = np.repeat(np.array([std for _, std, _ in parts.groups(plan)]), sizes)
    if plan.support is not None:
        stds[: parts.model.dimension] *= plan.support.numpy()
    return stds


def not_drawn_by_poisson(batches: Sequence[tuple[int, float, int]]) -> str:
    """Why these batches, each (examples of the client, rate, examples in the batch), are no independent Poisson draws, or ''."""
    if not batches:
        return ""
    furthest = max(abs(size - n * rate) for n, rate, size in batches)
    spans = ((n, rate, n * rate - furthest - 1e-9, n * rate + furthest + 1e-9) for n, rate, _ in batches)
    chances = [binom.cdf(math.floor(hi), n, rate) - binom.cdf(math.ceil(lo) - 1, n, rate) for n, rate, lo, hi in spans]
    if math.prod(chances) >= CHANCE:
        return ""
    sizes = sorted({size for _, _, size in batches})
    return f"{len(batches)} batches of {sizes[0]} to {sizes[-1]} examples: Poisson batches would differ more in size"


def _blockwise(products: Integers) -> int:
    blocks: Any = np.add.reduceat(products, np.arange(0, len(products), 256)) if len(products) else []
    return sum(map(int, blocks))


def _above(name: str, square: Fraction, bound: float) -> str:
    if math.isinf(bound) or square <= Fraction(bound) ** 2:
        return ""
    return f"{name} has norm {math.sqrt(square):.9g}, above the declared {bound:.9g}"
