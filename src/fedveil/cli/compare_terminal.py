"""A comparison in the terminal: one live table while it runs, the ranked tables at the end."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedveil.errors import ConfigError
from fedveil.pages.compare_files import check_runs, write_files
from fedveil.pages.verification_section import outcome_lines
from fedveil.studies.compare.comparison import Comparison, compare, default_out
from fedveil.studies.compare.comparison_plan import ComparisonListener, Planned
from fedveil.studies.compare.comparison_rows import Row
from fedveil.studies.compare.comparison_spec import ComparisonSpec
from fedveil.studies.compare.comparison_text import claimed, guarantee, mean_and_sd, proven, short_names, verdict
from fedveil.studies.grid.cell import CellState
from fedveil.studies.statistics import LEVEL

CHECKING = "checking what each method can promise"


class LiveTable:
    """Methods down, guarantees across; each cell shows the seeds that are done, their accuracy and the rounds that run.

    Args:
        planned: the rows. states: of their cells, before anything runs.
    """

    def __init__(self, planned: Sequence[Planned], states: Sequence[CellState]) -> None:
        self.planned = planned
        self.states = {state.cell.name: state for state in states}
        self.left: float | None = None
        self.since = time.monotonic()
        self.total = {c.name: c.config.training.rounds for row in planned for c in row.cells}
        self._names = short_names(list(dict.fromkeys(row.method for row in planned)))

    def change(self, state: CellState, left: float | None) -> None:
        """Take note of a cell, and of the seconds that are left."""
        self.states[state.cell.name], self.left = state, left
        self.since = time.monotonic()

    def __rich__(self) -> Group:
        """The table and the line below it."""
        columns = sorted({row.epsilon for row in self.planned})
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method")
        for epsilon in columns:
            table.add_column("no noise" if math.isinf(epsilon) else f"ε = {epsilon:g}", min_width=14)
        for method, partition in dict.fromkeys((row.method, row.partition) for row in self.planned):
            mine = {r.epsilon: r for r in self.planned if (r.method, r.partition) == (method, partition)}
            name = Text(self._names[method]).append(f" {partition}" if partition else "", style="dim")
            table.add_row(name, *(self._cell(mine[e]) if e in mine else "" for e in columns))
        return Group(table, self._foot())

    def _cell(self, row: Planned) -> Text:
        if not row.cells:
            return Text("not possible", style="yellow")
        states = [self.states[c.name] for c in row.cells]
        done = [s for s in states if s.state == "done"]
        failed = sum(s.state == "failed" for s in states)
        scores = [s.score for s in done if s.score is not None]
        text = Text(f"{len(done)}/{len(states)}", style="green" if len(done) == len(states) else "")
        if scores:
            text.append(f" {states[0].cell.main.text(fmean(scores))}", style="bold")
        for s in states:
            if s.state == "running":
                text.append(f" [{s.rounds}/{s.total}]", style="cyan")
        if failed:
            text.append(f" {failed} failed", style="red")
        return text

    def _foot(self) -> Table:
        rounds = sum(self.total[name] if s.state in ("done", "failed") else s.rounds for name, s in self.states.items())
        total = sum(self.total.values())
        foot = Table.grid(padding=(0, 2))
        foot.add_row(ProgressBar(total=total, completed=rounds, width=30), f"{rounds} of {total} rounds", self._time_left())
        return foot

    def _time_left(self) -> str:
        if self.left is None:
            return "measuring the time left"
        seconds = max(0, round(self.left - (time.monotonic() - self.since)))
        return f"about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"


class _TableListener(ComparisonListener):
    """Shows the live table; where the output is no terminal, one line a finished run."""

    def __init__(self, live: Live) -> None:
        self.live, self.rows, self.table = live, list[Planned](), LiveTable([], [])

    def checking(self, what: str) -> None:
        self.live.update(Text(f"{CHECKING}: {what}"))

    def planned(self, rows: Sequence[Planned]) -> None:
        self.rows = list(rows)

    def started(self, states: Sequence[CellState]) -> None:
        self.table = LiveTable(self.rows, states)
        self.live.update(self.table)

    def changed(self, state: CellState, left: float | None) -> None:
        self.table.change(state, left)
        if not self.live.console.is_terminal and state.state in ("done", "failed"):
            main = state.cell.main
            score = "" if state.score is None else f" {main.phrase} {main.text(state.score)}"
            line = f"{state.cell.name}: {state.state}{score} {state.error}".rstrip()
            self.live.console.print(line, highlight=False, markup=False)


def compare_with_table(spec: ComparisonSpec, out: Path | None, jobs: int | None) -> int:
    """Compare with a live table, print the result, and leave the files.

    Returns:
        The exit status: 1 if a run failed, or if one of those that are compared is contradicted.
    """
    console, folder = Console(), out or default_out(spec.config)
    with Live(Text(CHECKING), console=console, refresh_per_second=4, transient=True) as live:
        try:
            found = compare(spec, folder, jobs, _TableListener(live))
        except KeyboardInterrupt:
            console.print(f"interrupted; the same command goes on where it was (--out {folder})", highlight=False, soft_wrap=True)
            raise
        live.update(Text("verifying the runs, writing tables and pictures"))
        checked = check_runs(found)
        paths = write_files(found, checked)
    render(found, console)
    for line in outcome_lines(checked):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for what in ("page", "picture", "table"):
        if what in paths:
            console.print(f"{what}: {paths[what]}", highlight=False, soft_wrap=True)
    return int(bool(found.failed) or any(run.exit_status == 1 for run in checked.values()))


def render(found: Comparison, console: Console) -> None:
    """Print the ranked tables, what went wrong, and what the numbers rest on."""
    names = found.names
    console.print(f"\n[bold]{escape(found.what[0].upper() + found.what[1:])}[/]: mean ± sample standard deviation over seeds")
    for (partition, at), block in found.blocks.items():
        table = Table(
            title=escape(guarantee(partition, at, found.by)),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        table.add_column("rank", justify="right")
        table.add_column("method", overflow="fold", min_width=min(14, max(len(names[row.method]) for row in block)))
        for heading in ("mean ± sd", "claimed ε", "proven ε"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("against the best", min_width=18)
        for row in (row for row in block if row.values):
            table.add_row(*_cells(row, names[row.method]), style="bold" if row.rank == 1 else "")
        if table.row_count:
            console.print(table)
    for line, where in found.problems.items():
        console.print(f"[yellow]{escape(line)}[/] [dim]({escape(', '.join(where))})[/]", highlight=False)
    console.print()
    for sentence in found.sentences:
        console.print(escape(sentence), highlight=False, style="dim")
    if resting := found.assumptions.items:
        console.print(
            f"The proven numbers rest on {len(resting)} assumption{'s' * (len(resting) > 1)}: see compare.md.", style="dim"
        )
    console.print()


def _cells(row: Row, name: str) -> list[str | Text]:
    verdict_text = Text(verdict(row), style="red" if row.against and row.against.holm < LEVEL else "")
    return [str(row.rank or "–"), name, mean_and_sd(row), claimed(row), proven(row), verdict_text]


def split_list(text: str) -> list[str]:
    """What stands between commas; commas in brackets or braces do not count."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def epsilons_of(text: str) -> list[float]:
    """The numbers of `--epsilon`."""
    return [_number(part) for part in split_list(text)]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--epsilon {text!r}: give numbers with commas, for instance --epsilon 2,4,8 (inf is no noise)"
        ) from None
