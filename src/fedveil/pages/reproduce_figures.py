"""The picture of a reproduction: ours and theirs as dots, or our curves with the paper's last value."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.pages.figures import BLUE, COLOURS, DASHES, MUTED, ORANGE
from fedveil.studies.reproduce.recipe import number
from fedveil.studies.reproduce.recipe_table import scale_text, title
from fedveil.studies.reproduce.reproduction import Outcome, Reproduction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACROSS = 4


def plot_reproduction(done: Reproduction) -> Path | None:
    """Draw result.png in the reproduction's folder; None where there is neither a published number nor one of ours."""
    from matplotlib.figure import Figure

    curves = done.recipe.picture == "curves" and any(o.measured for o in done.outcomes)
    panels = [i for i in range(len(done.recipe.columns)) if curves or _any(done, i)]
    if not panels:
        return None
    across = min(ACROSS, len(panels))
    down = -(-len(panels) // across)
    tall = 3.4 if curves else max(1.6, 0.24 * len(done.outcomes) + 0.9)
    figure = Figure(figsize=(3.3 * across + 3.0, tall * down + 1.1), layout="constrained")
    scale = "the paper's settings" if done.scale == "paper" else "SMALL, not the paper's settings"
    figure.suptitle(f"{title(done)}\nscale: {scale}", fontsize=10)
    axes = figure.subplots(down, across, squeeze=False)
    for k, i in enumerate(panels):
        draw = _curves if curves else _dots
        draw(axes[k // across][k % across], done, i, first=k % across == 0)
    for axis in axes.ravel()[len(panels) :]:
        axis.set_axis_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    if handles:
        wide = 0.5 + 0.068 * max(map(len, labels))  # inches of one entry at this size of letters
        beside = max(1, min(len(labels), int(figure.get_figwidth() / wide)))
        figure.legend(handles, labels, loc="outside lower center", ncols=beside, frameon=False, fontsize=8)
    path = done.folder / "result.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Description": scale_text(done)})
    return path


def _dots(axis: Axes, done: Reproduction, column: int, *, first: bool) -> None:
    """Theirs hollow, ours filled, a line between the two."""
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
    _quiet(axis)


def _curves(axis: Axes, done: Reproduction, column: int, *, first: bool) -> None:
    """Our series over the rounds; the paper's value as a dotted line of the same colour."""
    from matplotlib.ticker import MaxNLocator

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
    axis.set_xlabel("round", fontsize=8)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _quiet(axis)


def _name(done: Reproduction, outcome: Outcome) -> str:
    """The labels of a row; a bare number with the name of its axis."""
    named = zip(done.recipe.axes, outcome.row.labels, strict=True)
    return ", ".join(f"{axis.name} {label}" if number(label) is not None else label for axis, label in named)


def _any(done: Reproduction, column: int) -> bool:
    return any(_has(o, column) for o in done.outcomes)


def _has(outcome: Outcome, column: int) -> bool:
    return outcome.mean(column) is not None or number(outcome.row.published[column]) is not None


def _quiet(axis: Axes) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=7)
