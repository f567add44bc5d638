"""A cell of a grid, its state, and the listener of a study."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import read_config
from fedveil.experiment.public_setting import task_of
from fedveil.experiment.public_values import TOGETHER
from fedveil.experiment.recorded_run import read_run
from fedveil.experiment.resume import has_begun, refuse_earlier, same_run
from fedveil.statement.statement import Statement
from fedveil.statement.statement_layout import read_statement
from fedveil.studies.statistics import last
from fedveil.tasks.task import Column

State = Literal["waiting", "running", "done", "failed"]


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Args:
        name: relative directory, for instance `dp-fedavg/eps-2/seed-1`.
        config: configuration of the run; other engines than `cuda` and `batched` are replaced by `inline`.
        labels: position of the cell on the axes of the grid.
    """

    name: str
    config: Config
    labels: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def main(self) -> Column:
        """The main metric of the task."""
        return task_of(self.config).main


@dataclass(frozen=True)
class CellState:
    """The state of a cell.

    Args:
        path: the run directory. rounds, total: finished and planned rounds. seconds: training time so far.
        score: the latest value of the main metric of its task, or None. error: why the cell failed.
        summary, statement: of the finished run.
    """

    cell: Cell
    path: Path
    state: State
    rounds: int = 0
    total: int = 0
    seconds: float = 0.0
    score: float | None = None
    error: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)
    statement: Statement | None = None

    @property
    def ended(self) -> str:
        """Return the reason why a finished run stopped before its last round, or an empty string."""
        return str(self.summary["ended"]) if self.state == "done" and self.rounds < self.total else ""


class Listener:
    """A listener to the runs of a study, which ignores all events."""

    def started(self, states: Sequence[CellState]) -> None:
        """Called before anything runs.

        Args:
            states: of all cells.
        """

    def changed(self, state: CellState, left: float | None) -> None:
        """Called when a cell starts, finishes a round, is done or fails.

        Args:
            left: expected remaining seconds of the whole grid, or None before the first measurement.
        """


def as_begun(config: Config, saved: Config) -> Config:
    """Return the configuration with which a begun cell continues: one client at a time if its statement assumes that."""
    engine = engine_of(config)
    if engine in TOGETHER and saved.run.engine not in TOGETHER:
        engine = saved.run.engine
    return config.model_copy(update={"run": config.run.model_copy(update={"engine": engine})})


def engine_of(config: Config) -> str:
    """Return the engine of a cell: `cuda` or `batched` as configured, else one process without time limits for clients."""
    return config.run.engine if config.run.engine in TOGETHER else "inline"


def state_of(cell: Cell, out: str | Path) -> CellState:
    """Return the state of a cell from its directory; a begun cell counts as waiting.

    Raises:
        ConfigError: the directory belongs to another configuration, or cannot be read.
    """
    path = Path(out) / "cells" / cell.name
    state = CellState(cell, path, "waiting", total=cell.config.training.rounds)
    if not has_begun(path):
        return state
    refuse_earlier(path)
    saved = read_config(path / "config.toml")
    same_run(saved, as_begun(cell.config, saved), path, but_model=True)
    if not (path / "history.csv").exists():
        return _finished(state) if (path / "summary.json").exists() else state
    data = read_run(path)
    history, score = data.history, last(data.history, data.declared.main.name)
    seconds = sum(float(r.get("seconds") or 0.0) for r in history)
    state = replace(state, rounds=min(len(history), state.total), seconds=seconds, score=score)
    return _finished(state) if (path / "summary.json").exists() else state


def _finished(state: CellState) -> CellState:
    try:
        summary = json.loads((state.path / "summary.json").read_text(encoding="utf-8"))
        statement = read_statement(state.path)
    except (OSError, ValueError) as problem:
        raise ConfigError(f"cannot read the finished run in {state.path}: {problem}; move it away to run it again") from problem
    return replace(state, state="done", summary=summary, statement=statement)
