"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.errors import ConfigError, nearest
from fedveil.pages.figures.figure_style import BLUE, COLOURS, DASHES, GREEN, MUTED, ORANGE, blank, panels, quiet, save, writable
from fedveil.run.history_files import Row
from fedveil.run.recorded_run import RunData, read_run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedveil.federation.history import Record

SHORT = {
    "accuracy": ("test_accuracy", "mean_personal_accuracy"),
    "loss": ("test_loss", "train_loss"),
    "update": ("update_norm", "noise_norm"),
}
"""Names for several columns at once; `noise`, `clip` and every other column of layers.csv are drawn by layer."""
OVERVIEW = ("accuracy", "loss", "update", "noise", "clip", "participants")
MOST_LAYERS = 12


def plot_curves(history: Sequence[Record], path: Path) -> Path:
    """Accuracy, loss, and the noise of the mean update against its own norm, over rounds."""
    figure = blank(11, 3.2)
    left, middle, right = panels(figure, 3, 3)
    step = {"released step of the model": "update_norm", "expected norm of its noise": "noise_norm"}
    norms = {label: _points(history, column) for label, column in step.items()}
    _panel(left, "test_accuracy", {"test_accuracy": _points(history, "test_accuracy")})
    _panel(middle, "test_loss", {"test_loss": _points(history, "test_loss")}, (ORANGE,))
    _panel(right, "update and noise (L2 norm)", norms, (BLUE, GREEN))
    return save(figure, path)


def plot_run(run: str | Path, what: Sequence[str] | None = None, out: str | Path | None = None) -> Path:
    """Draw columns of a run's history over its rounds, one panel each, and return the picture's path.

    Args:
        run: run directory. what: `accuracy`, `loss`, `update`, `noise`, `clip`, or columns of history.csv or layers.csv, or
            `client_` and a column of participants.csv (a line a client); by default an overview of six panels.
        out: ends in .png, .svg or .pdf; by default in the run directory.

    Raises:
        ConfigError: no run directory, an unknown column (the message names those that there are), or another suffix.
    """
    data = read_run(run)
    chosen = [name.strip() for name in what] if what else list(OVERVIEW)
    drawn = [(name, _lines(data, name)) for name in chosen]
    if out is None:
        out = data.path / ("overview.png" if not what else f"plot-{'-'.join(chosen)}.png")
    target = writable(out)
    across = min(3, len(drawn))
    figure = blank(4.2 * across, 3.2 * -(-len(drawn) // across))
    for axis, (name, lines) in zip(panels(figure, len(drawn), across), drawn, strict=True):
        _panel(axis, name, lines)
    return save(figure, target)


_Lines = dict[str, list[tuple[float, float]]]


def _lines(run: RunData, name: str) -> _Lines:
    """The lines of one panel: (round from 1, value) under each line's name."""
    layered = dict.fromkeys(k for row in run.layers for k in row if k not in ("round", "layer"))
    column = {"noise": "noise_std"}.get(name, name)
    if column in layered:
        by_layer: _Lines = {}
        for row in run.layers:
            if isinstance(row.get(column), float):
                by_layer.setdefault(str(row["layer"]), []).append((row["round"] + 1, row[column]))
        return _fewer(by_layer)
    own = dict.fromkeys(f"client_{k}" for row in run.participants for k in row if k not in ("round", "client"))
    if name in own:
        by_client: _Lines = {}
        for row in run.participants:
            if isinstance(row.get(name.removeprefix("client_")), float):
                line = by_client.setdefault(f"client {int(row['client'])}", [])
                line.append((row["round"] + 1, row[name.removeprefix("client_")]))
        return _fewer(by_client, "clients")
    if name not in SHORT and name not in run.columns:
        if name in OVERVIEW or name == "noise":
            return {}
        there = [*SHORT, *(["noise"] if "noise_std" in layered else []), *layered, *run.columns, *own]
        known = list(dict.fromkeys(there))
        raise ConfigError(f"{run.path} has no column {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    return {c: _points(run.history, c) for c in SHORT.get(name, (name,))}


def _points(rows: Sequence[Row], column: str) -> list[tuple[float, float]]:
    return [(row["round"] + 1, row[column]) for row in rows if isinstance(row.get(column), float)]


def _fewer(lines: _Lines, of: str = "layers") -> _Lines:
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


def _panel(axis: Axes, name: str, lines: _Lines, colours: Sequence[str] = COLOURS) -> None:
    lines = {label: points for label, points in lines.items() if points}
    percent = bool(lines) and all("accuracy" in column for column in lines)
    for i, (label, points) in enumerate(lines.items()):
        dash = DASHES[i // len(colours) % 4 or i % 4]
        values = [100 * v if percent else v for _, v in points]
        axis.plot([t for t, _ in points], values, label=label.replace("_", " "), color=colours[i % len(colours)], linestyle=dash)
    axis.set(title=f"{name.replace('_', ' ')}{' (%)' if percent else ''}", xlabel="round")
    if percent:
        axis.set_ylim(0, 100)
    elif lines and min(v for points in lines.values() for _, v in points) >= 0:
        axis.set_ylim(bottom=0)
    if len(lines) > 1 or (lines and next(iter(lines)) != name):
        axis.legend(frameon=False, fontsize=8)
    if not lines:
        axis.text(0.5, 0.5, "not in this run", ha="center", va="center", color=MUTED, transform=axis.transAxes)
    quiet(axis)
