"""A run in the terminal: progress during training, then accuracy, the privacy statement and the run's location."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedveil.errors import FedveilError, one_line
from fedveil.experiment.public_setting import task_of
from fedveil.experiment.result import Result
from fedveil.experiment.run import run
from fedveil.federation.history import ALL_FAILED
from fedveil.statement.statement_layout import render_brief, render_verdict
from fedveil.studies.twin import twin_directory

if TYPE_CHECKING:
    from fedveil.experiment.config import Config
    from fedveil.experiment.tracking import RunInfo, Status
    from fedveil.federation.history import Row
    from fedveil.studies.twin import Change

_WHOLE_RUN = 10 * 365 * 86400.0
"""Seconds over which the speed is estimated: all rounds so far, however long one takes. Rich's default, 30 s, may hold none."""
_BLOCKS = " ▁▂▃▄▅▆▇█"


def run_with_progress(config: Config, out: Path | None, quiet: bool, resume: bool = False) -> Result:
    """Train with a progress bar and print the result."""
    console = Console()
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[score]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=quiet, transient=False, speed_estimate_period=_WHOLE_RUN) as bar:
        task = bar.add_task(f"{config.method.name} on {config.data.name}", total=config.training.rounds, score="")
        main = task_of(config).main

        def on_round(record: Row) -> None:
            value = record.get(f"test_{main.name}")
            if value is not None:
                bar.update(task, score=f"{main.phrase} {main.text(value)}")
            bar.update(task, completed=record["round"] + 1)

        try:
            with _no_empty_bar(bar, task):
                result = run(config, out, on_round, resume=resume, track=() if quiet else (_LearnabilityCheck(bar.console),))
        except KeyboardInterrupt as stop:
            bar.stop()
            Console(stderr=True).print(*getattr(stop, "__notes__", ["interrupted"]), highlight=False, soft_wrap=True)
            raise
    _summary(result, console)
    return result


@dataclass(frozen=True)
class _LearnabilityCheck:
    """Tracker that prints before training whether the noise leaves anything to learn from."""

    console: Console
    name: str = "the verdict before training"

    def begin(self, begun: RunInfo) -> None:
        render_verdict(begun.statement, self.console)

    def round(self, record: Row) -> None:
        """Do nothing; the progress bar shows the round."""

    def end(self, status: Status) -> None:
        """Do nothing."""


def twin_with_progress(config: Config, client: int, change: Change, out: Path, quiet: bool) -> Path:
    """Measure coupled runs with a progress bar."""
    console = Console()
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[distance]}"))
    times = TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, *times, console=console, disable=quiet, speed_estimate_period=_WHOLE_RUN) as bar:
        task = bar.add_task(f"twins of {config.method.name}, client {client}", total=config.training.rounds, distance="")

        def on_round(record: Row) -> None:
            bar.update(task, completed=record["round"] + 1, distance=f"sensitivity {record['sensitivity']:.4g}")

        with _no_empty_bar(bar, task):
            return twin_directory(config, client, change, out, on_round)


@contextmanager
def _no_empty_bar(bar: Progress, task: TaskID) -> Iterator[None]:
    """Hide the bar if an error occurs before the first round."""
    try:
        yield
    except FedveilError:
        bar.update(task, visible=bar.tasks[task].completed > 0)
        raise


def _summary(result: Result, console: Console) -> None:
    main = result.columns.main
    curve = [float(r[main.name]) for r in result.history if main.name in r]
    files = _drawn(result) if curve else []  # first, so that nothing is missing if the reader of the output stops early
    if result.ended:
        what = "Ended early:" if result.ended.startswith(ALL_FAILED) else "The budget is spent:"
        console.print(f"[bold yellow]{what}[/] {escape(result.ended)}", highlight=False)
    if curve:
        console.print(f"\n[bold]{main.words} {main.text(curve[-1])}[/] after {len(result.history)} rounds   {sparkline(curve)}")
    if noisy := result.columns.noisy_text(result.history):
        console.print(f"{result.columns.noisy.words}: {noisy} in the last round that shows it, of the model before that round")
    for text in result.warnings[len(result.privacy.warnings) :]:
        console.print(f"[bold red]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)
    if any(row["failed"] for row in result.history):
        console.print(f"Who was left out: {result.path / 'private' / 'failures.csv'}", highlight=False, soft_wrap=True)
    console.print()
    render_brief(result.privacy, console)
    for line in (
        f"\nAssumptions, limits and advice: {result.path / 'statement.md'}",
        *files,
        f"Run directory: {result.path}",
        f"Fingerprint of this run (write it down: it proves later that nothing was changed): {result.closing}",
    ):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _drawn(result: Result) -> list[str]:
    """Draw the curves and write the report; return a line for each."""
    # Importing the drawing code takes as long as a first round of training, so it is imported only if there is something to draw.
    from fedveil.report.figures import plot_curves
    from fedveil.report.report import write_report

    try:
        picture = plot_curves(result.history, result.columns, result.path / "curves.png")
        report = write_report([result.path])
    except (FedveilError, OSError) as problem:
        again = f"the run is complete, and `fedveil report {result.path}` draws it anew"
        return [f"Without curves and report ({one_line(str(problem))}): {again}"]
    return [f"Learning curve: {picture}", f"Report: {report} (open it in a browser; it needs no network)"]


def sparkline(values: list[float], width: int = 40) -> str:
    """Return values as a line of blocks, scaled from 0 to 1 or to the maximum; negative or non-finite values show as none."""
    top = max(1.0, *(v for v in values if math.isfinite(v))) if any(map(math.isfinite, values)) else 1.0
    values = [v / top if math.isfinite(v) else 0.0 for v in values]
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    return "".join(_BLOCKS[max(0, min(8, round(v * 8)))] for v in values)
