"""The work of a recipe: runs side by side, then measurements; what was made before is found again by its configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.configuration.config import Config, without_free_keys
from fedveil.engines.pool import available_cores
from fedveil.run.run_directory import plain
from fedveil.studies.grid.run_grid import Cell, CellState, run_grid
from fedveil.studies.reproduce.cells import Job
from fedveil.studies.reproduce.collect import Measured
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe import Recipe
from fedveil.studies.reproduce.recipe_tasks import Task, all_of


@dataclass(frozen=True)
class Watch:
    """Who is told of what goes on.

    Args:
        plan: before anything runs, the recipe, the configurations, and the data sets that cannot be had with what to do.
        start, change: see `run_grid`. measure: before each measurement: how many are done, of how many, and of what.
    """

    plan: Callable[[Recipe, list[Config], Mapping[str, str]], None] = lambda recipe, configs, lacking: None
    start: Callable[[Sequence[CellState]], None] = lambda states: None
    change: Callable[[CellState, float | None], None] = lambda state, left: None
    measure: Callable[[int, int, str], None] = lambda done, total, what: None


@dataclass(frozen=True)
class Found:
    """A measurement or why there is none, the folder of its files, and why its run ended before the last round if it did."""

    measured: Measured | str
    folder: str
    ended: str = ""


def measured(
    recipe: Recipe,
    todo: Mapping[tuple[int, int], Job],
    root: Path,
    jobs: int | None,
    watch: Watch,
) -> dict[tuple[int, int], Found]:
    """Train what needs training, then measure, `jobs` at a time (by default as many as there are cores)."""
    count = available_cores() if jobs is None else jobs
    measure = MEASURES[recipe.measure["name"]]
    names = {key: _directory(job.config) for key, job in todo.items()}
    states: dict[str, CellState] = {}
    if measure.trains and todo:
        cells = {names[key]: Cell(names[key], job.config) for key, job in todo.items()}
        states = {s.cell.name: s for s in run_grid(list(cells.values()), root / "runs", count, watch.start, watch.change)}
    name, tasks, found = recipe.measure["name"], {}, {}
    for key, job in todo.items():
        state = states.get(names[key])
        if state is not None and state.state == "failed":
            found[key] = Found(f"failed: {state.error}", str(state.path))
            continue
        folder = root / "measured" / names[key] / f"{name}-{_digest(job.options)}"
        tasks[key] = Task(name, job.config, job.options, None if state is None else state.path, folder)
    tell, log = partial(_tell, watch, len(tasks)), root / "measured" / "workers.log"
    for (key, task), series in zip(tasks.items(), all_of(list(tasks.values()), count, log, tell), strict=True):
        ended = states[names[key]].ended if names[key] in states else ""
        found[key] = Found(series, str(task.run if name == "run" else task.folder), ended)
    return found


def _tell(watch: Watch, total: int, done: int, task: Task) -> None:
    watch.measure(done, total, f"{task.name} of {task.config.method.name}")


def _directory(config: Config) -> str:
    """One directory for each configuration, whatever row asks for it."""
    deciding = plain(without_free_keys(config.model_dump(mode="json")))
    return f"{config.method.name}-{config.data.name}-{_digest(deciding)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
