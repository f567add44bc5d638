"""Commands about privacy: plan, certify, audit, replay, attack, explore."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fedveil.cli.command_options import (
    AsJson,
    ConfigOrRun,
    Epsilon,
    ForInstitution,
    OptionalConfig,
    OptionalConfigOrRun,
    Overrides,
    Preset,
    Seed,
    TrustPlugins,
    checked,
    configuration,
    flag,
    import_trusted,
    print_json,
    print_next,
    with_shorthands,
)
from fedveil.errors import ConfigError
from fedveil.experiment.given_paths import require_output, require_output_folder

if TYPE_CHECKING:
    from fedveil.statement.statement import Statement

commands = typer.Typer()


def _require_kind(kind: str) -> None:
    from fedveil.attacks.attack_table import ATTACKS

    ATTACKS.require(kind, "--kind")


@commands.command(epilog="Example: fedveil plan my.toml --epsilon 4")
def plan(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    epsilon: Epsilon = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Print which rounds, clients per round and unit fit privacy.epsilon, with the accuracy that its noise may leave."""
    from fedveil.cli.privacy_terminal import print_plan
    from fedveil.experiment.certify import plan_table

    configured = configuration(config, preset, with_shorthands(overrides, epsilon=epsilon), trust_plugins)
    print_plan(plan_table(configured), configured)


@commands.command(epilog="Example: fedveil certify my.toml --epsilon 4")
def certify(
    config: OptionalConfigOrRun = None,
    preset: Preset = None,
    overrides: Overrides = None,
    seed: Seed = None,
    epsilon: Epsilon = None,
    trust_plugins: TrustPlugins = False,
    as_json: AsJson = False,
    markdown: Annotated[bool, flag("--markdown", "Print Markdown.")] = False,
    institution: ForInstitution = None,
) -> None:
    """Print the privacy statement of a configuration, without training, or of a run, which is verified (exit 1: contradicted)."""
    if institution is not None and (as_json or markdown):
        raise ConfigError(f"--as {institution} has a format of its own: omit --json and --markdown")
    from fedveil.cli.privacy_terminal import print_for_institution
    from fedveil.experiment.certify import certify_config
    from fedveil.statement.statement_layout import read_statement

    if config is None or preset is not None or not config.is_dir():
        statement = certify_config(configuration(config, preset, with_shorthands(overrides, seed, epsilon), trust_plugins))
        if institution is not None:
            print_for_institution(statement, institution)
            return
        _print_statement(statement, as_json, markdown)
        if not as_json and not markdown:
            given = f"--preset {preset}" if config is None else f"{config}"
            print_next(
                {
                    f"fedveil plan {given}": "shows which rounds, clients and unit fit this epsilon",
                    f"fedveil run {given}": "trains, with the --set that you gave here",
                }
            )
        return
    from fedveil.cli.privacy_terminal import reading_progress, verification_values
    from fedveil.experiment.verification import headline, problems, verification

    with reading_progress() as progress:
        verified = verification(config, trust_plugins=trust_plugins, on_step=progress)
    statement = read_statement(config)
    if institution is not None:
        print_for_institution(statement, institution, config, verified)
        return
    if not as_json:
        lines = [headline(str(config), verified), *problems(verified)]
        typer.echo("\n".join(f"> {line}  " for line in lines) + "\n" if markdown else "\n".join(lines))
    _print_statement(statement, as_json, markdown, verification=verification_values(verified))
    if verified.exit_status == 1:
        raise typer.Exit(1)
    if not as_json and not markdown:
        print_next(
            {
                f"fedveil certify {config} --as dpia": "writes the facts for a data protection impact assessment",
                f"fedveil publish {config} FOLDER": "copies what may be shown of it",
            }
        )


def _print_statement(statement: Statement, as_json: bool, markdown: bool, **more: Any) -> None:
    from fedveil.statement.statement_layout import to_dict, to_markdown

    if as_json:
        print_json(to_dict(statement) | more)
    elif markdown:
        typer.echo(to_markdown(statement))
    else:
        from rich.console import Console

        from fedveil.statement.statement_layout import render

        render(statement, Console())


