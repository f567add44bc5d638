"""The work of a recipe: runs and measurements in parallel; results of earlier calls are reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.errors import FedveilError
from fedveil.experiment.config import Config, without_free_keys
from fedveil.experiment.run_directory import plain, write_text
from fedveil.studies.cell import Cell, CellState, Listener
from fedveil.studies.grid import run_grid
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.reproduce.recipe import Measured, Recipe
from fedveil.studies.reproduce.recipe_files import RowJob
from fedveil.studies.worker_pool import Job, Workers
from fedveil.training.cores import available_cores

_QUICK = ("run", "uplink", "statement", "partition")
"""Measurements that are too short for a separate process."""


@dataclass(frozen=True)
class RecipeTask:
    """One measurement: its name, configuration and options, its run, and the folder of its results."""

    name: str
    config: Config
    options: dict[str, Any]
    run: Path | None
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "series.json"


def made(task: RecipeTask) -> Measured:
    """Return the measurement, from its file if it exists."""
    if task.name != "run" and task.file.exists():
        saved: dict[str, list[tuple[int, float]]] = json.loads(task.file.read_text(encoding="utf-8"))
        return saved
    series = MEASURES[task.name].series(task.config, task.run, task.folder, **task.options)
    if task.name != "run":
        task.folder.mkdir(parents=True, exist_ok=True)
        write_text(task.file, json.dumps(series))
    return series


def tried(task: RecipeTask) -> Measured | str:
    """Return the measurement, or why it failed."""
    try:
        return made(task)
    except FedveilError as problem:
        return f"failed: {problem}"


Announce = Callable[[int, RecipeTask], None]


def _all_of(tasks: Sequence[RecipeTask], jobs: int, log: Path, announce: Announce) -> list[Measured | str]:
    """Return all measurements in order; long ones run in up to `jobs` processes.

    Args:
        log: file for the output of these processes. announce: called before each with the number of finished ones.
    """
    slow = {str(task.folder): task for task in tasks if task.name not in _QUICK and not task.file.exists()}
    problems = _apart(slow, min(len(slow), jobs), log, announce) if min(len(slow), jobs) > 1 else {}
    found: list[Measured | str] = []
    for i, task in enumerate(tasks):
        announce(i, task)
        found.append(problems.get(str(task.folder)) or tried(task))
    return found


def _apart(slow: Mapping[str, RecipeTask], count: int, log: Path, announce: Announce) -> dict[str, str]:
    """Make measurements in `jobs` processes, which write them to files; return why some failed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    waiting = iter([_job(name, task) for name, task in slow.items()])
    problems, done = {}, 0
    with Workers(count, log) as workers:
        for name, message in workers.run(lambda: next(waiting, None)):
            if message["event"] == "started":
                announce(done, slow[name])
                continue
            done += 1
            if message["event"] == "failed":
                problems[name] = f"failed: {message['error']}"
    return problems


def _job(name: str, task: RecipeTask) -> Job:
    arguments = {
        "name": task.name,
        "config": task.config.model_dump(mode="json"),
        "options": task.options,
        "run": None if task.run is None else str(task.run),
        "folder": str(task.folder),
    }
    return Job(name, f"{__name__}:make", arguments)


def make(arguments: dict[str, Any], report: Callable[[Any], None]) -> None:
    """Make the measurement that a job describes, and write it to its file."""
    run = None if arguments["run"] is None else Path(arguments["run"])
    made(
        RecipeTask(
            arguments["name"], Config.model_validate(arguments["config"]), arguments["options"], run, Path(arguments["folder"])
        )
    )


class RecipeListener(Listener):
    """A listener to the work of a recipe, which ignores all events."""

    def planned(self, recipe: Recipe, configs: Sequence[Config], lacking: Mapping[str, str]) -> None:
        """Called before anything runs.

        Args:
            configs: of the runs. lacking: the unavailable data sets, with what to do.
        """

    def measuring(self, done: int, total: int, what: str) -> None:
        """Called before each measurement: number of finished ones, total, and description."""


@dataclass(frozen=True)
class MeasuredRow:
    """A measurement or why there is none, the folder of its files, and why its run ended early, if so."""

    measured: Measured | str
    folder: str
    ended: str = ""


def measured(
    recipe: Recipe, todo: Mapping[tuple[int, int], RowJob], root: Path, jobs: int | None, listener: RecipeListener
) -> dict[tuple[int, int], MeasuredRow]:
    """Train the runs, then measure, `jobs` in parallel (by default the number of cores)."""
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
    for (key, task), series in zip(tasks.items(), _all_of(list(tasks.values()), count, log, announce), strict=True):
        ended = states[names[key]].ended if names[key] in states else ""
        found[key] = MeasuredRow(series, str(task.run if name == "run" else task.folder), ended)
    return found


def _announce(listener: RecipeListener, total: int, done: int, task: RecipeTask) -> None:
    listener.measuring(done, total, f"{task.name} of {task.config.method.name}")


def _directory(config: Config) -> str:
    """Return the directory of a configuration, common to all rows with that configuration."""
    deciding = plain(without_free_keys(config.resolved()))
    return f"{config.method.name}-{config.data.name}-{_digest(deciding)}"


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]
