"""Pictures of a run and of a partition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from fedveil.data.partition import ClientIndices, Partition
from fedveil.drawing import AMBER, BLUE, COLOURS, DASHES, GREEN, MUTED, ORANGE, blank, panels, quiet, save, writable
from fedveil.errors import ConfigError, nearest
from fedveil.experiment.recorded_run import RunData, read_run
from fedveil.federation.history import Columns, Row
from fedveil.tasks.task import Column

if TYPE_CHECKING:
    from fedveil.drawing import Axes, Figure


OVERVIEW = ("loss", "update", "noise", "clip", "participants")
"""`noise`, `clip` and every other column of layers.csv are drawn by layer."""
_MOST_LAYERS = 12
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class _Panel:
    """One panel of a figure. lines: (round from 1, value) by name. factor: multiplies the values. limits: of the axis.

    private: some of it is computed from private data without noise.
    """

    title: str
    axis: str = ""
    lines: dict[str, Points] = field(default_factory=dict)
    factor: float = 1.0
    limits: tuple[float, float] | None = None
    private: bool = False


def plot_curves(history: Sequence[Row], columns: Columns, path: Path) -> Path:
    """Draw the main metric, the loss, and the noise of the mean update against its norm, over rounds."""
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


def _panel(run: RunData, name: str) -> _Panel:
    """Return the panel of that name: one column, several together, or a line for each layer or client."""
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
        return _Panel(name.capitalize())
    there = [*charts, *(["noise"] if "noise_std" in layered else []), *layered, *run.columns, *own]
    known = list(dict.fromkeys(there))
    raise ConfigError(f"{run.path} has no column {name!r}{nearest(name, known)}; there are {', '.join(known)}")


def _together(title: str, names: Sequence[str], rows: Sequence[Row], columns: Columns) -> _Panel:
    """Return a line for each of these columns that the history has."""
    there = [columns[name] for name in names if _points(rows, name)]
    drawn, first = {column.words: _points(rows, column.name) for column in there}, columns[names[0]]
    private = not all(column.public for column in there)
    return _Panel(title or first.words, first.axis, drawn, first.factor, first.limits, private)


def _one_each(column: Column, header: str, rows: Sequence[Row], index: Literal["layer", "client"]) -> _Panel:
    """Return a line for each layer or client."""
    lines: dict[str, Points] = {}
    for row in rows:
        if row.get(header) is not None:
            name = str(row["layer"]) if index == "layer" else f"client {row['client']}"
            lines.setdefault(name, []).append((row["round"] + 1, row[header]))
    private = index == "client" or not column.public
    return _Panel(column.words, column.axis, _fewer(lines, f"{index}s"), column.factor, column.limits, private)


def _points(rows: Sequence[Row], column: str) -> Points:
    return [(row["round"] + 1, row[column]) for row in rows if row.get(column) is not None]


def _fewer(lines: dict[str, Points], of: str) -> dict[str, Points]:
    """Merge equal lines of layers (or clients); of more than 12 different ones, keep the least, median and largest at the end."""
    merged: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, points in lines.items():
        merged.setdefault(tuple(points), []).append(name)
    if len(merged) == 1 and len(lines) > 1:
        return {f"all {len(lines)} {of}": list(next(iter(merged)))}
    named = {names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more": list(p) for p, names in merged.items()}
    if len(named) <= _MOST_LAYERS:
        return named
    order = sorted(named, key=lambda name: named[name][-1][1])
    kept = {"least": order[0], "median": order[len(order) // 2], "largest": order[-1]}
    return {f"{name} ({what})": named[name] for what, name in kept.items()}


def _draw(axis: Axes, panel: _Panel, colours: Sequence[str] = COLOURS) -> None:
    for i, (label, points) in enumerate(panel.lines.items()):
        dash = DASHES[i // len(colours) % 4 or i % 4]
        values = [panel.factor * v for _, v in points]
        axis.plot([t for t, _ in points], values, label=label, color=colours[i % len(colours)], linestyle=dash)
    axis.set(title=panel.title, xlabel="round", ylabel=panel.axis)
    if panel.limits is not None:
        least, most = panel.limits
        axis.set_ylim(min([least, *(panel.factor * v for points in panel.lines.values() for _, v in points)]), most)
    elif panel.lines and min(v for points in panel.lines.values() for _, v in points) >= 0:
        axis.set_ylim(bottom=0)
    if len(panel.lines) > 1 or (panel.lines and next(iter(panel.lines)) != panel.title):
        axis.legend(frameon=False, fontsize=8)
    if not panel.lines:
        axis.text(0.5, 0.5, "not in this run", ha="center", va="center", color=MUTED, transform=axis.transAxes)
    quiet(axis)


_SINGLE = 60
COLUMNS = 250
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Table:
    """Data of a figure. counts: (clients, labels), training only; test: (clients,); order: clients from left to right."""

    counts: Ints
    test: Ints
    order: Ints
    names: tuple[str, ...]


def plot_partition(
    partition: Partition, labels: Ints, classes: int | Sequence[str], path: str | Path, test: ClientIndices | None = None
) -> None:
    """Write a figure of clients against labels, for its owner alone; the suffix of `path` gives the format (png, svg, pdf).

    Up to 60 clients, one dot for each client and label, its area the number of examples. Above, a map of the share of each
    label in a client's examples, clients ordered by their most frequent label and neighbours averaged above 250. Both with
    examples per client above and examples per label at the right.
    labels: (examples,) of the training set. classes: how many labels, or their names. test: each client's own test examples,
    as from `client_test_split`. Raises ConfigError if `path` cannot be written or has another suffix.
    """
    target = writable(path)
    names = tuple(str(i) for i in range(classes)) if isinstance(classes, int) else tuple(classes)
    if "private_label" in partition.extras:
        private = int(partition.extras["private_label"])
        names = tuple(name + " (private)" * (label == private) for label, name in enumerate(names))
    table = _table(partition, labels, names, test)
    save(_figure(partition, table), target, private=True)


def _table(partition: Partition, labels: Ints, names: tuple[str, ...], test: ClientIndices | None) -> Table:
    counts = partition.label_counts(labels, len(names))
    held = np.zeros(len(partition), dtype=np.int64) if test is None else test.sizes
    order = np.arange(len(partition))
    if len(partition) > _SINGLE:
        shares = _shares(counts)
        top = shares.argmax(axis=1)
        order = np.lexsort((-shares.max(axis=1), top, counts.sum(axis=1) == 0))
    return Table(counts, held, order, names)


def _shares(counts: Ints) -> NDArray[np.float64]:
    return np.asarray(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1), dtype=np.float64)


def _figure(partition: Partition, table: Table) -> Figure:
    clients, labels = table.counts.shape
    many = clients > _SINGLE
    width = 11.0 if many else float(np.clip(4.2 + 0.2 * clients, 6.5, 15.5))
    height = float(np.clip(2.8 + 0.27 * labels, 4.6, 11.0))
    figure = blank(width, height)
    grid = figure.add_gridspec(2, 2, width_ratios=(width - 1.9, 1.2), height_ratios=(1.0, height - 1.9))
    main = figure.add_subplot(grid[1, 0])
    above = figure.add_subplot(grid[0, 0], sharex=main)
    right = figure.add_subplot(grid[1, 1], sharey=main)
    if many:
        _map(main, table)
    else:
        _dots(main, table, diameter=min(18.0, 68.0 * (height - 1.9) / labels, 68.0 * (width - 1.9) / clients))
    _sizes(above, table)
    _label_bars(right, table)
    _axes(main, table)
    _mark_curious(main, above, partition, table)
    figure.suptitle(_title(partition, table), fontsize=10)
    return figure


def _dots(axes: Axes, table: Table, diameter: float) -> None:
    """Draw dots of at most `diameter` points, with an area proportional to the number of examples."""
    clients, labels = np.nonzero(table.counts)
    values = table.counts[clients, labels]
    largest = int(values.max(initial=1))
    biggest = diameter**2
    area = np.maximum(biggest * values / largest, 1.5)
    axes.scatter(clients, labels, s=area, color=BLUE, linewidths=0, zorder=2)
    axes.grid(True, color="#E6E6E6", linewidth=0.6, zorder=0)
    for value in sorted({largest, max(1, largest // 4)}, reverse=True):
        axes.scatter([], [], s=biggest * value / largest, color=BLUE, linewidths=0, label=f"{value:,} examples")
    axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    axes.set_xlim(-0.7, len(table.counts) - 0.3)


def _map(axes: Axes, table: Table) -> None:
    shares = _shares(table.counts)[table.order]
    edges = _edges(len(shares))
    columns = np.add.reduceat(shares, edges[:-1], axis=0) / np.diff(edges)[:, None]
    mesh = axes.pcolormesh(edges, np.arange(len(table.names) + 1) - 0.5, columns.T, cmap="Blues", vmin=0, rasterized=True)
    bar = axes.figure.colorbar(mesh, ax=axes, location="bottom", aspect=50, shrink=0.5, pad=0.02)
    bar.set_label("share of the label in the client's examples", fontsize=8)
    bar.ax.tick_params(labelsize=8)
    axes.set_xlim(0, len(shares))


def _edges(clients: int) -> Ints:
    columns = min(clients, COLUMNS)
    return np.arange(columns + 1, dtype=np.int64) * clients // columns


def _sizes(axes: Axes, table: Table) -> None:
    train = table.counts.sum(axis=1)[table.order].astype(np.float64)
    test = table.test[table.order].astype(np.float64)
    if len(train) > _SINGLE:
        edges = _edges(len(train))
        train, test = (np.add.reduceat(part, edges[:-1]) / np.diff(edges) for part in (train, test))
        axes.stairs(train, edges, fill=True, color=BLUE, label="training")
        if test.any():
            axes.stairs(train + test, edges, baseline=train, fill=True, color=AMBER, label="own test")
    else:
        axes.bar(np.arange(len(train)), train, color=BLUE, width=0.75, label="training")
        if test.any():
            axes.bar(np.arange(len(train)), test, bottom=train, color=AMBER, width=0.75, label="own test")
    if test.any():
        axes.legend(fontsize=7, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.95), borderpad=0)
    axes.set_ylabel("examples", fontsize=8)
    _bare(axes, "x")


def _label_bars(axes: Axes, table: Table) -> None:
    axes.barh(np.arange(len(table.names)), table.counts.sum(axis=0), color=MUTED, height=0.75)
    axes.set_xlabel("examples", fontsize=8)
    axes.locator_params(axis="x", nbins=3)
    _bare(axes, "y")


def _bare(axes: Axes, shared: str) -> None:
    quiet(axes, "none", size=8)
    axes.tick_params(axis="x" if shared == "x" else "y", labelbottom=False, labelleft=False, length=0)


def _axes(axes: Axes, table: Table) -> None:
    clients, labels = table.counts.shape
    step = -(-labels // 30)
    axes.set_yticks(np.arange(0, labels, step), [table.names[i] for i in range(0, labels, step)], fontsize=8)
    axes.set_ylim(labels - 0.4, -0.6)
    axes.set_ylabel("label", fontsize=9)
    if clients > _SINGLE:
        axes.set_xlabel("clients, ordered by most frequent label", fontsize=9)
    else:
        every = 1 if clients <= 25 else 5
        axes.set_xticks(np.arange(0, clients, every))
        axes.set_xlabel("client", fontsize=9)
    axes.tick_params(labelsize=8)


def _mark_curious(axes: Axes, above: Axes, partition: Partition, table: Table) -> None:
    if "curious" not in partition.extras:
        return
    many = len(table.order) > _SINGLE
    place = float(np.flatnonzero(table.order == int(partition.extras["curious"]))[0]) + (0.5 if many else 0.0)
    for beside in (place - 0.5, place + 0.5):
        for each in (axes, above):
            each.axvline(beside, color=AMBER, linewidth=1.0, zorder=3)
    above.annotate("curious client", (place, 1.0), xycoords=("data", "axes fraction"), fontsize=8, ha="center", va="bottom")


def _title(partition: Partition, table: Table) -> str:
    sizes = table.counts.sum(axis=1)
    least, most = int(sizes.min()), int(sizes.max())
    each = f"{least:,}" if least == most else f"{least:,} to {most:,}"
    return (
        f"{partition.kind} (seed {partition.seed})\n{len(sizes):,} clients, {int(sizes.sum()):,} training examples, {each} each"
    )
