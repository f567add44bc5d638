"""A replay in the terminal, with progress; and what it found, one line a check."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fedveil.adversary.replay import Replayed, replay
from fedveil.configuration.config import Config


def replay_with_progress(config: Config, rounds: int, engine: str, *, quiet: bool = False) -> Replayed:
    """Replay a configuration; shows on stderr which data are played."""
    columns = TextColumn("replaying: {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        task = progress.add_task("preparing", total=None)

        def on_world(number: int, worlds: int, name: str) -> None:
            progress.update(task, description=name, completed=number, total=worlds)

        return replay(config, rounds=rounds, engine=engine, on_world=on_world)


def render(found: Replayed, console: Console) -> None:
    """What was played, and each check with what it found."""
    console.print(f"{found.method}, {found.scope}: {found.rounds} rounds, and again with these releases on neighbouring data:")
    for world in found.worlds:
        console.print(f"  {escape(world)}")
    width = max(len(check.check) for check in found.checks)
    for check in found.checks:
        result = f"[red]{escape(check.finding)}[/red]" if check.finding else f"{check.holds} ({check.compared})"
        console.print(f"{check.check:<{width}}  {result}", soft_wrap=True, highlight=False)
    if found.findings:
        console.print(f"{len(found.findings)} of {len(found.checks)} checks failed: the guarantee does not hold", style="red")
    else:
        console.print("nothing was found that depends on private data by another way than the noisy numbers")
