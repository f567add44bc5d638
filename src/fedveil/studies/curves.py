"""Curves of a report: thinned, averaged over the runs of a group, equal layers merged."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, median, stdev
from typing import Any

from fedveil.federation.history import Row
from fedveil.run.recorded_run import RunData
from fedveil.studies.statistics import interval

POINTS = 400
"""A curve has so many points at most; of longer ones every k-th round and the last are drawn."""


def curve(runs: list[list[tuple[float, Any]]]) -> dict[str, Any]:
    """Mean over the runs, at rounds (from 1) that all of them have; of several runs with its 95 % confidence interval."""
    tables = [{int(t) + 1: v for t, v in run if isinstance(v, float)} for run in runs]
    shared = [t for t in tables[0] if all(t in table for table in tables[1:])]
    kept = thinned(shared)
    values = {t: [table[t] for table in tables] for t in kept}
    curve: dict[str, Any] = {"points": [[t, fmean(v)] for t, v in values.items()]}
    if len(runs) > 1:
        half = {t: interval(v) if all(map(math.isfinite, v)) else math.nan for t, v in values.items()}
        curve["band"] = [[t, fmean(v) - half[t], fmean(v) + half[t]] for t, v in values.items()]
    return curve


def thinned(rounds: Sequence[int]) -> list[int]:
    """At most about `POINTS` of the rounds: every k-th, and the last."""
    step = max(1, math.ceil(len(rounds) / POINTS))
    return [t for i, t in enumerate(rounds) if i % step == 0 or i == len(rounds) - 1]


def constant(runs: Iterable[RunData], column: str) -> bool:
    """Whether a column of the history has one value in all rounds of all runs (up to rounding)."""
    values = [row[column] for run in runs for row in run.history if isinstance(row.get(column), float)]
    return len(values) > 1 and (min(values) == max(values) or max(values) - min(values) <= 1e-6 * max(map(abs, values)))


def last(rows: Sequence[Row], column: str) -> float | None:
    return next((float(r[column]) for r in reversed(rows) if isinstance(r.get(column), float)), None)


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, least, largest and sample standard deviation of what is known."""
    known = [v for v in values if v is not None]
    if not known:
        return None
    return {
        "mean": fmean(known),
        "min": min(known),
        "max": max(known),
        "sd": stdev(known) if len(known) > 1 else 0.0,
        "n": len(known),
    }


def layers(runs: list[RunData]) -> dict[str, list[dict[str, Any]]]:
    """For each column of layers.csv the curves of the layers, equal ones merged; beyond 12 the least, median and largest."""
    rows = runs[0].layers
    found: dict[str, list[dict[str, Any]]] = {}
    for column in dict.fromkeys(k for row in rows for k in row if k not in ("round", "layer")):
        table: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if isinstance(row.get(column), float):
                table.setdefault(str(row["layer"]), []).append((row["round"], row[column]))
        merged: dict[tuple[tuple[float, float], ...], list[str]] = {}
        for layer, points in table.items():
            merged.setdefault(tuple((t, float(f"{v:.6g}")) for t, v in points), []).append(layer)
        curves = [{"name": _layer_name(names, len(table)), **curve([list(points)])} for points, names in merged.items()]
        found[column] = curves if len(curves) <= 12 else _summarised(list(table.values()))
    return found


def _layer_name(names: list[str], total: int) -> str:
    if len(names) == total > 1:
        return f"all {total} layers"
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _summarised(each: list[list[tuple[float, float]]]) -> list[dict[str, Any]]:
    at: dict[float, list[float]] = {}
    for points in each:
        for t, v in points:
            at.setdefault(t, []).append(v)
    kinds = (("least of the layers", min), ("median layer", median), ("largest of the layers", max))
    return [{"name": name, **curve([[(t, float(of(v))) for t, v in at.items()]])} for name, of in kinds]
