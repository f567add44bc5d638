"""An attack in the terminal: progress while it runs, then figures, floors, what the attacker knew, and where the files lie."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedveil.adversary.attack_kinds import FinishedAttack, attack
from fedveil.adversary.attack_options import AttackOptions


class _Speed(ProgressColumn):
    """Steps a second."""

    def render(self, task: Task) -> Text:
        return Text("" if not task.speed else f"{task.speed:.0f} steps/s", style="progress.data.speed")


def attack_with_progress(
    target: Path, kind: str, options: AttackOptions, overrides: Sequence[str], out: Path | None, *, quiet: bool = False
) -> FinishedAttack:
    """Attack with a progress bar on stderr."""
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
        shown, stage = [0.0], [""]

        def on_progress(done: int, total: int, what: str) -> None:
            first = what.split(" ")[0]
            if first != stage[0] and "training" in (first, stage[0]):
                bar.reset(task, total=total)
            stage[0] = first
            now = time.monotonic()
            if now - shown[0] > 0.1 or done == total:
                shown[0] = now
                bar.update(task, completed=done, total=total, what=what)

        return attack(target, kind, options, overrides=overrides, out=out, on_progress=on_progress)


def render(found: FinishedAttack, console: Console) -> None:
    """Figures, assumptions and files of a finished attack."""
    table = Table(title=f"Attack {found.kind}", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in found.outcome.figures.items():
        table.add_row(name, f"[bold]{value}[/]")
    console.print(table)
    console.print()
    for sentence in found.record["assumptions"]:
        console.print(f"- {sentence}", highlight=False)
    console.print()
    for file in found.files:
        console.print(str(file), highlight=False, soft_wrap=True)
