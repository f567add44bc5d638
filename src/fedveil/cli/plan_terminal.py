"""The planner's table in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fedveil.statement.planner import PlannedRow


def print_plan(rows: Sequence[PlannedRow]) -> None:
    """All ways, best first; those that cannot be had below, with one reason for each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("unit", "rounds", "clients", "noise multiplier", "R", "accuracy kept"):
        table.add_column(head, justify="left" if head == "unit" else "right")
    for row in (row for row in rows if not row.why_not):
        values = (f"{row.noise_multiplier:.3g}", f"{row.gathered:.2g}", f"{100 * row.share:.0f} %")
        table.add_row(f"{row.unit}", f"{row.rounds}", f"{row.cohort}", *values)
    Console().print(table)
    for reason in dict.fromkeys(row.why_not for row in rows if row.why_not):
        typer.echo(f"not possible: {reason}")
    typer.echo(
        "clients: of a round. R: noise over all rounds against signal.\n"
        "accuracy kept: of what is above chance without noise, about as linear models did (docs/utility.md)"
    )
