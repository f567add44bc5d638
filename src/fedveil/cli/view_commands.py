"""Commands that show, verify and sign finished runs, and list what is available."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedveil.cli.command_options import (
    AsJson,
    RunPath,
    TrustPlugins,
    checked,
    first_line,
    flag,
    method_names,
    print_entries,
    print_json,
    print_table,
    require_picture,
    require_there,
)
from fedveil.experiment.given_paths import require_one_run, require_output
from fedveil.methods.method_table import METHOD_TABLE
from fedveil.registry import Registry

commands = typer.Typer()
_KNOWN: Registry[object] = Registry("method.name", "method", METHOD_TABLE)


def _reported(runs: Sequence[Path]) -> Sequence[Path]:
    """Return the paths that are to be reported: all but folders without a configuration, unless there are no others."""
    return [run for run in runs if (run / "config.toml").is_file() or not run.is_dir()] or runs


def _require_some_run(runs: Sequence[Path]) -> None:
    for run in _reported(runs):
        require_one_run(run)


def _require_each_run(runs: Sequence[Path]) -> None:
    for run in runs:
        require_one_run(run)


@commands.command(epilog="Example: fedveil methods dp-fedavg")
def methods(
    name: Annotated[
        str | None,
        typer.Argument(help="Method whose parameters and presets to show; omit it to list all.", autocompletion=method_names),
    ] = None,
) -> None:
    """List the available methods, or show one with its parameters and presets."""
    if name is not None:
        _KNOWN.require(name)
    from fedveil.experiment.presets import names, title
    from fedveil.methods.method_registry import METHODS, description

    if name is None:
        print_entries(METHODS, first_line)
        return
    typer.echo(description(name))
    if names(name):
        typer.echo("\nReady configurations (fedveil run --preset NAME):")
        print_table([(preset, title(preset)) for preset in names(name)])


@commands.command(epilog="Example: fedveil models")
def models() -> None:
    """List the available networks."""
    from fedveil.models.model_registry import MODELS

    print_entries(MODELS, lambda entry: str(entry.summary))


@commands.command(epilog="Example: fedveil tasks")
def tasks() -> None:
    """List what can be learned."""
    from fedveil.tasks.task_registry import TASKS

    print_entries(TASKS, lambda kind: first_line(kind).rstrip(":"))


@commands.command(epilog="Example: fedveil explain zero-out")
def explain(
    term: Annotated[str | None, typer.Argument(help="Word of a statement, report or command; omit it to list all.")] = None,
    markdown: Annotated[bool, flag("--markdown", "Print the whole glossary as a page in Markdown.")] = False,
) -> None:
    """Explain a word of the statement, such as zero-out, delta or aggregate."""
    from fedveil.statement.glossary import TERMS, glossary_page, meaning

    if markdown:
        typer.echo(glossary_page(), nl=False)
    elif term is None:
        print_table(list(TERMS.items()))
    else:
        typer.echo(": ".join(meaning(term)))


@commands.command(epilog="Example: fedveil report runs/first")
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Run directories; runs that differ only in their seed are shown together.", callback=checked(_require_some_run)
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="HTML file to write; by default report.html in the run directory.", callback=checked(require_output)),
    ] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Verify runs and write their report: a self-contained page with curves, privacy, fairness, data and settings."""
    from fedveil.cli.privacy_terminal import reading_progress
    from fedveil.experiment.verification import verification
    from fedveil.report.privacy_section import outcome_lines
    from fedveil.report.report import write_report

    reported = _reported(runs)
    for run in runs:
        if run not in reported:
            typer.echo(f"left out: {run} is not a run directory (it has no config.toml)", err=True)
    with reading_progress() as progress:
        checked = {path: verification(path, trust_plugins=trust_plugins, on_step=progress) for path in reported}
        page = write_report(reported, out, progress, checked)
    for line in outcome_lines(checked):
        typer.echo(line)
    typer.echo(f"report: {page} (open it in a browser; it needs no network)")


