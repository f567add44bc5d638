"""A grid of runs: cells side by side, one process a core; an interrupted grid continues, finished cells are not repeated.

A cell is an ordinary run directory under `cells/`; what it holds decides whether it is finished, begun or waiting.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fedveil.errors import ConfigError
from fedveil.studies.grid.cell import Cell, CellState, Listener, state_of
from fedveil.studies.grid.grid_directory import check_names, locked, remember
from fedveil.studies.grid.run_cell import cell_job
from fedveil.studies.grid.schedule import Pace
from fedveil.studies.worker_pool import Job, Message, Workers
from fedveil.training.cores import available_cores


def run_grid(
    cells: Sequence[Cell],
    out: str | Path,
    jobs: int | None = None,
    listener: Listener | None = None,
) -> list[CellState]:
    """Run every cell that is not finished and return the states of all, in the order of `cells`; a failed cell stops no other.

    Args:
        out: the grid's directory: new, empty, or that of a grid whose finished and begun cells are kept.
        jobs: cells at a time; by default the cores that this process may use.
        listener: hears of every change.

    Raises:
        ConfigError: impossible names; a directory that is no grid or is in use; a cell that was run with another configuration.
    """
    listener = listener or Listener()
    count = available_cores() if jobs is None else jobs
    if count < 1:
        raise ConfigError(f"jobs must be at least 1, got {count}")
    check_names([cell.name for cell in cells])
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
        score = state.score if measured is None else float(measured)
        return replace(state, rounds=round_index + 1, seconds=state.seconds + seconds, score=score), seconds
    if message["event"] == "done":
        try:
            return state_of(state.cell, folder), None
        except ConfigError as problem:
            return replace(state, state="failed", error=str(problem)), None
    return replace(state, state="failed", error=str(message["error"])), None
