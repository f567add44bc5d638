"""The work of a recipe: runs side by side, then measurements; what was made before is found again by its configuration."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.configuration.config import Config, without_free_keys
from fedveil.run.run_directory import plain
from fedveil.studies.grid.cell import Cell, CellState, Listener
from fedveil.studies.grid.run_grid import run_grid
from fedveil.studies.reproduce.collect import Measured
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe import Recipe
from fedveil.studies.reproduce.recipe_rows import RowJob
from fedveil.studies.reproduce.recipe_tasks import RecipeTask, all_of
from fedveil.training.cores import available_cores


class RecipeListener(Listener):
    """Follows the work of a recipe; does nothing by itself."""

    def planned(self, recipe: Recipe, configs: Sequence[Config], lacking: Mapping[str, str]) -> None:
        """Before anything runs.

        Args:
            configs: what will run. lacking: the data sets that cannot be had, with what to do.
        """

    def measuring(self, done: int, total: int, what: str) -> None:
        """Before each measurement: how many are done, of how many, and of what."""


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement or why there is none, the folder of its files, and why its run ended before the last round if it did."""

    measured: Measured | str
    folder: str
    ended: str = ""


def measured(
    recipe: Recipe, todo: Mapping[tuple[int, int], RowJob], root: Path, jobs: int | None, listener: RecipeListener
) -> dict[tuple[int, int], MeasuredRow]:
    """Train what needs training, then measure, `jobs` at a time (by default as many as there are cores)."""
    count = available_cores() if jobs is None else jobs
    measure = MEASURES[recipe.measure["name"]]
    names = {key: _directory(job.config) for key, job in todo.items()}
    states: dict[str, CellState] = {}
    if measure.trains and todo:
        cells = {names[key]: Cell(names[key], job.config) for key, job in todo.items()}
        states = {s.cell.name: s for s in run_grid(list(cells.values()), root / "runs", count, listener)}
    name, tasks, found = recipe.measure["name"], {}, {}
    for key, job in todo.items():
        state = states.get(names[key])
        if state is not None and state.state == "failed":
            found[key] = MeasuredRow(f"failed: {state.error}", str(state.path))
            continue
        folder = root / "measured" / names[key] / f"{name}-{_digest(job.options)}"
        tasks[key] = RecipeTask(name, job.config, job.options, None if state is None else state.path, folder)
    announce, log = partial(_announce, listener, len(tasks)), root / "measured" / "workers.log"
    for (key, task), series in zip(tasks.items(), all_of(list(tasks.values()), count, log, announce), strict=True):
        ended = states[names[key]].ended if names[key] in states else ""
        found[key] = MeasuredRow(series, str(task.run if name == "run" else task.folder), ended)
    return found


def _announce(listener: RecipeListener, total: int, done: int, task: RecipeTask) -> None:
    listener.measuring(done, total, f"{task.name} of {task.config.method.name}")


def _directory(config: Config) -> str:
    """One directory for each configuration, whatever row asks for it."""
    deciding = plain(without_free_keys(config.resolved()))
    return f"{config.method.name}-{config.data.name}-{_digest(deciding)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
