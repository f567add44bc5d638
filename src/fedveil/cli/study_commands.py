"""Commands of many runs: compare, reproduce, tune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedveil.cli.command_options import (
    AsJson,
    DataDirectory,
    Jobs,
    OptionalConfig,
    Overrides,
    Preset,
    TrustPlugins,
    checked,
    configuration,
    flag,
    method_lists,
    names_plugins,
    print_json,
)
from fedveil.errors import ConfigError, DataError, nearest
from fedveil.experiment.given_paths import require_grid, require_output_folder
from fedveil.methods.method_table import METHOD_TABLE
from fedveil.registry import Registry

commands = typer.Typer()


def _require_recipe(name: str) -> None:
    from fedveil.studies.reproduce.recipe_list import recipes_of

    recipes_of(name)


def _require_methods(text: str) -> None:
    """Refuse an unknown method of a comparison."""
    known: Registry[object] = Registry("--methods", "method", METHOD_TABLE)
    for part in text.split(","):
        if part.strip().replace("-", "").isalpha():
            known.require(part.strip())


def _require_data_set(name: str) -> None:
    from fedveil.data.catalogue import CATALOGUE

    if name not in CATALOGUE:
        raise ConfigError(f"--on {name}: unknown data set{nearest(name, CATALOGUE)}; see `fedveil data`")


@commands.command("compare", epilog="Example: fedveil compare my.toml --methods dp-fedavg,dp-scaffold --epsilon 2,8")
def compare_methods(
    methods: Annotated[
        str,
        typer.Option(
            help="Methods, separated by commas, with options as name:key=value:key=value.",
            autocompletion=method_lists,
        ),
    ],
    config: OptionalConfig = None,
    preset: Preset = None,
    epsilon: Annotated[
        str, typer.Option(help="Values of epsilon to compare at, separated by commas; inf runs without noise.")
    ] = "2,4,8",
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each method, with seeds from run.seed on.")] = 3,
    partition: Annotated[
        str, typer.Option(help="Partitions, separated by commas, each kind:key=value; by default the configured one.")
    ] = "",
    by: Annotated[
        Literal["proven", "claimed"],
        typer.Option(help="Which epsilon is made equal: proven, or claimed by the papers (published variants)."),
    ] = "proven",
    metric: Annotated[
        str,
        typer.Option(help="What to rank by, such as test_f1 or mean_personal_accuracy; by default the main metric of the task."),
    ] = "",
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory to write; an interrupted comparison in it is continued.", callback=checked(require_grid)),
    ] = None,
    jobs: Jobs = None,
    latex: Annotated[bool, flag("--latex", "Print the table in LaTeX (also in compare.tex).")] = False,
    figure: Annotated[str | None, typer.Option(help="Also draw compare.pdf in this size, in inches, such as 3.4x2.4.")] = None,
    font: Annotated[str, typer.Option(help="Font of that figure, FAMILY:POINTS.")] = "",
    trust_plugins: TrustPlugins = False,
) -> None:
    """Compare methods at an equal privacy guarantee over several seeds: ranked tables, a significance test, figures."""
    if not names_plugins(config, overrides):  # which may bring methods
        _require_methods(methods)
    shared = configuration(config, preset, overrides, trust_plugins)
    from fedveil.cli.study_terminal import compare_with_table, epsilons_of, split_list
    from fedveil.drawing import Paper
    from fedveil.studies.compare.comparison_plan import ComparisonSpec, seeds_from

    spec = ComparisonSpec(
        shared,
        split_list(methods),
        epsilons_of(epsilon),
        seeds_from(shared, seeds),
        partitions=split_list(partition),
        by=by,
        metric=metric,
    )
    paper = None if figure is None else Paper.of(figure, font)
    raise typer.Exit(compare_with_table(spec, out, jobs, paper=paper, as_latex=latex))


@commands.command(epilog="Example: fedveil reproduce ladp-fl/table-2")
def reproduce(
    recipe: Annotated[
        str | None,
        typer.Argument(help="Recipe or paper to run; omit it to list all.", callback=checked(_require_recipe)),
    ] = None,
    scale: Annotated[
        Literal["small", "paper"],
        typer.Option(help="small takes minutes on two cores; paper uses the settings of the paper."),
    ] = "small",
    out: Annotated[
        Path,
        typer.Option(help="Directory of runs and results, shared by all recipes.", callback=checked(require_output_folder)),
    ] = Path("reproduced"),
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs for each row, with different seeds.")] = 1,
    data_dir: DataDirectory = None,
    jobs: Jobs = None,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only rows of this label, axis=label as in the table, such as epsilon=2; may be repeated."),
    ] = None,
    against: Annotated[
        str, typer.Option(help="Label that tests over the seeds compare the others with; by default that of the largest mean.")
    ] = "",
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes for the papers' tables and figures, or run one and compare our numbers with theirs."""
    if recipe is None and not as_json:
        from fedveil.cli.recipe_terminal import print_recipes

        print_recipes(data_dir)
        return
    labels = _labels_by_axis(only or [])
    from fedveil.cli.study_terminal import listed, reproduce_with_progress
    from fedveil.studies.reproduce.recipe_list import recipes_of
    from fedveil.studies.reproduce.reproduction import ReproductionSpec, chosen_rows

    if recipe is None:
        print_json(listed(data_dir))
        return
    specs = [ReproductionSpec(name, scale, seeds, data_dir, overrides or [], labels, against) for name in recipes_of(recipe)]
    for spec in specs:  # a label that one of them lacks is refused before the first one is run
        try:
            chosen_rows(spec)
        except ConfigError as error:
            raise ConfigError(f"{spec.recipe}: {error}") from error
    done: list[Any] = []
    lacking: list[str] = []
    for spec in specs:
        try:
            done.append(reproduce_with_progress(spec, out, jobs, as_json))
        except DataError as problem:
            if len(specs) == 1:
                raise
            lacking.append(str(spec.recipe))
            typer.echo(f"{spec.recipe} is not run: {problem}", err=True)
    if as_json:
        print_json(done[0] if len(specs) == 1 else done)
    if lacking:
        typer.echo(f"{len(done)} of {len(specs)} recipes are run. These lack their data: {', '.join(lacking)}", err=True)
        raise typer.Exit(1)


