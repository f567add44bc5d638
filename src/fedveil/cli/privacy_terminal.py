"""Statements, plans, ledgers and verifications in the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from fedveil.accounting.types import count, epsilon
from fedveil.experiment.certify import PlannedRow
from fedveil.experiment.run_directory import plain
from fedveil.experiment.verification import TITLES, headline, lines_by_kind, problems
from fedveil.ledger.budgeted_ledger import count_totals, released_by_round, summary
from fedveil.ledger.ledger import AGGREGATE, Ledger
from fedveil.report.privacy_section import spent
from fedveil.statement.institutions import Institution, for_institution, read_run_figures
from fedveil.statement.statement import Statement
from fedveil.statement.statement_layout import read_statement
from fedveil.verify import Verification

if TYPE_CHECKING:
    from fedveil.experiment.config import Config

_BAR_DELAY = 2.0
"""Seconds after which a bar appears."""


@contextmanager
def reading_progress() -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (rows read, all rows), which shows a bar on stderr once reading takes longer than two seconds."""
    columns = TextColumn("reading the ledger"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    bar, start = Progress(*columns, console=Console(stderr=True), transient=True), time.monotonic()
    task = bar.add_task("")

    def progress(done: int, total: int) -> None:
        if time.monotonic() - start > _BAR_DELAY:
            bar.start()
            bar.update(task, completed=done, total=total)

    try:
        yield progress
    finally:
        if bar.live.is_started:
            bar.stop()


_MOST_ROUNDS = 50
"""Largest number of rounds in a printed table."""
MOST = 1000
"""Largest number of rows in a printed table."""


def totals(path: Path) -> list[dict[str, Any]]:
    """Return a JSON-able row per client, unit, adjacency and view."""
    return _read(path, -1)[0]


def _read(path: Path, most: int) -> tuple[list[dict[str, Any]], int]:
    """Return the first rows, or all (-1), and the number of all rows."""
    with reading_progress() as progress, Ledger.open(path, read_only=True, progress=progress) as ledger:
        rows: list[dict[str, Any]] = plain([asdict(t) for t in summary(ledger, most)])
        return rows, len(rows) if len(rows) < most else count_totals(ledger)


def render_ledger(path: Path, console: Console) -> None:
    """Print the totals as a table; values that all rows share are printed above it."""
    rows, total = _read(path, MOST)
    console.print(f"[bold]Ledger[/] {escape(str(path))}", highlight=False)
    if not rows:
        console.print("no release yet")
        return
    shared = {k: rows[0][k] for k in rows[0] if all(row[k] == rows[0][k] for row in rows)}
    common = ", ".join(f"{_name(k)} {_cell(k, v)}" for k, v in shared.items() if v not in (None, 0) or k.endswith("round"))
    _print_rounds(path, console)
    extent = f"all {total} rows" if total == len(rows) else f"the first {len(rows)} of {total} rows (--json gives all)"
    console.print(escape(common if total == 1 else f"{extent}: {common}"), highlight=False)
    if len(shared) == len(rows[0]):
        return
    table = Table(box=box.SIMPLE_HEAD)
    columns = [k for k in rows[0] if k not in shared]
    for column in columns:
        table.add_column(_name(column), overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(k, row[k])) for k in columns))
    console.print(table)


