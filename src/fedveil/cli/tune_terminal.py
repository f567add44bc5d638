"""Tuning in the terminal: a line for each finished run, the table of settings at the end."""

from __future__ import annotations

from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedveil.studies.grid.cell import CellState, Listener
from fedveil.studies.tune.proxy_grid import TuningSpec, overrides
from fedveil.studies.tune.tuning import Tuned, tune_on


class Lines(Listener):
    """A line for each run that ends."""

    def __init__(self) -> None:
        self.done = 0

    def changed(self, state: CellState, left: float | None) -> None:
        if state.state in ("done", "failed"):
            self.done += 1
            score = state.error or ("" if state.score is None else state.cell.main.text(state.score))
            typer.echo(f"run {self.done}: {state.cell.name} {score}", err=True)


def tune_with_table(spec: TuningSpec, out: Path, jobs: int | None) -> None:
    """Run the grid, print all settings, best first, and what was chosen."""
    tuned = tune_on(spec, out, jobs, Lines())
    Console().print(_table(spec, tuned))
    runs = len(tuned.trials) * spec.seeds
    typer.echo(
        f"{runs} runs on {spec.proxy}, which is public: nothing of {spec.config.data.name} was used, and nothing is charged.\n"
        f"chosen: {' '.join(f'--set {item}' for item in overrides(tuned.trials[0].setting))}\n"
        f"{out / 'tuned.toml'} has the configuration with these keys: fedveil run {out / 'tuned.toml'}"
    )


def _table(spec: TuningSpec, tuned: Tuned) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in spec.grid:
        table.add_column(key)
    table.add_column(f"{tuned.metric.title} on {spec.proxy}", justify="right")
    for trial in tuned.trials:
        score = f"failed: {trial.error}" if trial.error else tuned.metric.text(trial.mean)
        table.add_row(*(escape(f"{value}") for value in trial.setting.values()), escape(score))
    return table
