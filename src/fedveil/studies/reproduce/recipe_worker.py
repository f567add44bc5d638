"""Measurements of a recipe's rows, several at a time; this module is also the program that makes one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.configuration.config import Config
from fedveil.errors import FedveilError
from fedveil.run.run_directory import write_text
from fedveil.studies.reproduce.collect import Measured
from fedveil.studies.reproduce.measurements import MEASURES

QUICK = ("run", "statement", "partition")
"""Measurements that are not worth a process of their own."""


@dataclass(frozen=True)
class Task:
    """One measurement: its name, configuration and options, the run that it is of, and the folder in which it is kept."""

    name: str
    config: Config
    options: dict[str, Any]
    run: Path | None
    folder: Path

    @property
    def file(self) -> Path:
        """Where the result is kept."""
        return self.folder / "series.json"


def made(task: Task) -> Measured:
    """The measurement, from its file if it was made before."""
    if task.name != "run" and task.file.exists():
        saved: dict[str, list[tuple[int, float]]] = json.loads(task.file.read_text())
        return saved
    series = MEASURES[task.name].series(task.config, task.run, task.folder, **task.options)
    if task.name != "run":
        task.folder.mkdir(parents=True, exist_ok=True)
        write_text(task.file, json.dumps(series))
    return series


def tried(task: Task) -> Measured | str:
    """The measurement, or why it failed."""
    try:
        return made(task)
    except FedveilError as problem:
        return f"failed: {problem}"


def all_of(tasks: Sequence[Task], jobs: int, tell: Callable[[int, Task], None]) -> list[Measured | str]:
    """All measurements in order; those that take long in up to `jobs` processes. tell: how many are done, before each."""
    slow = [task for task in tasks if task.name not in QUICK and not task.file.exists()]
    alone = {str(task.folder): task for task in slow}
    children: list[subprocess.Popen[str]] = []
    problems: dict[str, str] = {}
    if min(len(alone), jobs) > 1:
        pool = ThreadPoolExecutor(min(len(alone), jobs))
        try:
            futures = {folder: pool.submit(_apart, task, children) for folder, task in alone.items()}
            for i, (folder, future) in enumerate(futures.items()):
                tell(i, alone[folder])
                problems[folder] = future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in children:
                child.terminate()
    found: list[Measured | str] = []
    for i, task in enumerate(tasks):
        tell(i, task)
        found.append(problems.get(str(task.folder)) or tried(task))
    return found


def _apart(task: Task, children: list[subprocess.Popen[str]]) -> str:
    """Make the measurement in a process of its own, which leaves it in its file; returns why it failed, or nothing."""
    order = {
        "name": task.name,
        "config": task.config.model_dump(mode="json"),
        "options": task.options,
        "run": None if task.run is None else str(task.run),
        "folder": str(task.folder),
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "fedveil.studies.reproduce.recipe_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    children.append(child)
    _, errors = child.communicate(json.dumps(order))
    if child.returncode == 0:
        return ""
    last = (errors.strip().splitlines() or [f"its process ended with {child.returncode}"])[-1]
    return last if last.startswith("failed") else f"failed: {last}"


def main() -> None:
    """Make the measurement that stdin describes; a failure is one line on stderr and exit status 2."""
    order = json.load(sys.stdin)
    run = None if order["run"] is None else Path(order["run"])
    task = Task(order["name"], Config.model_validate(order["config"]), order["options"], run, Path(order["folder"]))
    outcome = tried(task)
    if isinstance(outcome, str):
        print(outcome.replace("\n", " "), file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
