"""Commands about ledgers: ledger RUN, which shows one, and ledger backup and restore."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedveil.cli.command_options import AsJson, checked, print_json, require_there


class _LedgerCommands(TyperGroup):
    """Group in which `ledger RUN` is short for `ledger show RUN`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["show", *args]
        return super().parse_args(ctx, args)


ledger_app = typer.Typer(
    cls=_LedgerCommands,
    help="Show what a run released and what it cost (fedveil ledger RUN); back up or restore a ledger.",
    epilog="Example: fedveil ledger runs/first",
    no_args_is_help=True,
)


@ledger_app.command(epilog="Example: fedveil ledger show runs/first")
def show(
    run: Annotated[
        Path, typer.Argument(help="Run directory or ledger file.", callback=checked(require_there("a run directory or a ledger")))
    ],
    as_json: AsJson = False,
) -> None:
    """Show what a run released and what it cost, client by client; `ledger RUN` is short for it."""
    from fedveil.cli.privacy_terminal import render_ledger, totals

    path = run / "ledger.sqlite" if run.is_dir() else run
    if as_json:
        print_json(totals(path))
    else:
        from rich.console import Console

        render_ledger(path, Console())


@ledger_app.command(epilog="Example: fedveil ledger backup alice-state /backup/alice-2026-11-28")
def backup(
    source: Annotated[
        Path, typer.Argument(help="Ledger, run directory or client's folder.", callback=checked(require_there("a ledger")))
    ],
    target: Annotated[Path, typer.Argument(help="Copy to make.")],
) -> None:
    """Copy ledgers with their heads, also while runs charge them."""
    from fedveil.ledger.backup import back_up, head_text

    for path, head in back_up(source, target):
        typer.echo(f"backup: {path} --head {head_text(head)}")


@ledger_app.command(epilog="Example: fedveil ledger restore /backup/ward.budget ward.budget")
def restore(
    source: Annotated[Path, typer.Argument(help="Backup of the ledger.", callback=checked(require_there("a backup")))],
    target: Annotated[Path, typer.Argument(help="Place of the lost ledger.")],
    head: Annotated[str | None, typer.Option(help="Newest head that was written down, NUMBER:DIGEST.")] = None,
) -> None:
    """Put a backup in the place of a lost ledger, unless it lacks releases that were made."""
    from fedveil.ledger.backup import parse_head
    from fedveil.ledger.backup import restore as restored

    number, _ = restored(source, target, None if head is None else parse_head(head))
    typer.echo(f"restored: {target} with {number} releases")
