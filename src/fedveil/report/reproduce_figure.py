"""The picture of a reproduction: ours and theirs as dots, or our curves with the paper's last value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.drawing import BLUE, COLOURS, DASHES, MUTED, ORANGE, blank, by_round, legend_below, panels, quiet, save
from fedveil.studies.reproduce.recipe import number
from fedveil.studies.reproduce.recipe_table import scale_text, title
from fedveil.studies.reproduce.reproduction import Reproduction, RowOutcome

if TYPE_CHECKING:
    from fedveil.drawing import Axes

ACROSS = 4


def plot_reproduction(done: Reproduction) -> Path | None:
    """Draw result.png in the reproduction's folder; None where there is neither a published number nor one of ours."""
    curves = done.recipe.picture == "curves" and any(o.measured for o in done.outcomes)
    columns = [i for i in range(len(done.recipe.columns)) if curves or any(_has(o, i) for o in done.outcomes)]
    if not columns:
        return None
    across = min(ACROSS, len(columns))
    down = -(-len(columns) // across)
    tall = 3.4 if curves else max(1.6, 0.24 * len(done.outcomes) + 0.9)
    figure = blank(3.3 * across + 3.0, tall * down + 1.1)
    scale = "the paper's settings" if done.scale == "paper" else "SMALL, not the paper's settings"
    figure.suptitle(f"{title(done)}\nscale: {scale}", fontsize=10)
    axes = panels(figure, len(columns), across)
    for k, (axis, column) in enumerate(zip(axes, columns, strict=True)):
        (_curves if curves else _dots)(axis, done, column, first=k % across == 0)
    legend_below(figure, axes[0])
    path = done.folder / "result.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    return save(figure, path, scale_text(done))


def _dots(axis: Axes, done: Reproduction, column: int, *, first: bool) -> None:
    """Draw published values hollow and ours filled, with a line between the two."""
    places = range(len(done.outcomes))
    theirs = [number(o.row.published[column]) for o in done.outcomes]
    ours = [o.mean(column) for o in done.outcomes]
    for y, a, b in zip(places, theirs, ours, strict=True):
        if a is not None and b is not None:
            axis.plot([a, b], [y, y], color=MUTED, linewidth=0.8, zorder=1)
    for name, values, style in (
        ("paper", theirs, {"facecolors": "white", "edgecolors": ORANGE, "marker": "o"}),
        ("ours", ours, {"color": BLUE, "marker": "D"}),
    ):
        there = [(v, y) for v, y in zip(values, places, strict=True) if v is not None]
        if there:
            axis.scatter([v for v, _ in there], [y for _, y in there], s=24, label=name, zorder=2, **style)  # type: ignore[arg-type]
    axis.set_yticks(list(places), [_name(done, o) if first else "" for o in done.outcomes], fontsize=7)
    axis.set_ylim(len(done.outcomes) - 0.4, -0.6)
    axis.set_xlabel(done.recipe.columns[column].label, fontsize=8)
    quiet(axis, size=7)


def _curves(axis: Axes, done: Reproduction, column: int, *, first: bool) -> None:
    """Draw our series over the rounds, and the paper's value as a dotted line of the same colour."""
    spec = done.recipe.columns[column]
    drawn = [o for o in done.outcomes if o.measured.get(spec.of) or number(o.row.published[column]) is not None]
    for k, outcome in enumerate(drawn):
        colour = COLOURS[k % len(COLOURS)]
        series = outcome.measured.get(spec.of, ())
        name = _name(done, outcome)
        if series:
            style = DASHES[k // len(COLOURS) % len(DASHES)]
            marker = "." if len(series) < 12 else ""
            x, y = [t for t, _ in series], [v * spec.times for _, v in series]
            axis.plot(x, y, color=colour, linestyle=style, marker=marker, label=name)
        value = number(outcome.row.published[column])
        if value is not None:
            axis.axhline(value, color=colour, linestyle=":", linewidth=0.9, label=f"{name}: the paper's value")
    axis.set_title(spec.label, fontsize=9)
    by_round(axis)
    quiet(axis, size=7)


def _name(done: Reproduction, outcome: RowOutcome) -> str:
    """Return the labels of a row; a bare number gets the name of its axis."""
    named = zip(done.recipe.axes, outcome.row.labels, strict=True)
    return ", ".join(f"{axis.name} {label}" if number(label) is not None else label for axis, label in named)


def _has(outcome: RowOutcome, column: int) -> bool:
    return outcome.mean(column) is not None or number(outcome.row.published[column]) is not None
