"""A statement printed as an institution asks for it; of a run, only once nothing contradicts it."""

from __future__ import annotations

from pathlib import Path

import typer

from fedveil.errors import ConfigError
from fedveil.run.verification_text import headline, problems
from fedveil.statement.institutions import Institution, for_institution
from fedveil.statement.public_figures import read_run_figures
from fedveil.statement.statement import Statement
from fedveil.verify import Verification


def check_alone(institution: Institution | None, as_json: bool, markdown: bool) -> None:
    """Refuse two formats at once."""
    if institution is not None and (as_json or markdown):
        raise ConfigError(f"--as {institution} has a format of its own: leave out --json and --markdown")


def print_for_institution(
    statement: Statement, institution: Institution, run: Path | None = None, found: Verification | None = None
) -> None:
    """Print the text alone on stdout; what verification found of a run goes to stderr, and a contradicted run gets no text."""
    if run is None or found is None:
        typer.echo(for_institution(statement, institution), nl=False)
        return
    typer.echo("\n".join([headline(str(run), found), *problems(found)]), err=True)
    if found.exit_status == 1:
        typer.echo(f"no {institution} is written of a contradicted run", err=True)
        raise typer.Exit(1)
    typer.echo(for_institution(statement, institution, read_run_figures(run, found.closing)), nl=False)
