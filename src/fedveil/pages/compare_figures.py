"""The picture of a comparison: accuracy against the guarantee, a line and a band a method, each named where it ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy.optimize import isotonic_regression

from fedveil.pages.figures import COLOURS, INK, MUTED
from fedveil.studies.compare.comparison_rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedveil.studies.compare.comparison import Comparison

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
DASHES = ("-", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 1.5, 1.5, 1.5)), (0, (4, 1, 1, 1, 1, 1)))


def plot(found: Comparison, path: Path) -> Path:
    """Draw one panel a partition; over one epsilon only, the methods below each other. The suffix says which format.

    Args:
        path: ends in .png or .svg.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = [row for row in found.rows if row.values]
    partitions = list(dict.fromkeys(row.partition for row in rows))
    names = found.names
    finite = sorted({row.epsilon for row in rows if math.isfinite(row.epsilon)})
    margin = 0.085 * max(len(names[row.method]) for row in rows) + 0.9
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedveil", "font.size": 10}):
        many = len(finite) > 1
        height = 4.2 if many else 1.5 + 0.42 * len(names)
        figure = Figure(figsize=((4.6 + margin) * len(partitions), height), layout="constrained")
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
            axis.spines[["top", "right"]].set_visible(False)
        label = f"{found.metric.replace('_', ' ')} (%)"
        (axes[0].set_ylabel if many else axes[0].set_xlabel)(label)
        seeds = len(found.seeds)
        band = "bands" if many else "bars"
        said = f"mean of {seeds} seeds, {band}: its 95 % confidence interval (Student's t), small points: single seeds"
        figure.suptitle(said if seeds > 1 else "one seed: no spread", x=0.01, ha="left", fontsize=8.5, color=MUTED)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _lines(axis: Axes, rows: list[Row], names: dict[str, str], epsilons: list[float]) -> None:
    """Lines over epsilon; runs without noise are level lines."""
    ends: list[tuple[float, str, str]] = []
    for method in dict.fromkeys(row.method for row in rows):
        style = _style(list(names).index(method))
        mine = sorted((r for r in rows if r.method == method and math.isfinite(r.epsilon)), key=lambda r: r.epsilon)
        x, y = [r.epsilon for r in mine], [100 * r.mean for r in mine]
        if mine:
            axis.fill_between(x, [100 * r.around[0] for r in mine], [100 * r.around[1] for r in mine], **_fill(style))
            axis.plot(x, y, markersize=6, linewidth=1.8, markeredgecolor="white", markeredgewidth=0.8, zorder=4, **style)
            points = [(r.epsilon, 100 * v) for r in mine for v in r.values.values()]
            axis.scatter(
                [e for e, _ in points], [v for _, v in points], s=9, color=style["color"], alpha=0.55, linewidths=0, zorder=3
            )
            ends.append((y[-1], names[method], style["color"]))
        for free in (r for r in rows if r.method == method and math.isinf(r.epsilon)):
            level = 100 * free.mean
            axis.axhline(level, color=style["color"], linewidth=1.2, linestyle=(0, (1, 2)), zorder=2)
            ends.append((level, f"{names[method]}, no noise", style["color"]))
    axis.set_xscale("log")
    axis.set_xticks(epsilons, [f"{e:g}" for e in epsilons])
    axis.minorticks_off()
    axis.set_xlim(epsilons[0] / _step(epsilons) ** 0.12, epsilons[-1] * _step(epsilons) ** 0.06)
    axis.grid(alpha=0.22, linewidth=0.6)
    _name_ends(axis, ends)


def _step(epsilons: list[float]) -> float:
    return epsilons[-1] / epsilons[0]


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
    ordered = sorted(rows, key=lambda r: (math.isinf(r.epsilon), -r.mean))
    for place, row in enumerate(ordered):
        style = _style(list(names).index(row.method))
        reach = [[100 * (row.mean - row.around[0])], [100 * (row.around[1] - row.mean)]]
        look = {"marker": style["marker"], "color": style["color"]}
        axis.errorbar(100 * row.mean, place, xerr=reach, markersize=8, capsize=3, linewidth=1.6, **look)
        axis.scatter(
            [100 * v for v in row.values.values()], [place + 0.26] * len(row.values), s=12, color=style["color"], alpha=0.6
        )
    axis.set_yticks(range(len(ordered)), [_strip_name(row, names) for row in ordered])
    axis.set_ylim(len(ordered) - 0.4, -0.6)
    axis.grid(axis="x", alpha=0.22, linewidth=0.6)


def _strip_name(row: Row, names: dict[str, str]) -> str:
    return f"{names[row.method]}, {'no noise' if math.isinf(row.epsilon) else f'ε = {row.epsilon:g}'}"


def _style(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[index % len(DASHES)],
    }


def _fill(style: dict[str, Any]) -> dict[str, Any]:
    return {"color": style["color"], "alpha": 0.13, "linewidth": 0}
