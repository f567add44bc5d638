"""What a column takes of a series: collectors by name. A series is a list of (round from 1, value), rounds ascending."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

Series = Sequence[tuple[int, float]]
Measured = Mapping[str, Series]
"""What a measurement gives of one row: series by name; a figure that belongs to no round stands at round 1."""


def _values(series: Series) -> list[float]:
    return [value for _, value in series]


COLLECTORS: dict[str, Callable[[Series], float]] = {
    "last": lambda series: series[-1][1],
    "best": lambda series: max(_values(series)),
    "mean": lambda series: statistics.fmean(_values(series)),
    "median": lambda series: statistics.median(_values(series)),
    "sum": lambda series: sum(_values(series)),
    "spread": lambda series: statistics.pstdev(_values(series)),
}
"""`spread` is the standard deviation over the rounds."""


def collected(measured: Measured, of: str, collect: str, upto: int | None = None) -> float | str:
    """One number of a measurement, or why there is none.

    Args:
        of: the series. collect: the collector. upto: later rounds are left out.
    """
    series = measured.get(of, ())
    if not series:
        return f"this run has no {of}"
    considered = [point for point in series if upto is None or point[0] <= upto]
    return COLLECTORS[collect](considered) if considered else f"nothing was measured up to round {upto}"
