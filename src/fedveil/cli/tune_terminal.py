"""Tuning in the terminal: a line for each finished run, the table of settings at the end."""

from __future__ import annotations

from pathlib import Path

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedveil.accounting.chosen_run import Selection
from fedveil.studies.grid.cell import CellState, Listener
from fedveil.studies.tune.looked_at import look_at_all
from fedveil.studies.tune.private_data import SearchSpec
from fedveil.studies.tune.private_search import private_search
from fedveil.studies.tune.proxy_grid import TuningSpec, overrides
from fedveil.studies.tune.tuning import Tuned, tune_on


class Lines(Listener):
    """A line for each run that ends. scores: with its score on the test set."""

    def __init__(self, *, scores: bool = True) -> None:
        self.done, self.scores = 0, scores

    def changed(self, state: CellState, left: float | None) -> None:
        if state.state in ("done", "failed"):
            self.done += 1
            score = state.error or ("" if state.score is None or not self.scores else state.cell.main.text(state.score))
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


def search_privately(spec: SearchSpec, out: Path, selection: Selection) -> None:
    """Search, and print what was released: nothing before the end, and nothing that tells how many runs there were."""
    typer.echo("searching; nothing is shown before the end, since it would tell how many runs there were", err=True)
    path, statement = private_search(spec, out, selection)
    typer.echo(f"{statement.notes[0]}\n{path} is the run: fedveil verify {path}, fedveil certify {path}")


def look_with_table(spec: SearchSpec, out: Path, jobs: int | None) -> None:
    """Run every setting on the private data, print all of them, best first, and what they cost together."""
    found = look_at_all(spec, out, jobs, Lines(scores=spec.score_noise is None))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in spec.grid:
        table.add_column(key)
    table.add_column("score by the clients, with noise" if spec.score_noise else "score on the test set", justify="right")
    for one in found:
        table.add_row(*(escape(f"{value}") for value in one.setting.values()), f"{one.score:.4g}")
    Console().print(table)
    statement = found[0].state.statement
    assert statement is not None
    typer.echo(f"{statement.notes[0]}\n{found[0].state.path} is the best of them: fedveil verify {found[0].state.path}")


def _table(spec: TuningSpec, tuned: Tuned) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in spec.grid:
        table.add_column(key)
    table.add_column(f"{tuned.metric.title} on {spec.proxy}", justify="right")
    for trial in tuned.trials:
        score = f"failed: {trial.error}" if trial.error else tuned.metric.text(trial.mean)
        table.add_row(*(escape(f"{value}") for value in trial.setting.values()), escape(score))
    return table