@commands.command(epilog="Example: fedveil audit runs/first")
def audit(
    target: ConfigOrRun,
    overrides: Overrides = None,
    n: Annotated[int, typer.Option("--n", help="Number of releases or runs tested in each of the two worlds.")] = 1000,
    confidence: Annotated[float, typer.Option(help="Confidence level of each bound.")] = 0.95,
    canaries: Annotated[
        int, typer.Option(help="Also train once on the data with this many clients as canaries; gives an estimate, not a bound.")
    ] = 0,
    trust_plugins: TrustPlugins = False,
    as_json: AsJson = False,
) -> None:
    """Attack the mechanism of a configuration or run: lower bounds on epsilon, next to the claimed and proven values."""
    from fedveil.cli.attack_terminal import audit_with_progress

    import_trusted(target, trust_plugins)
    statement = audit_with_progress(target, overrides or [], n, confidence, canaries, quiet=as_json)
    _print_statement(statement, as_json, markdown=False)
    if not as_json:
        _stale_report(target)


@commands.command(epilog="Example: fedveil replay my.toml --rounds 3")
def replay(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, help="Maximum number of rounds of each run.")] = 3,
    engine: Annotated[
        Literal["inline", "pool"], typer.Option(help="Engine of both runs; with pool, the order of releases is not checked.")
    ] = "inline",
    trust_plugins: TrustPlugins = False,
    as_json: AsJson = False,
) -> None:
    """Run on the data, then replay the releases on neighbouring data: everything else that is public must be identical."""
    from fedveil.cli.attack_terminal import render_replay as render
    from fedveil.cli.attack_terminal import replay_with_progress

    result = replay_with_progress(configuration(config, preset, overrides, trust_plugins), rounds, engine, quiet=as_json)
    if as_json:
        print_json(result.to_dict())
    else:
        from rich.console import Console

        render(result, Console())
    if result.findings:
        raise typer.Exit(1)


@commands.command(epilog="Example: fedveil attack runs/first --kind dlg")
def attack(
    target: ConfigOrRun,
    kind: Annotated[str | None, typer.Option(help="Kind of attack; without it, the kinds are listed.")] = None,
    images: Annotated[int | None, typer.Option(help="Number of examples to attack.")] = None,
    batch: Annotated[int | None, typer.Option(help="Number of examples in each attacked upload.")] = None,
    restarts: Annotated[
        int | None, typer.Option(help="Number of random starts; the one with the lowest matching loss is kept.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimiser steps of each start.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the attack, including the noise of the attacked release.")] = 0,
    round: Annotated[
        int | None, typer.Option("--round", help="Round to attack, counted from 0; the rounds before it are trained first.")
    ] = None,
    knows: Annotated[
        str | None,
        typer.Option(
            help="What the attacker knows, separated by commas: mask,noise,clip,aux (default), labels, others; or none."
        ),
    ] = None,
    defence: Annotated[
        Literal["run", "none"], typer.Option(help="run: the configured method; none: raw updates, for comparison.")
    ] = "run",
    out: Annotated[
        Path | None,
        typer.Option(
            help="Directory for attack-KIND.json and .png; by default the run directory.", callback=checked(require_output_folder)
        ),
    ] = None,
    overrides: Overrides = None,
    trust_plugins: TrustPlugins = False,
    as_json: AsJson = False,
) -> None:
    """Attack what a configuration or run releases (images, labels, clients, attributes), and show what guessing achieves."""
    if kind is None:
        from fedveil.cli.attack_terminal import print_kinds

        print_kinds(target)
        return
    from fedveil.attacks.attack_options import PUBLIC, AttackOptions, known_as

    _require_kind(kind)
    knowledge = PUBLIC if knows is None else known_as(knows)
    options = AttackOptions(images, batch, restarts, steps, seed, round, knowledge, defence)
    from fedveil.cli.attack_terminal import attack_with_progress
    from fedveil.cli.attack_terminal import render_attack as render
    from fedveil.experiment.run_directory import plain

    import_trusted(target, trust_plugins)
    finished = attack_with_progress(target, kind, options, overrides or [], out, quiet=as_json)
    if as_json:
        print_json(plain(finished.record))
    else:
        from rich.console import Console

        render(finished, Console())
        _stale_report(target)


@commands.command(epilog="Example: fedveil explore --out privacy.html")
def explore(
    out: Annotated[Path, typer.Option(help="HTML file to write.", callback=checked(require_output))] = Path(
        "privacy-explorer.html"
    ),
) -> None:
    """Write the privacy explorer: a self-contained page with sliders and curves of claimed and proven epsilon."""
    from fedveil.report.explorer import write_explorer

    typer.echo(f"privacy explorer: {write_explorer(out)} (open it in a browser; it needs no network)")


def _stale_report(run: Path) -> None:
    """Tell the user that a run's report does not yet show the new result."""
    if (run / "report.html").is_file():
        typer.echo(f"{run / 'report.html'} does not show this yet: `fedveil report {run}` writes the page anew")
