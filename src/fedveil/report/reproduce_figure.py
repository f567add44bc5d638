"""The picture of a reproduction: ours and theirs as dots, over the rounds, or over an axis of numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.drawing import BLUE, COLOURS, DASHES, MUTED, ORANGE, blank, by_round, legend_below, panels, quiet, save
from fedveil.studies.reproduce.recipe import number
from fedveil.studies.reproduce.recipe_table import scale_text, title
from fedveil.studies.reproduce.reproduction import Reproduction, RowOutcome

if TYPE_CHECKING:
    from fedveil.drawing import Axes

ACROSS = 4
Draw = Callable[..., None]


def plot_reproduction(done: Reproduction) -> Path | None:
    """Draw result.png in the reproduction's folder; None where there is neither a published number nor one of ours.

    With curves, columns of one series that differ in their round are one panel; a column that is no last value has dots.
    """
    kinds: dict[tuple[str, str], tuple[int, Draw]] = {}
    for i, column in enumerate(done.recipe.columns):
        if done.recipe.picture == "curves" and column.collect == "last" and any(o.measured.get(column.of) for o in done.outcomes):
            kinds.setdefault(("curves", column.of), (i, _curves))
        elif any(_has(o, i) for o in done.outcomes):
            kinds["values", column.label] = (i, _dots if done.recipe.picture in ("dots", "curves") else _over)
    if not kinds:
        return None
    across = min(ACROSS, len(kinds))
    down = -(-len(kinds) // across)
    tall = max(3.4 if draw is not _dots else max(1.6, 0.24 * len(done.outcomes) + 0.9) for _, draw in kinds.values())
    figure = blank(3.3 * across + 3.0, tall * down + 1.1)
    figure.suptitle(f"{title(done)}\n{scale_text(done).partition(' (')[0].rstrip('.')}", fontsize=10)
    axes = panels(figure, len(kinds), across)
    mixed = len({draw for _, draw in kinds.values()}) > 1
    for k, (axis, (which, draw)) in enumerate(zip(axes, kinds.values(), strict=True)):
        draw(axis, done, which, first=mixed or k % across == 0)
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
        series, name, style = outcome.measured.get(spec.of, ()), _name(done, outcome), _style(k)
        if series:
            marker = "." if len(series) < 12 else ""
            axis.plot([t for t, _ in series], [v * spec.times for _, v in series], marker=marker, label=name, **style)
        value = number(outcome.row.published[column])
        if value is not None:
            axis.axhline(value, color=style["color"], linestyle=":", linewidth=0.9, label=f"{name}: the paper's value")
    axis.set_title(spec.label.partition(",")[0], fontsize=9)
    by_round(axis)
    quiet(axis, size=7)


def _over(axis: Axes, done: Reproduction, column: int, *, first: bool) -> None:
    """Ours over the labels of the axis that the recipe names, a line for each of the other labels; the paper's as dots."""
    at = [a.name for a in done.recipe.axes].index(done.recipe.picture)
    lines: dict[str, list[RowOutcome]] = {}
    for outcome in done.outcomes:
        lines.setdefault(", ".join(label for i, label in enumerate(outcome.row.labels) if i != at), []).append(outcome)
    for k, (name, outcomes) in enumerate(lines.items()):
        for values, who, style in (
            ([o.mean(column) for o in outcomes], name, {"marker": ".", **_style(k)}),
            (
                [number(o.row.published[column]) for o in outcomes],
                f"{name}, paper",
                {"marker": "o", **_style(k), "linestyle": ""},
            ),
        ):
            points = [(float(o.row.labels[at]), v) for o, v in zip(outcomes, values, strict=True) if v is not None]
            if points:
                axis.plot(*zip(*points, strict=True), label=who, **style)
    axis.set_title(done.recipe.columns[column].label, fontsize=9)
    axis.set_xlabel(done.recipe.picture, fontsize=8)
    quiet(axis, size=7)


def _style(k: int) -> dict[str, Any]:
    """Return the colour and dashes of line k."""
    return {"color": COLOURS[k % len(COLOURS)], "linestyle": DASHES[k // len(COLOURS) % len(DASHES)]}


def _name(done: Reproduction, outcome: RowOutcome) -> str:
    """Return the labels of a row; a bare number gets the name of its axis."""
    named = zip(done.recipe.axes, outcome.row.labels, strict=True)
    return ", ".join(f"{axis.name} {label}" if number(label) is not None else label for axis, label in named)


def _has(outcome: RowOutcome, column: int) -> bool:
    return outcome.mean(column) is not None or number(outcome.row.published[column]) is not None
