"""A grid of runs: cells in worker processes, resumable, with an estimate of the time left.

A cell is an ordinary run directory under `cells/`; its contents tell whether it is finished, begun or waiting.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from fedveil.errors import ConfigError, FedveilError
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import read_config
from fedveil.experiment.given_paths import require_grid
from fedveil.experiment.public_setting import setting_of, task_of
from fedveil.experiment.resume import has_begun
from fedveil.experiment.run import run
from fedveil.experiment.run_directory import write_json
from fedveil.federation.history import columns_of
from fedveil.studies.cell import Cell, CellState, Listener, as_begun, engine_of, state_of
from fedveil.studies.worker_pool import Job, Message, Workers
from fedveil.training.cores import available_cores

FORMAT = "fedveil-grid/1"
LOCK_SECONDS = 3.0
"""Seconds that a grid waits for the workers of a killed grid in the same directory."""


def _check_names(names: Sequence[str]) -> None:
    """Refuse cell names that are not relative directories, or that are nested."""
    if not names:
        raise ConfigError("a grid needs at least one cell")
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or not path.parts:
            raise ConfigError(f"a cell is named by a relative directory such as 'dp-fedavg/eps-2/seed-1', not {name!r}")
    if len(set(names)) < len(names):
        raise ConfigError(
            f"a cell is named twice: {', '.join(sorted({n for n in names if names.count(n) > 1}))}; give each a name of its own"
        )
    if inside := [(a, b) for a in names for b in names if b.startswith(f"{a}/")]:
        raise ConfigError(f"cell {inside[0][1]!r} would lie in the run directory of cell {inside[0][0]!r}: give them other names")


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Lock the directory for this grid and its workers; the lock is released when the last process ends, even if killed."""
    try:
        require_grid(folder)
        folder.mkdir(parents=True, exist_ok=True)
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
    """Write the grid and its progress to `grid.json`; cells of earlier, smaller grids stay in it."""
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
        raise ConfigError(
            f"cannot read {path} as the list of a grid's runs ({problem}): restore the file, or choose another --out"
        ) from problem


class Pace:
    """The measured seconds per unit of work (an example that passes through the model).

    Args:
        measured: (configuration, rounds, seconds) of earlier runs.
    """

    def __init__(self, measured: Sequence[tuple[Config, int, float]] = ()) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._known: dict[int, tuple[Config, float, tuple[str, ...]]] = {}
        for config, rounds, seconds in measured:
            self.measure(config, rounds, seconds)

    def measure(self, config: Config, rounds: int, seconds: float) -> None:
        """Record the seconds that a number of rounds of a configuration took."""
        if rounds < 1:
            return
        work, alike = self._of(config)
        for key in alike:
            done, total = self._sums.get(key, (0.0, 0.0))
            self._sums[key] = done + rounds * work, total + seconds

    def expected(self, config: Config, rounds: int) -> float:
        """Return the expected seconds of a number of rounds by the most similar measured cells; before any, the work."""
        work, alike = self._of(config)
        done, total = next((self._sums[key] for key in alike if key in self._sums), (1.0, 1.0))
        return rounds * work * total / done

    def left(self, remaining: Sequence[tuple[Config, int]], jobs: int) -> float | None:
        """Return the seconds until all of this is done by `jobs` processes; None before the first measurement."""
        if not self._sums:
            return None
        each = [self.expected(config, rounds) for config, rounds in remaining]
        return max([sum(each) / jobs, *each])

    def _of(self, config: Config) -> tuple[float, tuple[str, ...]]:
        known = self._known.get(id(config))
        if known is None:
            self._known[id(config)] = known = (config, _work(config), _alike(config))
        return known[1:]


def _work(config: Config) -> float:
    """Return the examples that pass through the model in a round; 1 for an invalid configuration, whose cell fails at once."""
    try:
        s = setting_of(config)
        return float(s.cohort * s.local.steps_for(max(s.records, 1)) * s.local.batch_size)
    except FedveilError:
        return 1.0


def _alike(config: Config) -> tuple[str, ...]:
    """Return keys of similar cells, nearest first: equal except for seed and privacy, of the same method, all."""
    same = config.model_dump_json(exclude={"run": True, "privacy": True})
    return same, f"method {config.method.name}", ""


def cell_job(name: str, config: Config, path: Path) -> Job:
    """Return the job that runs this configuration in `path`, in one process without time limits for clients."""
    sections = config.model_dump(mode="json")
    sections["run"]["engine"], sections["training"]["client_timeout"] = engine_of(config), None
    return Job(name, f"{__name__}:run_cell", {"path": str(path), "config": sections})


def run_cell(arguments: dict[str, Any], report: Callable[[Any], None]) -> None:
    """Start or resume `config` in `path`; report (round, seconds, main metric or None) after each round."""
    path = Path(arguments["path"])
    resume = has_begun(path)
    if path.exists() and not resume:
        shutil.rmtree(path)

    config = Config.model_validate(arguments["config"])
    if resume:
        config = as_begun(config, read_config(path / "config.toml"))
    name = columns_of(task_of(config)).main.name

    def on_round(record: dict[str, Any]) -> None:
        report([record["round"], record["seconds"], record.get(name)])

    run(config, path, on_round, resume=resume)


def run_grid(
    cells: Sequence[Cell],
    out: str | Path,
    jobs: int | None = None,
    listener: Listener | None = None,
) -> list[CellState]:
    """Run every cell that is not finished and return the states of all, in the order of `cells`; failed cells stop no other.

    Args:
        out: the grid's directory: new, empty, or that of an earlier grid, whose finished and begun cells are used.
        jobs: cells in parallel; by default the cores that this process may use.
        listener: called for every change.

    Raises:
        ConfigError: a name is invalid, the directory is not that of a grid or is in use, or a cell was run with another
            configuration.
    """
    listener = listener or Listener()
    count = available_cores() if jobs is None else jobs
    if count < 1:
        raise ConfigError(f"jobs must be at least 1, got {count}")
    _check_names([cell.name for cell in cells])
    folder = Path(out)
    with locked(folder) as lock:
        states = {cell.name: state_of(cell, folder) for cell in cells}
        remember(folder, states.values())
        listener.started(list(states.values()))
        pace = Pace([(s.cell.config, s.rounds, s.seconds) for s in states.values()])
        with closing(_changes(states, pace, count, folder, lock)) as changes:
            for changed, measured in changes:
                before, states[changed.cell.name] = states[changed.cell.name], changed
                if changed.state != before.state:
                    remember(folder, states.values())
                if measured is not None:
                    pace.measure(changed.cell.config, 1, measured)
                left = [(s.cell.config, s.total - s.rounds) for s in states.values() if s.state in ("waiting", "running")]
                listener.changed(changed, pace.left(left, count))
    return list(states.values())


def _changes(
    states: Mapping[str, CellState], pace: Pace, count: int, folder: Path, lock: int
) -> Generator[tuple[CellState, float | None], None, None]:
    """Yield every change of every cell, with seconds for a finished round; the caller updates `states`."""
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
    """Return the state of a cell after a message of its worker."""
    if message["event"] == "started":
        return replace(state, state="running"), None
    if message["event"] == "progress":
        round_index, seconds, measured = message["value"]
        score = state.score if measured is None else float(measured)
        return replace(state, rounds=round_index + 1, seconds=state.seconds + seconds, score=score), seconds
    if message["event"] == "done":
        try:
            return state_of(state.cell, folder), None
        except ConfigError as problem:
            return replace(state, state="failed", error=str(problem)), None
    return replace(state, state="failed", error=str(message["error"])), None