@commands.command(epilog="Example: fedveil tune my.toml --on digits --try method.clip=[0.5,1,2]")
def tune(
    values: Annotated[list[str], typer.Option("--try", help="Values of a key, section.key=[value, value]; may be repeated.")],
    config: OptionalConfig = None,
    on: Annotated[
        str | None,
        typer.Option(
            "--on",
            help="Public data set that stands in for the data: partitioned alike, at no cost.",
        ),
    ] = None,
    private: Annotated[
        bool, flag("--private", "On the data themselves: the best of a secret number of runs is released, and all are charged.")
    ] = False,
    unaccounted: Annotated[
        bool, flag("--unaccounted", "On the data themselves, looking at all runs: the statement composes what they cost.")
    ] = False,
    runs: Annotated[float, typer.Option(help="Expected number of runs of --private.")] = 10,
    shape: Annotated[
        float, typer.Option(help="Law of the number of runs of --private: 0 is logarithmic, 1 geometric, above -1.")
    ] = 0,
    score_noise: Annotated[
        float, typer.Option(help="Noise multiplier of the clients' score, which chooses with --private and --unaccounted.")
    ] = 20,
    by_test_set: Annotated[
        bool, flag("--by-test-set", "Choose by the test set, which then says too much; the statement tells it.")
    ] = False,
    preset: Preset = None,
    seeds: Annotated[int, typer.Option(min=1, help="With --on: runs of each setting, with seeds from run.seed on.")] = 1,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Directory to write.", callback=checked(require_output_folder))] = Path("tuned"),
    jobs: Jobs = None,
    trust_plugins: TrustPlugins = False,
) -> None:
    """Choose settings: on public data at no cost, by private selection, or by looking at runs on the data themselves."""
    if [on is not None, private, unaccounted].count(True) != 1:
        raise ConfigError("say where to tune: --on DATA (public, at no cost), --private (charged) or --unaccounted (composed)")
    if on is None and seeds != 1:
        raise ConfigError(f"--seeds {seeds}: on the data themselves each setting runs with the seed of the configuration")
    if on is not None:
        _require_data_set(on)
    from fedveil.accounting.selection import Selection
    from fedveil.cli.study_terminal import look_with_table, search_privately, tune_with_table
    from fedveil.studies.tune.proxy_grid import TuningSpec, grid_of
    from fedveil.studies.tune.search import SearchSpec

    shared, grid = configuration(config, preset, overrides, trust_plugins), grid_of(values)
    if on is not None:
        tune_with_table(TuningSpec(shared, on, grid, seeds), out, jobs)
        return
    spec = SearchSpec(shared, grid, None if by_test_set else score_noise)
    if private:
        search_privately(spec, out, Selection(runs, shape))
    else:
        look_with_table(spec, out, jobs)


def _labels_by_axis(texts: list[str]) -> dict[str, list[str]]:
    """Return labels by axis, from items `axis=label`."""
    chosen: dict[str, list[str]] = {}
    for text in texts:
        axis, sign, label = text.partition("=")
        if not sign:
            raise ConfigError(f"--only {text}: axis=label is expected, such as --only epsilon=2")
        chosen.setdefault(axis, []).append(label)
    return chosen
