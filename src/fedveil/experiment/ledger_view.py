"""The ledger of a run for people: totals by client."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedveil.experiment.rundir import plain
from fedveil.privacy.ledger import Ledger, summary


def totals(path: Path) -> list[dict[str, Any]]:
    """One JSON-able row per client, unit, adjacency and view."""
    with Ledger.open(path) as ledger:
        rows: list[dict[str, Any]] = plain([asdict(t) for t in summary(ledger)])
    return rows


def render_ledger(path: Path, console: Console) -> None:
    """Print the totals as a table."""
    rows = totals(path)
    table = Table(title=f"Ledger {path}", title_justify="left")
    for column in rows[0] if rows else ["no release yet"]:
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(f"{v:.6g}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
