"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedveil.drawing.figure_style import BLUE, COLOURS, DASHES, GREEN, MUTED, ORANGE, blank, panels, quiet, save, writable
from fedveil.errors import ConfigError, nearest
from fedveil.federation.history import Columns, Row
from fedveil.run.recorded_run import RunData, read_run
from fedveil.tasks.column import Column

if TYPE_CHECKING:
    from fedveil.drawing.figure_style import Axes

OVERVIEW = ("loss", "update", "noise", "clip", "participants")
"""`noise`, `clip` and every other column of layers.csv are drawn by layer."""
MOST_LAYERS = 12
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """What one panel shows. lines: (round from 1, value) under each line's name. share: values from 0 to 1, in percent.

    private: some of it is computed from private data without noise.
    """

    title: str
    axis: str = ""
    lines: dict[str, Points] = field(default_factory=dict)
    share: bool = False
    private: bool = False


def plot_curves(history: Sequence[Row], columns: Columns, path: Path) -> Path:
    """The main metric, loss, and the noise of the mean update against its own norm, over rounds."""
    figure = blank(11, 3.2)
    colours = ((BLUE,), (ORANGE,), (BLUE, GREEN))
    charts = zip(columns.together.values(), colours, strict=False)
    drawn = [_together(title, names[: len(own)], history, columns) for (title, names), own in charts]
    for axis, panel, own in zip(panels(figure, 3, 3), drawn, colours, strict=False):
        _draw(axis, panel, own)
    return save(figure, path, private=any(panel.private for panel in drawn))


def plot_run(run: str | Path, what: Sequence[str] | None = None, out: str | Path | None = None) -> Path:
    """Draw columns of a run's history over its rounds, one panel each, and return the picture's path.

    Args:
        run: run directory. what: the main metric, such as `accuracy`; `loss`, `update`, `noise`, `clip`, or
            columns of history.csv or layers.csv, or `client_` and a column of participants.csv (a line a client);
            by default an overview of six panels.
        out: ends in .png, .svg or .pdf; by default in the run directory.

    Raises:
        ConfigError: no run directory, an unknown column (the message names those that there are), or another suffix.
    """
    data = read_run(run)
    overview = dict.fromkeys((next(iter(data.declared.together)), *OVERVIEW))
    chosen = [name.strip() for name in what] if what else list(overview)
    drawn = [_panel(data, name) for name in chosen]
    if out is None:
        out = data.path / ("overview.png" if not what else f"plot-{'-'.join(chosen)}.png")
    target = writable(out)
    across = min(3, len(drawn))
    figure = blank(4.2 * across, 3.2 * -(-len(drawn) // across))
    for axis, panel in zip(panels(figure, len(drawn), across), drawn, strict=True):
        _draw(axis, panel)
    return save(figure, target, private=any(panel.private for panel in drawn))


def _panel(run: RunData, name: str) -> Panel:
    """The panel of that name: a column, several together, or a line a layer or client."""
    layered = dict.fromkeys(k for row in run.layers for k in row if k not in ("round", "layer"))
    header = {"noise": "noise_std"}.get(name, name)
    if name == "clip" and "example_clip" in run.columns:  # DP-SGD clips the gradient of each example, and no update
        name = header = "example_clip"
    if header in layered:
        return _one_each(run.declared.by_layer(header), header, run.layers, "layer")
    own = dict.fromkeys(f"client_{k}" for row in run.participants for k in row if k not in ("round", "client"))
    if name in own:
        header = name.removeprefix("client_")
        return _one_each(run.declared[header], header, run.participants, "client")
    charts = run.declared.together
    if name in charts:
        return _together(*charts[name], run.history, run.declared)
    if name in run.columns:
        return _together("", (name,), run.history, run.declared)
    if name in OVERVIEW or name == "noise":
        return Panel(name.capitalize())
    there = [*charts, *(["noise"] if "noise_std" in layered else []), *layered, *run.columns, *own]
    known = list(dict.fromkeys(there))
    raise ConfigError(f"{run.path} has no column {name!r}{nearest(name, known)}; there are {', '.join(known)}")


def _together(title: str, names: Sequence[str], rows: Sequence[Row], columns: Columns) -> Panel:
    """A line for each of these columns, as far as the history has them."""
    there = [columns[name] for name in names if _points(rows, name)]
    drawn, first = {column.words: _points(rows, column.name) for column in there}, columns[names[0]]
    return Panel(title or first.words, first.axis, drawn, first.share, not all(column.public for column in there))


def _one_each(column: Column, header: str, rows: Sequence[Row], index: Literal["layer", "client"]) -> Panel:
    """A line for each layer or client."""
    lines: dict[str, Points] = {}
    for row in rows:
        if row.get(header) is not None:
            name = str(row["layer"]) if index == "layer" else f"client {row['client']}"
            lines.setdefault(name, []).append((row["round"] + 1, row[header]))
    return Panel(column.words, column.axis, _fewer(lines, f"{index}s"), column.share, index == "client" or not column.public)


def _points(rows: Sequence[Row], column: str) -> Points:
    return [(row["round"] + 1, row[column]) for row in rows if row.get(column) is not None]


def _fewer(lines: dict[str, Points], of: str) -> dict[str, Points]:
    """Equal layers (or clients) as one line; of more than 12 different ones the least, median and largest at the end."""
    merged: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, points in lines.items():
        merged.setdefault(tuple(points), []).append(name)
    if len(merged) == 1 and len(lines) > 1:
        return {f"all {len(lines)} {of}": list(next(iter(merged)))}
    named = {names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more": list(p) for p, names in merged.items()}
    if len(named) <= MOST_LAYERS:
        return named
    order = sorted(named, key=lambda name: named[name][-1][1])
    kept = {"least": order[0], "median": order[len(order) // 2], "largest": order[-1]}
    return {f"{name} ({what})": named[name] for what, name in kept.items()}


def _draw(axis: Axes, panel: Panel, colours: Sequence[str] = COLOURS) -> None:
    for i, (label, points) in enumerate(panel.lines.items()):
        dash = DASHES[i // len(colours) % 4 or i % 4]
        values = [100 * v if panel.share else v for _, v in points]
        axis.plot([t for t, _ in points], values, label=label, color=colours[i % len(colours)], linestyle=dash)
    axis.set(title=panel.title, xlabel="round", ylabel=panel.axis)
    if panel.share:
        axis.set_ylim(0, 100)
    elif panel.lines and min(v for points in panel.lines.values() for _, v in points) >= 0:
        axis.set_ylim(bottom=0)
    if len(panel.lines) > 1 or (panel.lines and next(iter(panel.lines)) != panel.title):
        axis.legend(frameon=False, fontsize=8)
    if not panel.lines:
        axis.text(0.5, 0.5, "not in this run", ha="center", va="center", color=MUTED, transform=axis.transAxes)
    quiet(axis)