def _print_rounds(path: Path, console: Console) -> None:
    """Print a row for each round: what was released, its cost, and the epsilon so far where the run has a statement."""
    with Ledger.open(path, read_only=True) as ledger:
        rounds = released_by_round(ledger)
    epsilons = dict[int, float]()
    if (path.parent / "statement.json").is_file():
        statement = read_statement(path.parent)
        so_far = spent(path, statement.scope, statement.delta, statement.clients)
        epsilons = {number - 1: value for number, value in so_far.most}
    listed = [one for one in rounds if not epsilons or one.round in epsilons]
    listed = listed[:: -(-len(listed) // _MOST_ROUNDS) or 1]
    releases = sum(one.releases for one in rounds)
    some = "" if len(listed) == len(rounds) else f"; {len(listed)} of them are listed"
    console.print(f"{count(len(rounds))} rounds, {count(releases)} releases{some}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("round", "released", "cost", "epsilon so far"):
        table.add_column(head, justify="left" if head in ("released", "cost") else "right", overflow="fold")
    for one in listed:
        so_far_text = epsilon(epsilons[one.round]) if one.round in epsilons else ""
        table.add_row(str(one.round), one.released, one.cost, so_far_text)
    console.print(table)


def _name(column: str) -> str:
    return column.replace("_", " ").replace("sum mu squared", "sum of mu^2").replace("sampled", "of them with a secret sample")


def _cell(column: str, value: Any) -> str:
    if column == "client" and value == AGGREGATE:
        return "all together"
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value).replace("_", "-")


def print_plan(rows: Sequence[PlannedRow], configured: Config) -> None:
    """Print all possible plans, best first; below, one line for each reason why others are impossible.

    The first plan with the configured unit is the recommended one, because the unit says who is protected.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("unit", "rounds", "clients", "noise multiplier", "R", "accuracy kept", ""):
        table.add_column(head, justify="left" if head in ("unit", "") else "right")
    unit, rounds = configured.privacy.unit, configured.training.rounds
    cohort = configured.training.clients_per_round or max(row.cohort for row in rows)
    possible = [row for row in rows if not row.why_not]
    recommended = next((row for row in possible if row.unit is unit), None)
    for row in possible:
        yours = (row.unit, row.rounds, row.cohort) == (unit, rounds, cohort)
        marks = ["recommended"] * (row is recommended) + ["yours"] * yours
        values = (f"{row.noise_multiplier:.3g}", f"{row.gathered:.2g}", f"{100 * row.share:.0f} %", ", ".join(marks))
        table.add_row(f"{row.unit}", f"{row.rounds}", f"{row.cohort}", *values)
    Console().print(table)
    for reason in dict.fromkeys(row.why_not for row in rows if row.why_not):
        typer.echo(f"not possible: {reason}")
    typer.echo(
        "recommended: the best plan that protects what privacy.unit names. yours: the configuration.\n"
        "clients: per round. R: noise over all rounds against signal.\n"
        "accuracy kept: of what is above chance without noise, about as linear models did (docs/utility.md)"
    )


_COLOURS = {"contradicted": "red", "unknown": "yellow", "verified": "green", "trust": "cyan"}
_STYLES = ("green", "red", "yellow")  # by exit status


def verification_values(verified: Verification) -> dict[str, Any]:
    """Return outcome, closing digest and findings as JSON values."""
    findings = [finding._asdict() for finding in verified.findings]
    return {"outcome": verified.outcome, "closing_digest": verified.closing or None, "findings": findings}


def render_verification(path: Path, verified: Verification, console: Console) -> None:
    """Print the headline and every finding, contradictions first."""
    style = f"bold {_STYLES[verified.exit_status]}"
    console.print(headline(str(path), verified), style=style, markup=False, highlight=False, soft_wrap=True)
    for kind, lines in lines_by_kind(verified).items():
        console.print(f"\n{TITLES[kind]}", style=f"bold {_COLOURS[kind]}", highlight=False)
        for line in lines:
            console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def print_for_institution(
    statement: Statement, institution: Institution, run: Path | None = None, verified: Verification | None = None
) -> None:
    """Print the text on stdout, and a run's verification on stderr; a contradicted run gets no text."""
    if run is None or verified is None:
        typer.echo(for_institution(statement, institution), nl=False)
        return
    typer.echo("\n".join([headline(str(run), verified), *problems(verified)]), err=True)
    if verified.exit_status == 1:
        typer.echo(f"no {institution} is written for a contradicted run", err=True)
        raise typer.Exit(1)
    typer.echo(for_institution(statement, institution, read_run_figures(run, verified.closing)), nl=False)
