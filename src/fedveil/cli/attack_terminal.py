"""Attacks, audits and replays in the terminal: progress, then results."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fedveil.accounting.types import count
from fedveil.attacks.attack_options import AttackOptions
from fedveil.attacks.attack_run import FinishedAttack, attack
from fedveil.attacks.attack_table import ATTACKS
from fedveil.attacks.audit_run import audit_config, audit_run
from fedveil.attacks.replay import Replayed, replay
from fedveil.cli.command_options import first_line, print_entries
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.experiment.config_files import load_config
from fedveil.statement.statement import Statement


class _Speed(ProgressColumn):
    """Progress column with the steps per second."""

    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:.0f} steps/s", style="progress.data.speed")


def attack_with_progress(
    target: Path, kind: str, options: AttackOptions, overrides: Sequence[str], out: Path | None, *, quiet: bool = False
) -> FinishedAttack:
    """Run an attack with a progress bar on stderr."""
    columns = (
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        _Speed(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as bar:
        task = bar.add_task(f"attack {kind}", total=None, what="preparing")
        updated, stage = [0.0], [""]

        def on_progress(done: int, total: int, what: str) -> None:
            first = what.split(" ")[0]
            if first != stage[0] and "training" in (first, stage[0]):
                bar.reset(task, total=total)
            stage[0] = first
            now = time.monotonic()
            if now - updated[0] > 0.1 or done == total:
                updated[0] = now
                bar.update(task, completed=done, total=total, what=what)

        return attack(target, kind, options, overrides=overrides, out=out, on_progress=on_progress)


def print_kinds(target: Path) -> None:
    """Print the kinds of attack, where each begins, and how to start one on the target."""
    typer.echo(f"Choose a kind with --kind, such as: fedveil attack {target} --kind dlg\n")
    print_entries(ATTACKS, first_line)
    typer.echo("\nSingle uploads are visible in the server view only; gan watches the training of a configuration, not a run.")


def render_attack(result: FinishedAttack, console: Console) -> None:
    """Print figures, assumptions and files of a finished attack."""
    table = Table(title=f"Attack {result.kind}", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in result.outcome.figures.items():
        table.add_row(name, f"[bold]{value}[/]")
    console.print(table)
    console.print()
    for sentence in result.record["assumptions"]:
        console.print(f"- {sentence}", highlight=False)
    console.print()
    for file in result.files:
        console.print(str(file), highlight=False, soft_wrap=True)


def audit_with_progress(
    target: Path, overrides: Sequence[str], n: int, confidence: float, canaries: int = 0, *, quiet: bool = False
) -> Statement:
    """Audit a configuration file, or a run directory whose statement is then rewritten; show the current step on stderr.

    Raises:
        ConfigError: overrides for a run, whose configuration is fixed.
    """
    if target.is_dir() and overrides:
        raise ConfigError("--set does not go with a run directory: a run is audited as it was configured")
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("auditing: {task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=quiet, speed_estimate_period=_WHOLE_STEP) as progress:
        bar = progress.add_task("preparing", total=None)
        step, told = [""], [0.0]

        def on_step(done: int, total: int, what: str) -> None:
            now = time.monotonic()
            if what != step[0]:
                progress.reset(bar, total=total or None, description=what)
                step[0] = what
            elif now - told[0] < (_REDRAWN if console.is_terminal else _REPORTED):
                return
            told[0] = now
            progress.update(bar, completed=done, total=total or None, description=what)
            if not (console.is_terminal or quiet):
                console.print(f"auditing: {what}{_remaining(progress.tasks[bar])}", highlight=False, soft_wrap=True)

        if target.is_dir():
            return audit_run(target, n=n, confidence=confidence, canaries=canaries, on_step=on_step)
        return audit_config(load_config(target, overrides), n=n, confidence=confidence, canaries=canaries, on_step=on_step)


_WHOLE_STEP = 86400.0
"""Seconds over which the speed of a step is estimated."""
_REDRAWN, _REPORTED = 0.1, 15.0
"""Seconds between two reports of the same step: in a terminal, and as lines of a log."""


def _remaining(task: Task) -> str:
    """Return what is done of a step, and the time that is left, for a line of a log."""
    if not (task.total and task.completed):
        return ""
    seconds = task.elapsed or 0.0
    left = seconds * (task.total - task.completed) / task.completed
    return f": {count(int(task.completed))} of {count(int(task.total))}, {timedelta(seconds=round(left))} left in this step"


def replay_with_progress(config: Config, rounds: int, engine: str, *, quiet: bool = False) -> Replayed:
    """Replay a configuration; show the current data on stderr."""
    columns = TextColumn("replaying: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("preparing", total=None)

        def on_world(number: int, worlds: int, name: str) -> None:
            progress.update(task, description=name, completed=number, total=worlds)

        return replay(config, rounds=rounds, engine=engine, on_world=on_world)


def render_replay(run: Replayed, console: Console) -> None:
    """Print the replayed data, and each check with its result."""
    console.print(
        f"Leak test of {run.method}, {run.scope}: {run.rounds} rounds, then one client's data are changed and the released "
        f"values kept; nothing else may change:",
        soft_wrap=True,
        highlight=False,
    )
    for world in run.worlds:
        console.print(f"  {escape(world)}")
    width = max(len(check.check) for check in run.checks)
    for check in run.checks:
        result = f"[red]{escape(check.finding)}[/red]" if check.finding else f"{check.holds} ({check.compared})"
        console.print(f"{check.check:<{width}}  {result}", soft_wrap=True, highlight=False)
    if run.findings:
        console.print(f"{len(run.findings)} of {len(run.checks)} checks failed: the guarantee does not hold", style="red")
    else:
        console.print("nothing was found that depends on private data by another way than the noisy numbers")
