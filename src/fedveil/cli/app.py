"""The command line: commands and progress, nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedveil.errors import FedveilError

os.environ.setdefault("OMP_NUM_THREADS", "1")  # parallelism is by processes; threads inside operators only get in their way

app = typer.Typer(
    name="fedveil",
    help="Differentially private federated learning whose privacy you can check.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
data_app = typer.Typer(help="The data sets that there are, and how a configuration deals them out.", invoke_without_command=True)
app.add_typer(data_app, name="data")

ConfigPath = Annotated[Path, typer.Argument(help="Configuration in TOML.")]
OptionalConfig = Annotated[Path | None, typer.Argument(help="Configuration in TOML; or give --preset.")]
Preset = Annotated[str | None, typer.Option(help="A ready configuration; `fedveil methods METHOD` lists them.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override section.key=value; may be repeated.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.callback()
def _options(debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False) -> None:
    """Differentially private federated learning whose privacy you can check."""


@app.command()
def run(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Run directory; must be new or empty.")] = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set run.seed=N.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
    resume: Annotated[Path | None, typer.Option(help="Go on with the interrupted run in this directory.")] = None,
    track: Annotated[list[str] | None, typer.Option(help="tensorboard or mlflow; may be repeated.")] = None,
) -> None:
    """Train as configured and leave a run directory."""
    from fedveil.configuration.config import load_config
    from fedveil.configuration.presets import chosen

    if resume is not None and out is not None:
        raise typer.BadParameter("--resume names the run directory itself; leave --out away")
    if resume is not None and config is None and preset is None:
        from fedveil.run.resume import resumable

        resumable(resume)
        config = resume / "config.toml"
    asked = [*(overrides or []), *([f"run.track={track}"] if track else [])]
    given = load_config(chosen(config, preset), _with_seed(asked, seed))
    _train(given, resume or out, quiet, resume is not None)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Name of the project; it becomes part of Python module names.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where to make it.")] = Path("."),
) -> None:
    """Write a starter project: configuration, a method and a data set of your own, and a test that runs them."""
    from fedveil.run.new_project import new_project

    project = new_project(name, folder)
    typer.echo(f"project: {project} (what to do next: {project / 'README.md'})")


@app.command()
def demo(out: Annotated[Path | None, typer.Option(help="Run directory; must be new or empty.")] = None) -> None:
    """The main job on an embedded data set: train digits privately, see accuracy and the privacy statement."""
    from fedveil.run.demo import demo_config

    _train(demo_config(), out, quiet=False)


@app.command("compare")
def compare_methods(
    methods: Annotated[str, typer.Option(help="With commas; options as name:key=value:key=value.")],
    config: OptionalConfig = None,
    preset: Preset = None,
    epsilon: Annotated[str, typer.Option(help="Guarantees to compare at, with commas; inf is a run without noise.")] = "2,4,8",
    seeds: Annotated[int, typer.Option(help="So many runs of each, from run.seed on.")] = 3,
    partition: Annotated[str, typer.Option(help="With commas, each kind:key=value; the configured one by default.")] = "",
    by: Annotated[str, typer.Option(help="Equal guarantee: proven, or claimed by the papers (published variants).")] = "proven",
    metric: Annotated[str, typer.Option(help="test_accuracy, test_f1 or mean_personal_accuracy.")] = "test_accuracy",
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Directory; an interrupted comparison in it continues.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; by default one a core.")] = None,
) -> None:
    """Compare methods at equal guarantee over seeds: ranked tables with a test, pictures, and every run."""
    from fedveil.cli.compare_terminal import compare_live
    from fedveil.configuration.config import load_config
    from fedveil.configuration.presets import chosen

    given = load_config(chosen(config, preset), overrides or [])
    if compare_live(given, methods, epsilon, seeds, partition, by, metric, out, jobs).failed:
        raise typer.Exit(1)


@app.command()
def certify(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set run.seed=N.")] = None,
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
) -> None:
    """The privacy statement of a configuration, without training; or that of a run directory, with its audits."""
    from fedveil.configuration.config import load_config
    from fedveil.configuration.presets import chosen
    from fedveil.statement.certify import certify_config, saved

    source = chosen(config, preset)
    statement = saved(source) if source.is_dir() else certify_config(load_config(source, _with_seed(overrides, seed)))
    if as_json:
        _print_json(statement.to_dict())
    elif markdown:
        typer.echo(statement.to_markdown())
    else:
        from rich.console import Console

        from fedveil.cli.statement_terminal import render

        render(statement, Console())


@app.command()
def audit(
    target: Annotated[Path, typer.Argument(help="Configuration in TOML, or run directory.")],
    overrides: Overrides = None,
    n: Annotated[int, typer.Option("--n", help="Tested releases or runs in each of the two worlds.")] = 1000,
    confidence: Annotated[float, typer.Option(help="Confidence of each bound.")] = 0.95,
    canaries: Annotated[
        int, typer.Option(help="Also train once on the data, with so many clients as canaries: an estimate, no bound.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Attack the mechanism of a configuration or run: lower bounds on epsilon, beside the claim and the proof."""
    from fedveil.cli.audit_terminal import audit_with_progress

    statement = audit_with_progress(target, overrides or [], n, confidence, canaries, quiet=as_json)
    if as_json:
        _print_json(statement.to_dict())
    else:
        from rich.console import Console

        from fedveil.cli.statement_terminal import render

        render(statement, Console())
        _stale_report(target)


