"""Commands about a population's lifetime budget: budget create, show and release."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedveil.accounting import types
from fedveil.accounting.types import Adjacency, Scope, Unit, View, small
from fedveil.cli.command_options import AsJson, TrustPlugins, checked, import_trusted, print_json
from fedveil.ledger.files import require_budget

if TYPE_CHECKING:
    from rich.console import Console

    from fedveil.ledger.population_budget import PopulationBudget, Spending


def spending_values(budget: PopulationBudget, spent: Spending) -> dict[str, Any]:
    """Return cap, spending and projects as JSON values; an infinite epsilon is the string `inf`."""
    from fedveil.experiment.run_directory import plain

    cap, scope = budget.cap, budget.scope
    promise = {"epsilon": cap.epsilon, "delta": cap.delta, "order": getattr(cap, "order", None)}
    values: dict[str, Any] = plain({"budget": str(budget.path), "cap": {**promise, **asdict(scope)}, **asdict(spent)})
    return values


def render_budget(budget: PopulationBudget, spent: Spending, console: Console) -> None:
    """Print the cap, a row for each project, one for all, and what is left."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    from fedveil.ledger.population_budget import percent

    delta = f"delta = {small(budget.cap.delta)}"
    promise = escape(f"{budget.path}: {budget.cap.quotes}; {budget.scope}")
    console.print(f"[bold]Budget[/] {promise}", highlight=False, soft_wrap=True)
    for one in spent.reserved:
        line = f"reserved by {escape(one.run)}: {percent(one.share)} (fedveil budget release, if it will not be resumed)"
        console.print(line, highlight=False, soft_wrap=True)
    if not spent.rows:
        left = "all of" if not spent.reserved else "so that"
        console.print(f"no release yet: {left} epsilon = {spent.left:g} is left", highlight=False)
        return
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("project", "runs", "rows", "epsilon alone", "part of the budget"):
        table.add_column(column, overflow="fold", justify="left" if column == "project" else "right")
    for project in spent.projects:
        numbers = (types.epsilon(project.epsilon), percent(project.spent))
        table.add_row(escape(project.name), str(project.runs), str(project.rows), *numbers)
    table.add_section()
    runs = sum(project.runs for project in spent.projects)
    table.add_row("all together", str(runs), str(spent.rows), types.epsilon(spent.epsilon), percent(spent.spent))
    console.print(table)
    whose = f" of client {spent.most}, who has least left of the {spent.clients} that took part" if spent.clients else ""
    less = " less what is reserved" if spent.reserved else ""
    left = f"left{whose}: {percent(max(0.0, 1 - spent.spent))}{less}"
    console.print(f"{left}; one further project may have epsilon = {spent.left:g} at {delta}", highlight=False, soft_wrap=True)


budget_app = typer.Typer(
    help="Create, show or tidy a lifetime budget that runs share (privacy.budget = PATH in their configurations).",
    no_args_is_help=True,
)


@budget_app.command(epilog="Example: fedveil budget create ward.budget --epsilon 10 --delta 1e-5")
def create(
    path: Annotated[Path, typer.Argument(help="File to create, on a local disk; PATH-head comes beside it.")],
    epsilon: Annotated[float, typer.Option(help="Cap on epsilon of everything that all runs release, for each client.")],
    delta: Annotated[float, typer.Option(help="The delta at which it is the cap.")],
    unit: Annotated[Unit | None, typer.Option(help="Whose presence is protected; by default client.")] = None,
    adjacency: Annotated[Adjacency | None, typer.Option(help="Which data are neighbours; by default zero_out.")] = None,
    view: Annotated[View | None, typer.Option(help="Who sees the releases; by default aggregate.")] = None,
    order: Annotated[
        float | None,
        typer.Option(
            help="Cap the Renyi divergence of this order (> 1), which credits secret samples; by default mu of Gaussian DP, "
            "which is exact for Gaussian releases and charges secret samples as if everybody took part."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(help="Typical configuration: whose unit, adjacency and view to take, and the best order for its releases."),
    ] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Create the budget of a population, once in its life; runs of another unit, adjacency or view cannot charge it."""
    from fedveil.experiment.shared_budget import scope_and_order
    from fedveil.ledger.population_budget import create_budget

    if like is not None:
        import_trusted(like, trust_plugins)
    scope, best = scope_and_order(like, epsilon, delta)
    scope = Scope(unit or scope.unit, adjacency or scope.adjacency, view or scope.view)
    made = create_budget(path, epsilon, delta, scope, best if order is None else order)
    typer.echo(f"budget: {made.path} ({made.cap.quotes}; {made.scope})")
    typer.echo(f'next: [privacy] budget = "{made.path}" in each configuration that uses these data')


@budget_app.command(epilog="Example: fedveil budget show ward.budget")
def show(
    path: Annotated[Path, typer.Argument(help="The budget.", callback=checked(require_budget))], as_json: AsJson = False
) -> None:
    """Show what each project released and its epsilon, the epsilon of all together, and what is left."""
    from fedveil.ledger.population_budget import open_budget, spending

    budget = open_budget(path)
    spent = spending(budget)
    if as_json:
        print_json(spending_values(budget, spent))
    else:
        from rich.console import Console

        render_budget(budget, spent, Console())


@budget_app.command(epilog="Example: fedveil budget release ward.budget pilot/20260101-abc")
def release(
    path: Annotated[Path, typer.Argument(help="The budget.", callback=checked(require_budget))],
    run: Annotated[str, typer.Argument(help="The run, as budget show names it.")],
) -> None:
    """Give back what an interrupted run has reserved and not spent; it reserves again when it is resumed."""
    from fedveil.errors import unknown
    from fedveil.ledger.population_budget import open_budget
    from fedveil.ledger.reservations import read_reservations

    if not open_budget(path).give_back(run):
        raise unknown("RUN", run, "reservation", read_reservations(path))
    typer.echo(f"given back: {run} has reserved nothing any more (what it spent stays spent)")