@commands.command(epilog="Example: fedveil plot runs/first --what accuracy,noise")
def plot(
    runs: Annotated[
        list[Path], typer.Argument(help="Run directory; several with --against.", callback=checked(_require_each_run))
    ],
    what: Annotated[
        str | None,
        typer.Option(
            help="Columns, separated by commas: accuracy, loss, noise, clip, one of history.csv, client_NAME of participants.csv."
        ),
    ] = None,
    against: Annotated[
        Literal["round", "epsilon"], typer.Option(help="epsilon: the last score of each run against its proven epsilon.")
    ] = "round",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Image file to write (.png, .svg, .pdf); by default in the run directory.", callback=checked(require_picture)
        ),
    ] = None,
    figure: Annotated[str | None, typer.Option(help="With --against epsilon: size in inches, such as 3.4x2.4.")] = None,
    font: Annotated[str, typer.Option(help="Font with --figure, FAMILY:POINTS.")] = "",
) -> None:
    """Plot columns of a run over its rounds, or runs against epsilon: fedveil plot runs/* --against epsilon."""
    from fedveil.errors import ConfigError

    if against == "epsilon":
        from fedveil.drawing import Paper
        from fedveil.report.score_against_epsilon import plot_against_epsilon

        paper = None if figure is None else Paper.of(figure, font)
        typer.echo(f"plot: {plot_against_epsilon(runs, out or Path('epsilon.png'), paper)}")
        return
    if len(runs) > 1 or figure is not None:
        raise ConfigError("fedveil plot shows one run over its rounds: for several runs, or --figure, add --against epsilon")
    from fedveil.report.figures import plot_run

    typer.echo(f"plot: {plot_run(runs[0], what.split(',') if what else None, out)}")


@commands.command(epilog="Example: fedveil publish runs/first shown")
def publish(
    run: RunPath,
    out: Annotated[Path, typer.Argument(help="Folder to write; must be new or empty.")],
) -> None:
    """Copy what may be shown of a finished run: no private figures, and the ledger without times and numbers of participants."""
    from fedveil.experiment.published_copy import publish

    typer.echo(f"published: {publish(run, out)} (everything in it may be shown)")


@commands.command(epilog="Example: fedveil verify runs/first --pin 1223...4223")
def verify(
    run: Annotated[
        Path,
        typer.Argument(
            help="Run directory, a zip of one, or a ledger file of a Releaser or a budget.",
            callback=checked(require_there("a run directory, a zip of one, or a ledger file")),
        ),
    ],
    pin: Annotated[str | None, typer.Option(help="Closing digest that is known from elsewhere: 64 hex digits.")] = None,
    signers: Annotated[
        Path | None, typer.Option(help="allowed_signers file of ssh-keygen: whose keys may have signed; needs --identity.")
    ] = None,
    identity: Annotated[str | None, typer.Option(help="Who is to have signed, as --signers names that person.")] = None,
    against: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a client that took part (join --dir): its ledger and receipts; may be repeated."),
    ] = None,
    trust_plugins: TrustPlugins = False,
    as_json: AsJson = False,
) -> None:
    """Check a run or a ledger: what is bound, recomputed, unknown. Exit 0 verified, 1 contradicted, 2 cannot tell."""
    from rich.console import Console

    from fedveil.cli.privacy_terminal import reading_progress, render_verification, verification_values
    from fedveil.errors import ConfigError
    from fedveil.experiment.verification import Signer, verification

    if (signers is None) != (identity is None):
        raise ConfigError("--signers FILE and --identity NAME go together: give both, or neither")
    signer = None if signers is None or identity is None else Signer(identity, signers)
    with reading_progress() as progress:
        verified = verification(run, pin=pin, signer=signer, trust_plugins=trust_plugins, against=against or (), on_step=progress)
    if as_json:
        print_json({"run": str(run), **verification_values(verified)})
    else:
        render_verification(run, verified, Console())
    raise typer.Exit(verified.exit_status)


@commands.command(epilog="Example: fedveil sign runs/first --key ~/.ssh/id_ed25519")
def sign(
    run: RunPath,
    key: Annotated[Path, typer.Option(help="SSH key to sign with: the private key, or the .pub of a key in ssh-agent.")],
) -> None:
    """Sign the closing digest of a run with an SSH key (ssh-keygen -Y sign, namespace fedveil-run): writes closing.sig."""
    from fedveil.experiment.verification import sign_run

    typer.echo(f"signature: {sign_run(run, key)} (checked by fedveil verify {run} --signers FILE --identity NAME)")
