"""Commands for whoever receives a run, and for whoever hands it over: verify, sign."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedveil.cli.command_options import AsJson, TrustPlugins, print_json

commands = typer.Typer()


@commands.command()
def verify(
    run: Annotated[Path, typer.Argument(help="Run directory, or a zip of one.")],
    pin: Annotated[str | None, typer.Option(help="Closing digest that is known from elsewhere: 64 hex digits.")] = None,
    signers: Annotated[
        Path | None, typer.Option(help="allowed_signers file of ssh-keygen: whose keys may have signed; needs --identity.")
    ] = None,
    identity: Annotated[str | None, typer.Option(help="Who is to have signed, as --signers names that person.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Folder of a client that took part (join --dir): hold its ledger against the run's.")
    ] = None,
    trust_plugins: TrustPlugins = False,
    as_json: AsJson = False,
) -> None:
    """Check a run that you were given: what is bound, recomputed, unknown. Exit 0 verified, 1 contradicted, 2 cannot tell."""
    from rich.console import Console

    from fedveil.cli.reading_progress import reading_progress
    from fedveil.cli.verify_terminal import render_verification, verification_values
    from fedveil.errors import ConfigError
    from fedveil.run.closing_signature import Signer
    from fedveil.run.verification import verification

    if (signers is None) != (identity is None):
        raise ConfigError("--signers FILE and --identity NAME go together: give both, or neither")
    signer = None if signers is None or identity is None else Signer(identity, signers)
    with reading_progress() as progress:
        found = verification(run, pin=pin, signer=signer, trust_plugins=trust_plugins, on_step=progress)
    if against is not None:
        from fedveil.network.two_ledgers import compared

        found = found._replace(findings=(*found.findings, *compared(run, against)))
    if as_json:
        print_json({"run": str(run), **verification_values(found)})
    else:
        render_verification(run, found, Console())
    raise typer.Exit(found.exit_status)


@commands.command()
def sign(
    run: Annotated[Path, typer.Argument(help="Run directory whose ledger is closed.")],
    key: Annotated[Path, typer.Option(help="SSH key to sign with: the private key, or the .pub of a key in ssh-agent.")],
) -> None:
    """Sign the closing digest of a run with an SSH key (ssh-keygen -Y sign, namespace fedveil-run): writes closing.sig."""
    from fedveil.run.closing_signature import sign_run

    typer.echo(f"signature: {sign_run(run, key)} (checked by fedveil verify {run} --signers FILE --identity NAME)")
