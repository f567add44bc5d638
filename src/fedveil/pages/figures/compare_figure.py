"""The picture of a comparison: accuracy against the guarantee, a line and a band a method, each named where it ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import isotonic_regression

from fedveil.drawing.figure_style import INK, MUTED, blank, quiet, save, style
from fedveil.studies.compare.comparison_rows import Row

if TYPE_CHECKING:
    from fedveil.drawing.figure_style import Axes
    from fedveil.studies.compare.comparison import Comparison


def plot_comparison(found: Comparison, path: Path) -> Path:
    """Draw one panel a partition; over one epsilon only, the methods below each other. The suffix says which format.

    Args:
        path: ends in .png or .svg.
    """
    rows = [row for row in found.rows if row.values]
    partitions = list(dict.fromkeys(row.partition for row in rows))
    names = found.names
    finite = sorted({row.epsilon for row in rows if math.isfinite(row.epsilon)})
    many = len(finite) > 1
    margin = 0.085 * max(len(names[row.method]) for row in rows) + 0.9
    figure = blank((4.6 + margin) * len(partitions), 4.2 if many else 1.5 + 0.42 * len(names))
    axes = figure.subplots(1, len(partitions), squeeze=False, sharey=many)[0]
    for axis, partition in zip(axes, partitions, strict=True):
        mine = [row for row in rows if row.partition == partition]
        if many:
            _lines(axis, mine, names, finite)
            axis.set_xlabel(f"{found.by} ε (log scale)")
        else:
            _strip(axis, mine, names)
        if partition:
            axis.set_title(partition, loc="left", fontsize=10.5)
    label = f"{found.column.phrase} (%)" if found.column.share else found.column.phrase
    (axes[0].set_ylabel if many else axes[0].set_xlabel)(label)
    seeds = len(found.seeds)
    band = "bands" if many else "bars"
    note = f"mean of {seeds} seeds, {band}: its 95 % confidence interval (Student's t), small points: single seeds"
    figure.suptitle(note if seeds > 1 else "one seed: no spread", x=0.01, ha="left", fontsize=8.5, color=MUTED)
    return save(figure, path)


def _lines(axis: Axes, rows: list[Row], names: dict[str, str], epsilons: list[float]) -> None:
    """Lines over epsilon; runs without noise are level lines."""
    ends: list[tuple[float, str, str]] = []
    for method in dict.fromkeys(row.method for row in rows):
        look = style(list(names).index(method))
        colour = look["color"]
        mine = sorted((r for r in rows if r.method == method and math.isfinite(r.epsilon)), key=lambda r: r.epsilon)
        x, y = [r.epsilon for r in mine], [r.column.factor * r.mean for r in mine]
        if mine:
            low, high = (
                [mine[0].column.factor * edge for edge in edges] for edges in zip(*(r.around for r in mine), strict=True)
            )
            axis.fill_between(x, low, high, color=colour, alpha=0.13, linewidth=0)
            axis.plot(x, y, markersize=6, linewidth=1.8, markeredgecolor="white", markeredgewidth=0.8, zorder=4, **look)
            at, single = zip(*((r.epsilon, r.column.factor * v) for r in mine for v in r.values.values()), strict=True)
            axis.scatter(at, single, s=9, color=colour, alpha=0.55, linewidths=0, zorder=3)
            ends.append((y[-1], names[method], colour))
        for free in (r for r in rows if r.method == method and math.isinf(r.epsilon)):
            level = free.column.factor * free.mean
            axis.axhline(level, color=colour, linewidth=1.2, linestyle=(0, (1, 2)), zorder=2)
            ends.append((level, f"{names[method]}, no noise", colour))
    reach = epsilons[-1] / epsilons[0]
    axis.set_xscale("log")
    axis.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axis.minorticks_off()
    axis.set_xlim(epsilons[0] / reach**0.12, epsilons[-1] * reach**0.06)
    quiet(axis)
    _name_ends(axis, ends)


def _name_ends(axis: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each name at the right end of its line, pushed apart where they would cover each other."""
    low, high = axis.get_ylim()
    gap = (high - low) * 0.058
    ordered = sorted(ends)
    # the places at least a gap apart that are nearest to the ends (least squares)
    places = isotonic_regression([y - i * gap for i, (y, _, _) in enumerate(ordered)]).x + gap * np.arange(len(ordered))
    for place, (y, name, colour) in zip(places, ordered, strict=True):
        axis.annotate(
            name,
            xy=(1, y),
            xytext=(1.05, place),
            xycoords=("axes fraction", "data"),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=INK,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 1.4, "shrinkA": 2, "shrinkB": 0, "relpos": (0, 0.5)},
            annotation_clip=False,
        )


def _strip(axis: Axes, rows: list[Row], names: dict[str, str]) -> None:
    """Methods below each other, best first: mean, its confidence interval, and each seed."""
    ordered = sorted(rows, key=lambda r: (math.isinf(r.epsilon), -r.column.sign * r.mean))
    for place, row in enumerate(ordered):
        look = style(list(names).index(row.method)) | {"linestyle": "-"}
        factor = row.column.factor
        reach = [[factor * (row.mean - row.around[0])], [factor * (row.around[1] - row.mean)]]
        axis.errorbar(factor * row.mean, place, xerr=reach, markersize=8, capsize=3, linewidth=1.6, **look)
        single = [factor * v for v in row.values.values()]
        axis.scatter(single, [place + 0.26] * len(single), s=12, color=look["color"], alpha=0.6)
    promises = ["no noise" if math.isinf(row.epsilon) else f"ε = {row.epsilon:g}" for row in ordered]
    axis.set_yticks(range(len(ordered)), [f"{names[row.method]}, {said}" for row, said in zip(ordered, promises, strict=True)])
    axis.set_ylim(len(ordered) - 0.4, -0.6)
    quiet(axis, "x")
