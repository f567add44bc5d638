"""The directory of a grid: the names of its cells, its lock, and `grid.json`, which says how far it has come."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from fedveil.errors import ConfigError
from fedveil.run.run_directory import write_json
from fedveil.studies.grid.cell import CellState

FORMAT = "fedveil-grid/1"
LOCK_SECONDS = 3.0
"""So long a grid waits for the workers of one that was just killed in the same directory."""


def check_names(names: Sequence[str]) -> None:
    """Refuse names of cells that are no relative directories, or would lie in one another."""
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
def locked(folder: Path) -> Iterator[int]:
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


def remember(folder: Path, states: Iterable[CellState]) -> None:
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
        value = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}")
        return list(value["cells"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ConfigError(f"{path} is not what a grid leaves ({problem}): choose another --out") from problem
