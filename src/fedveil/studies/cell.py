"""A cell of a grid, how far it has come, and who listens."""

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
from fedveil.experiment.resume import begun, refuse_earlier, same_run
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
        config: of the run; its engine is `inline` unless it says `cuda` or `batched`.
        labels: where the cell lies on the grid's axes.
    """

    name: str
    config: Config
    labels: Mapping[str, str | float] = field(default_factory=dict)

    @property
    def main(self) -> Column:
        """The main metric of its task."""
        return task_of(self.config).main


@dataclass(frozen=True)
class CellState:
    """How far a cell has come.

    Args:
        path: the run directory. rounds, total: finished and planned rounds. seconds: training took so far.
        score: the latest value of the main metric of its task, or None. error: why the cell failed.
        summary, statement: of the run directory, once done.
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
        """Why a finished run stopped before its last round, or an empty string."""
        return str(self.summary["ended"]) if self.state == "done" and self.rounds < self.total else ""


class Listener:
    """Follows the runs of a study; does nothing by itself."""

    def started(self, states: Sequence[CellState]) -> None:
        """Before anything runs.

        Args:
            states: of all cells.
        """

    def changed(self, state: CellState, left: float | None) -> None:
        """A cell started, finished a round, is done or has failed.

        Args:
            left: seconds that the whole grid is expected to need from now on, or None while nothing was measured.
        """


def as_begun(config: Config, saved: Config) -> Config:
    """What a begun cell goes on with: one client at a time, if it was begun so, since its statement assumes nothing else."""
    engine = engine_of(config)
    if engine in TOGETHER and saved.run.engine not in TOGETHER:
        engine = saved.run.engine
    return config.model_copy(update={"run": config.run.model_copy(update={"engine": engine})})


def engine_of(config: Config) -> str:
    """The engine of a cell: one process, which cannot give up a client; `cuda` and `batched` are kept."""
    return config.run.engine if config.run.engine in TOGETHER else "inline"


def state_of(cell: Cell, out: str | Path) -> CellState:
    """The state of a cell as its directory has it; a begun cell counts as waiting.

    Raises:
        ConfigError: the directory belongs to another configuration, or cannot be read.
    """
    path = Path(out) / "cells" / cell.name
    state = CellState(cell, path, "waiting", total=cell.config.training.rounds)
    if not begun(path):
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
        raise ConfigError(f"cannot read the finished run in {state.path}: {problem}; move it away to run it anew") from problem
    return replace(state, state="done", summary=summary, statement=statement)
