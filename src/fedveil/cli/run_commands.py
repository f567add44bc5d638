"""Commands that train: run, demo, twin; and new, which creates a starter project."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedveil.cli.command_options import (
    Epsilon,
    NewDirectory,
    OptionalConfig,
    Overrides,
    Preset,
    Quiet,
    Seed,
    TrustPlugins,
    checked,
    configuration,
    names_plugins,
    print_next,
    with_shorthands,
)
from fedveil.experiment.given_paths import require_begun
from fedveil.registry import Registry

if TYPE_CHECKING:
    from fedveil.experiment.config import Config

commands = typer.Typer()


@commands.command(epilog="Example: fedveil run my.toml --epsilon 4 --out runs/first")
def run(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    out: NewDirectory = None,
    seed: Seed = None,
    epsilon: Epsilon = None,
    quiet: Quiet = False,
    resume: Annotated[
        Path | None,
        typer.Option(help="Continue the interrupted run in this directory.", callback=checked(require_begun)),
    ] = None,
    track: Annotated[list[str] | None, typer.Option(help="Tracker to use: tensorboard or mlflow; may be repeated.")] = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Train as configured and write a run directory."""
    if resume is not None and out is not None:
        raise typer.BadParameter("--resume names the run directory itself; omit --out")
    if resume is not None and config is None and preset is None:
        from fedveil.experiment.resume import resumable

        resumable(resume)
        config = resume / "config.toml"
    if not names_plugins(config, overrides):  # which may bring trackers
        trackers: Registry[object] = Registry("--track", "tracker", {})
        for name in track or ():
            trackers.require(name)
    added = [*(overrides or []), *([f"run.track={track}"] if track else [])]
    wanted = configuration(config, preset, with_shorthands(added, seed, epsilon), trust_plugins)
    path = _train(wanted, resume or out, quiet, resume is not None)
    if not quiet:
        print_next({**_after(path), f"fedveil publish {path} FOLDER": "copies what may be shown of it"})


@commands.command(epilog="Example: fedveil new ward --task binary")
def new(
    name: Annotated[str, typer.Argument(help="Name of the project; also used in the names of its Python modules.")],
    folder: Annotated[Path, typer.Option("--dir", help="Directory in which to create it.")] = Path("."),
    task: Annotated[
        str, typer.Option(help="What it learns: binary, classification, multi-label, regression, segmentation, survival or text.")
    ] = "classification",
) -> None:
    """Create a starter project: a configuration, made-up data, your own code, and a test that runs them."""
    from fedveil.experiment.new_project import new_project

    project = new_project(name, folder, task)
    typer.echo(f"project: {project} (what to do next: {project / 'README.md'})")


@commands.command(epilog="Example: fedveil demo --out runs/demo")
def demo(out: NewDirectory = None) -> None:
    """First run: train privately on the embedded digits, and show accuracy and the privacy statement."""
    from fedveil.experiment.new_project import demo_config

    path = _train(demo_config(), out, quiet=False)
    print_next({**_after(path), "fedveil new NAME": "starts a project with a configuration and data of your own"})


@commands.command(epilog="Example: fedveil twin my.toml --client 3 --change record")
def twin(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    client: Annotated[int, typer.Option(help="Client whose data differ between the two runs.")] = 0,
    change: Annotated[
        Literal["record", "labels", "absent"],
        typer.Option(
            help="record: one example is replaced; labels: every label becomes the next class; absent: the client has no data."
        ),
    ] = "record",
    out: NewDirectory = None,
    quiet: Quiet = False,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Measure global sensitivity over the rounds: two runs with the same noise, on data that differ in one client."""
    from fedveil.cli.run_terminal import twin_with_progress

    shared = configuration(config, preset, overrides, trust_plugins)
    folder = out if out is not None else Path("runs") / f"twin-{shared.method.name}-{shared.data.name}"
    made = twin_with_progress(shared, client, change, folder, quiet)
    typer.echo(f"twins: {made} (fedveil plot {made} --what sensitivity,update)")


def _after(run: Path) -> dict[str, str]:
    """Return the commands that follow a run, each with what it does."""
    return {
        f"fedveil verify {run}": "checks every number of it again",
        f"fedveil attack {run} --kind dlg": "tries to reconstruct what it was trained on",
    }


def _train(config: Config, out: Path | None, quiet: bool, resume: bool = False) -> Path:
    from fedveil.cli.run_terminal import run_with_progress

    result = run_with_progress(config, out, quiet, resume)
    if result.ended:
        raise typer.Exit(3)
    return result.path
