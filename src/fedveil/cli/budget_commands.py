"""Commands about a population's lifetime budget: budget create, budget show."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.accounting.types import Adjacency, Scope, Unit, View
from fedveil.cli.command_options import AsJson, TrustPlugins, import_trusted, print_json

budget_app = typer.Typer(
    help="Create or show a lifetime budget that runs share (privacy.budget = PATH in their configurations).", no_args_is_help=True
)


@budget_app.command()
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
    from fedveil.ledger.population_budget import create_budget
    from fedveil.run.shared_budget import scope_and_order

    if like is not None:
        import_trusted(like, trust_plugins)
    scope, best = scope_and_order(like, epsilon, delta)
    scope = Scope(unit or scope.unit, adjacency or scope.adjacency, view or scope.view)
    made = create_budget(path, epsilon, delta, scope, best if order is None else order)
    typer.echo(f"budget: {made.path} ({made.cap.quotes}; {made.scope})")
    typer.echo(f'next: [privacy] budget = "{made.path}" in each configuration that uses these data')


@budget_app.command()
def show(path: Annotated[Path, typer.Argument(help="The budget.")], as_json: AsJson = False) -> None:
    """Show what each project released and its epsilon, the epsilon of all together, and what is left."""
    from fedveil.cli.budget_terminal import render_budget, spending_values
    from fedveil.ledger.budget_spending import spending
    from fedveil.ledger.population_budget import open_budget

    budget = open_budget(path)
    found = spending(budget)
    if as_json:
        print_json(spending_values(budget, found))
    else:
        from rich.console import Console

        render_budget(budget, found, Console())
