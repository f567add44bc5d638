"""A population's lifetime budget for people, and as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedveil.accounting import formatting
from fedveil.ledger.budget_spending import Spending
from fedveil.ledger.population_budget import PopulationBudget, percent
from fedveil.run.run_directory import plain


def spending_values(budget: PopulationBudget, found: Spending) -> dict[str, Any]:
    """Cap, spending and projects as JSON values; an epsilon without bound is the string `inf`."""
    cap, scope = budget.cap, budget.scope
    promise = {"epsilon": cap.epsilon, "delta": cap.delta, "order": getattr(cap, "order", None)}
    values: dict[str, Any] = plain({"budget": str(budget.path), "cap": {**promise, **asdict(scope)}, **asdict(found)})
    return values


def render_budget(budget: PopulationBudget, found: Spending, console: Console) -> None:
    """Print the cap, a row for each project and one for all, and what is left."""
    delta = f"delta = {budget.cap.delta:g}"
    promise = escape(f"{budget.path}: {budget.cap.quotes}; {budget.scope}")
    console.print(f"[bold]Budget[/] {promise}", highlight=False, soft_wrap=True)
    if not found.rows:
        console.print(f"no release yet: all of epsilon = {budget.cap.epsilon:g} is left", highlight=False)
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("project", "runs", "rows", "epsilon alone", "part of the budget"):
        table.add_column(column, overflow="fold", justify="left" if column == "project" else "right")
    for project in found.projects:
        numbers = (formatting.epsilon(project.epsilon), percent(project.spent))
        table.add_row(escape(project.name), str(project.runs), str(project.rows), *numbers)
    table.add_section()
    runs = sum(project.runs for project in found.projects)
    table.add_row("all together", str(runs), str(found.rows), formatting.epsilon(found.epsilon), percent(found.spent))
    console.print(table)
    whose = f" of client {found.most}, who has least left of the {found.clients} that took part" if found.clients else ""
    left = f"left{whose}: {percent(max(0.0, 1 - found.spent))}"
    console.print(f"{left}; one further project may have epsilon = {found.left:g} at {delta}", highlight=False, soft_wrap=True)