@app.command()
def replay(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(help="Rounds played of each run, at most.")] = 3,
    engine: Annotated[Literal["inline", "pool"], typer.Option(help="pool cannot see the order of releases.")] = "inline",
    as_json: AsJson = False,
) -> None:
    """Run on the data, then on neighbouring data with the same released numbers: all else that is public must be the same."""
    from fedveil.cli.replay_terminal import render, replay_with_progress
    from fedveil.configuration.config import load_config
    from fedveil.configuration.presets import chosen

    given = load_config(chosen(config, preset), overrides or [])
    found = replay_with_progress(given, rounds, engine, quiet=as_json)
    if as_json:
        _print_json(found.to_dict())
    else:
        from rich.console import Console

        render(found, Console())
    if found.findings:
        raise typer.Exit(1)


@app.command()
def attack(
    target: Annotated[Path, typer.Argument(help="Configuration in TOML, or run directory.")],
    kind: Annotated[str, typer.Option(help="Which attack; an unknown one is answered with those that there are.")],
    images: Annotated[int | None, typer.Option(help="Examples attacked.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples behind each attacked upload.")] = None,
    restarts: Annotated[int | None, typer.Option(help="Starts; the one of least matching loss counts.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each start.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything random in the attack, the door's noise included.")] = 0,
    round: Annotated[int | None, typer.Option("--round", help="Round attacked, from 0; earlier ones are trained first.")] = None,
    knows: Annotated[
        str | None, typer.Option(help="With commas: mask,noise,clip,aux (default), labels, others; or none.")
    ] = None,
    defence: Annotated[str, typer.Option(help="run: the configured method; none: raw updates, for comparison.")] = "run",
    out: Annotated[Path | None, typer.Option(help="Folder for attack-KIND.json and .png; by default the run directory.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Attack what a configuration or run lets out: reconstructions, labels, clients, attributes, with floors beside."""
    from fedveil.cli.attack_terminal import attack_with_progress, options_of, render
    from fedveil.run.run_directory import plain

    options = options_of(images, batch, restarts, steps, seed, round, knows, defence)
    found = attack_with_progress(target, kind, options, overrides or [], out, quiet=as_json)
    if as_json:
        _print_json(plain(found.record))
    else:
        from rich.console import Console

        render(found, Console())
        _stale_report(target)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method: its parameters and its ready configurations.")] = None,
) -> None:
    """The methods that there are, one line each; or everything about one."""
    from fedveil.configuration.presets import names, title
    from fedveil.methods.method_registry import METHODS, described

    if name is None:
        _table([(name, (kind.__doc__ or "").split("\n")[0]) for name, kind in METHODS.items()])
        return
    typer.echo(described(name))
    if names(name):
        typer.echo("\nReady configurations (fedveil run --preset NAME):")
        _table([(preset, title(preset)) for preset in names(name)])


@app.command()
def models() -> None:
    """The networks that there are, one line each."""
    from fedveil.models.model_registry import MODELS

    _table([(name, entry.summary) for name, entry in MODELS.items()])


@data_app.callback()
def data(context: typer.Context) -> None:
    """The data sets that there are, one line each."""
    if context.invoked_subcommand is None:
        from fedveil.data.catalogue import CATALOGUE

        _table([(i.name, f"{i.title} {i.input_shape}{' (embedded)' if i.embedded else ''}") for i in CATALOGUE.values()])


@data_app.command("plot")
def data_plot(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Picture to write.")] = Path("partition.png"),
) -> None:
    """Plot clients against labels."""
    from fedveil.configuration.config import load_config
    from fedveil.pages.figures.partition_figure import plot_partition
    from fedveil.run.assembly import prepare

    ready = prepare(load_config(config, overrides or []))
    plot_partition(ready.partition, ready.dataset.y_train, ready.dataset.info.classes, out)
    typer.echo(f"partition plot: {out}")


@app.command()
def ledger(run: Annotated[Path, typer.Argument(help="Run directory or ledger file.")], as_json: AsJson = False) -> None:
    """What a run released, client by client."""
    from fedveil.cli.ledger_terminal import render_ledger, totals

    path = run / "ledger.sqlite" if run.is_dir() else run
    if as_json:
        _print_json(totals(path))
    else:
        from rich.console import Console

        render_ledger(path, Console())


@app.command()
def explore(out: Annotated[Path, typer.Option(help="Page to write.")] = Path("privacy-explorer.html")) -> None:
    """Write the privacy explorer: one self-contained page with sliders and the claimed and proven curves."""
    from fedveil.pages.explorer import write_explorer

    typer.echo(f"privacy explorer: {write_explorer(out)} (open it in a browser; it needs no network)")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; those that differ in their seed only are shown as one.")],
    out: Annotated[Path | None, typer.Option(help="Page to write; by default report.html in the run directory.")] = None,
) -> None:
    """Write the report of one or several runs: one self-contained page with curves, privacy, fairness, data and settings."""
    from fedveil.pages.report import write_report

    shown = [run for run in runs if (run / "config.toml").is_file() or not run.is_dir()] or runs
    for run in runs:
        if run not in shown:
            typer.echo(f"left out: {run} is not a run directory (it has no config.toml)", err=True)
    typer.echo(f"report: {write_report(shown, out)} (open it in a browser; it needs no network)")


@app.command()
def reproduce(
    recipe: Annotated[str | None, typer.Argument(help="A recipe; left out, all of them are listed.")] = None,
    scale: Annotated[str, typer.Option(help="small: minutes on two cores; paper: the paper's settings.")] = "small",
    out: Annotated[Path, typer.Option(help="Folder of runs and results; recipes share it.")] = Path("reproduced"),
    seeds: Annotated[int, typer.Option(help="Repetitions of each row.")] = 1,
    data_dir: Annotated[Path | None, typer.Option(help="Directory that holds data sets.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs at a time; by default one a core.")] = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """The papers' tables and figures as recipes: list them, or run one and see ours beside theirs."""
    from fedveil.cli.reproduce_terminal import list_live, reproduce_live

    found = (
        list_live(data_dir, as_json)
        if recipe is None
        else reproduce_live(recipe, scale, out, seeds, data_dir, jobs, overrides or [], as_json)
    )
    if as_json:
        _print_json(found)


@app.command()
def twin(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    client: Annotated[int, typer.Option(help="Whose data differ between the two runs.")] = 0,
    change: Annotated[
        Literal["labels", "record", "absent"],
        typer.Option(help="labels: each becomes the next class; record: one other example; absent: no data."),
    ] = "labels",
    out: Annotated[Path | None, typer.Option(help="Directory; must be new or empty.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
) -> None:
    """Global sensitivity over the rounds (paper 002): two runs with the same noise, on data that differ in one client."""
    from fedveil.cli.run_terminal import twin_live
    from fedveil.configuration.config import load_config
    from fedveil.configuration.presets import chosen

    given = load_config(chosen(config, preset), overrides or [])
    folder = out if out is not None else Path("runs") / f"twin-{given.method.name}-{given.data.name}"
    made = twin_live(given, client, change, folder, quiet)
    typer.echo(f"twins: {made} (fedveil plot {made} --what sensitivity,update)")


@app.command()
def plot(
    run: Annotated[Path, typer.Argument(help="Run directory.")],
    what: Annotated[
        str | None,
        typer.Option(
            help="Columns, with commas: accuracy, loss, noise, clip, any of history.csv, client_ and one of participants.csv."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Picture to write (.png, .svg, .pdf); by default in the run directory.")
    ] = None,
) -> None:
    """Plot columns of a run's history over its rounds."""
    from fedveil.pages.figures.run_figures import plot_run

    typer.echo(f"plot: {plot_run(run, what.split(',') if what else None, out)}")


def _train(config: Any, out: Path | None, quiet: bool, resume: bool = False) -> None:
    from fedveil.cli.run_terminal import run_live

    result = run_live(config, out, quiet, resume)
    if result.ended:
        raise typer.Exit(3)


def _stale_report(run: Path) -> None:
    """Say that a run's page does not show yet what was just found."""
    if (run / "report.html").is_file():
        typer.echo(f"{run / 'report.html'} does not show this yet: `fedveil report {run}` writes the page anew")


def _with_seed(overrides: list[str] | None, seed: int | None) -> list[str]:
    return [*(overrides or []), *([] if seed is None else [f"run.seed={seed}"])]


def _print_json(value: Any) -> None:
    import json

    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def _table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")


def main() -> None:
    """Run the program; a user's error is one line on stderr and exit status 2."""
    try:
        app()
    except FedveilError as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"fedveil: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if "--debug" in sys.argv:
            raise
        typer.echo(f"fedveil: cannot read or write {error.filename or 'a file'}: {error.strerror or error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("fedveil: interrupted", err=True)
        sys.exit(130)
