"""The ledger of a run for people: totals by client."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedveil.cli.reading_progress import reading_progress
from fedveil.ledger.ledger import AGGREGATE, Ledger
from fedveil.ledger.ledger_totals import count_totals, summary
from fedveil.run.run_directory import plain

MOST = 1000
"""Rows of a table that somebody may read."""


def totals(path: Path) -> list[dict[str, Any]]:
    """One JSON-able row per client, unit, adjacency and view."""
    return _read(path, -1)[0]


def _read(path: Path, most: int) -> tuple[list[dict[str, Any]], int]:
    """The first rows, or all (-1), and how many there are."""
    with reading_progress() as progress, Ledger.open(path, read_only=True, progress=progress) as ledger:
        rows: list[dict[str, Any]] = plain([asdict(t) for t in summary(ledger, most)])
        return rows, len(rows) if len(rows) < most else count_totals(ledger)


def render_ledger(path: Path, console: Console) -> None:
    """Print the totals as a table; what is the same in all rows stands above it."""
    rows, count = _read(path, MOST)
    console.print(f"[bold]Ledger[/] {escape(str(path))}", highlight=False)
    if not rows:
        console.print("no release yet")
        return
    shared = {k: rows[0][k] for k in rows[0] if all(row[k] == rows[0][k] for row in rows)}
    known = ", ".join(f"{_name(k)} {_cell(k, v)}" for k, v in shared.items() if v not in (None, 0) or k.endswith("round"))
    shown = f"all {count} rows" if count == len(rows) else f"the first {len(rows)} of {count} rows (--json gives all)"
    console.print(escape(known if count == 1 else f"{shown}: {known}"), highlight=False)
    if len(shared) == len(rows[0]):
        return
    table = Table(box=box.SIMPLE_HEAD)
    columns = [k for k in rows[0] if k not in shared]
    for column in columns:
        table.add_column(_name(column), overflow="fold")
    for row in rows:
        table.add_row(*(escape(_cell(k, row[k])) for k in columns))
    console.print(table)


def _name(column: str) -> str:
    return column.replace("_", " ").replace("sum mu squared", "sum of mu^2")


def _cell(column: str, value: Any) -> str:
    if column == "client" and value == AGGREGATE:
        return "all together"
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value).replace("_", "-")
