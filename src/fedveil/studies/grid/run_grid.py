"""A grid of runs: cells side by side, one process a core; an interrupted grid continues, finished cells are not repeated.

A cell is an ordinary run directory under `cells/`; what it holds decides whether it is finished, begun or waiting.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from fedveil.configuration.config import Config, load_config
from fedveil.engines.pool import available_cores
from fedveil.errors import ConfigError
from fedveil.run.recorded_run import read_run
from fedveil.run.resume import begun, refuse_earlier, same_run
from fedveil.run.run_directory import write_json
from fedveil.statement.statement import Statement
from fedveil.statement.statement_json import from_dict
from fedveil.studies.grid.run_cell import cell_job
from fedveil.studies.grid.schedule import Pace
from fedveil.studies.worker_pool import Job, Message, Workers

FORMAT = "fedveil-grid/1"
LOCK_SECONDS = 3.0
"""So long a grid waits for the workers of one that was just killed in the same directory."""

State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Args:
        name: relative directory, for instance `dp-fedavg/eps-2/seed-1`. config: of the run; its engine is always `inline`.
        labels: where the cell lies on the grid's axes.
    """

    name: str
    config: Config
    labels: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True)
class CellState:
    """How far a cell has come.

    Args:
        path: the run directory. rounds, total: finished and planned rounds. seconds: training took so far.
        accuracy: the latest test accuracy, in [0, 1], or None. error: why the cell failed.
        summary, statement: of the run directory, once done.
    """

    cell: Cell
    path: Path
    state: State
    rounds: int = 0
    total: int = 0
    seconds: float = 0.0
    accuracy: float | None = None
    error: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    statement: Statement | None = None

    @property
    def ended(self) -> str:
        """Why a finished run stopped before its last round, or an empty string."""
        return str(self.summary["ended"]) if self.state == "done" and self.rounds < self.total else ""


def run_grid(
    cells: Sequence[Cell],
    out: str | Path,
    jobs: int | None = None,
    on_start: Callable[[Sequence[CellState]], None] | None = None,
    on_change: Callable[[CellState, float | None], None] | None = None,
) -> list[CellState]:
    """Run every cell that is not finished and return the states of all, in the given order; a failed cell stops no other.

    Args:
        out: the grid's directory: new, empty, or that of a grid whose finished and begun cells are kept.
        jobs: cells at a time; by default the cores that this process may use.
        on_start: called with the states before anything runs.
        on_change: called with each changed cell (a finished round, done, failed), and with the seconds that the whole grid is
            expected to need from now on, or None while nothing was measured.

    Raises:
        ConfigError: impossible names; a directory that is no grid or is in use; a cell that was run with another configuration.
    """
    count = available_cores() if jobs is None else jobs
    if count < 1:
        raise ConfigError(f"jobs must be at least 1, got {count}")
    _check_names([cell.name for cell in cells])
    folder = Path(out)
    with _locked(folder) as lock:
        states = {cell.name: state_of(cell, folder) for cell in cells}
        _remember(folder, states.values())
        if on_start is not None:
            on_start(list(states.values()))
        pace = Pace([(s.cell.config, s.rounds, s.seconds) for s in states.values()])
        with closing(_changes(states, pace, count, folder, lock)) as changes:
            for changed, measured in changes:
                before, states[changed.cell.name] = states[changed.cell.name], changed
                if changed.state != before.state:
                    _remember(folder, states.values())
                if measured is not None:
                    pace.measure(changed.cell.config, 1, measured)
                if on_change is not None:
                    left = [(s.cell.config, s.total - s.rounds) for s in states.values() if s.state in ("waiting", "running")]
                    on_change(changed, pace.left(left, count))
    return list(states.values())


def state_of(cell: Cell, out: str | Path) -> CellState:
    """The state of a cell as its directory tells it; a begun cell counts as waiting.

    Raises:
        ConfigError: the directory belongs to another configuration, or cannot be read.
    """
    path = Path(out) / "cells" / cell.name
    state = CellState(cell, path, "waiting", total=cell.config.training.rounds)
    if not begun(path):
        return state
    refuse_earlier(path)
    same_run(load_config(path / "config.toml"), cell.config, path)
    if not (path / "history.csv").exists():
        return _finished(state) if (path / "summary.json").exists() else state
    history = read_run(path).history
    accuracy = next((float(r["test_accuracy"]) for r in reversed(history) if r.get("test_accuracy") is not None), None)
    seconds = sum(float(r.get("seconds") or 0.0) for r in history)
    state = replace(state, rounds=min(len(history), state.total), seconds=seconds, accuracy=accuracy)
    return _finished(state) if (path / "summary.json").exists() else state


