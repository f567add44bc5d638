"""Measurements of a recipe's rows, several at a time; what was measured before is read from its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.configuration.config import Config
from fedveil.errors import FedveilError
from fedveil.run.run_directory import write_text
from fedveil.studies.reproduce.collect import Measured
from fedveil.studies.reproduce.measurements import MEASURES
from fedveil.studies.worker_pool import Job, Workers

QUICK = ("run", "uplink", "statement", "partition")
"""Measurements that are not worth a process of their own."""


@dataclass(frozen=True)
class RecipeTask:
    """One measurement: its name, configuration and options, the run that it is of, and the folder in which it is kept."""

    name: str
    config: Config
    options: dict[str, Any]
    run: Path | None
    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "series.json"


def made(task: RecipeTask) -> Measured:
    """The measurement, from its file if it was made before."""
    if task.name != "run" and task.file.exists():
        saved: dict[str, list[tuple[int, float]]] = json.loads(task.file.read_text(encoding="utf-8"))
        return saved
    series = MEASURES[task.name].series(task.config, task.run, task.folder, **task.options)
    if task.name != "run":
        task.folder.mkdir(parents=True, exist_ok=True)
        write_text(task.file, json.dumps(series))
    return series


def tried(task: RecipeTask) -> Measured | str:
    """The measurement, or why it failed."""
    try:
        return made(task)
    except FedveilError as problem:
        return f"failed: {problem}"


Announce = Callable[[int, RecipeTask], None]


def all_of(tasks: Sequence[RecipeTask], jobs: int, log: Path, announce: Announce) -> list[Measured | str]:
    """All measurements in order; those that take long in up to `jobs` processes.

    Args:
        log: what these processes print. announce: called before each with how many are done.
    """
    slow = {str(task.folder): task for task in tasks if task.name not in QUICK and not task.file.exists()}
    problems = _apart(slow, min(len(slow), jobs), log, announce) if min(len(slow), jobs) > 1 else {}
    found: list[Measured | str] = []
    for i, task in enumerate(tasks):
        announce(i, task)
        found.append(problems.get(str(task.folder)) or tried(task))
    return found


def _apart(slow: Mapping[str, RecipeTask], count: int, log: Path, announce: Announce) -> dict[str, str]:
    """Make measurements in so many processes, which leave them in their files; returns why some failed."""
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
    """Make the measurement that a job describes, and leave it in its file."""
    run = None if arguments["run"] is None else Path(arguments["run"])
    made(
        RecipeTask(
            arguments["name"], Config.model_validate(arguments["config"]), arguments["options"], run, Path(arguments["folder"])
        )
    )