def _finished(state: CellState) -> CellState:
    try:
        summary = json.loads((state.path / "summary.json").read_text())
        statement = from_dict(json.loads((state.path / "statement.json").read_text()))
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot read the finished run in {state.path}: {problem}; move it away to run it anew") from problem
    return replace(state, state="done", summary=summary, statement=statement)


# --- the work -----------------------------------------------------------------------------------------------------------


def _changes(
    states: Mapping[str, CellState], pace: Pace, count: int, folder: Path, lock: int
) -> Generator[tuple[CellState, float | None], None, None]:
    """Every change of every cell, with the seconds of the round where it is one; the caller keeps `states` up to date."""
    waiting = [name for name, s in states.items() if s.state == "waiting"]
    if not waiting:
        return

    def longest() -> Job | None:
        if not waiting:
            return None
        name = max(waiting, key=lambda n: pace.expected(states[n].cell.config, states[n].total - states[n].rounds))
        waiting.remove(name)
        return cell_job(name, states[name].cell.config, states[name].path)

    with Workers(min(count, len(waiting)), folder / "grid.log", lock) as workers:
        for name, message in workers.run(longest):
            yield _after(states[name], message, folder)


def _after(state: CellState, message: Message, folder: Path) -> tuple[CellState, float | None]:
    """The cell after a worker's message."""
    if message["event"] == "started":
        return replace(state, state="running"), None
    if message["event"] == "progress":
        round_index, seconds, measured = message["value"]
        accuracy = state.accuracy if measured is None else float(measured)
        return replace(state, rounds=round_index + 1, seconds=state.seconds + seconds, accuracy=accuracy), seconds
    if message["event"] == "done":
        try:
            return state_of(state.cell, folder), None
        except ConfigError as problem:
            return replace(state, state="failed", error=str(problem)), None
    return replace(state, state="failed", error=str(message["error"])), None


# --- the directory ------------------------------------------------------------------------------------------------------


def _check_names(names: Sequence[str]) -> None:
    if not names:
        raise ConfigError("a grid needs at least one cell")
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or not path.parts:
            raise ConfigError(f"a cell is named by a relative directory such as 'dp-fedavg/eps-2/seed-1', not {name!r}")
    if len(set(names)) < len(names):
        raise ConfigError(f"a cell is named twice: {', '.join(sorted({n for n in names if names.count(n) > 1}))}")
    if inside := [(a, b) for a in names for b in names if b.startswith(f"{a}/")]:
        raise ConfigError(f"cell {inside[0][1]!r} would lie in the run directory of cell {inside[0][0]!r}: give them other names")


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Hold the directory for this grid and its workers; the lock ends with the last of them, however they end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "grid.json").exists() and any(not p.name.startswith("grid.") for p in folder.iterdir()):
            raise ConfigError(f"{folder} is not empty and holds no grid: choose another --out")
        lock = os.open(folder / "grid.lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as problem:
        raise ConfigError(f"cannot write the grid's directory {folder}: {problem.strerror}; choose another --out") from problem
    try:
        _take(lock, folder)
        yield lock
    finally:
        os.close(lock)


def _take(lock: int, folder: Path) -> None:
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > until:
                raise ConfigError(
                    f"another grid is running in {folder}: wait until it has ended, or choose another --out"
                ) from None
            time.sleep(0.05)


def _remember(folder: Path, states: Iterable[CellState]) -> None:
    """Write what the grid is and how far it has come (`grid.json`); cells of earlier, smaller grids are kept."""
    path = folder / "grid.json"
    rows = {row["name"]: row for row in _remembered(path)}
    for s in states:
        row = {"name": s.cell.name, "labels": dict(s.cell.labels), "state": s.state, "rounds": s.rounds, "total": s.total}
        rows[s.cell.name] = {**row, **({"error": s.error} if s.error else {})}
    write_json(path, {"format": FORMAT, "cells": list(rows.values())})


def _remembered(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    try:
        value = json.loads(path.read_text())
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}")
        return list(value["cells"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(f"{path} is not what a grid leaves ({problem}): choose another --out") from problem
