"""Commands of many runs: compare, reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fedveil.cli.command_options import AsJson, OptionalConfig, Overrides, Preset, print_json

commands = typer.Typer()


@commands.command("compare")
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
    from fedveil.cli.compare_terminal import compare_with_table, epsilons_of, split_list
    from fedveil.configuration.config import load_config
    from fedveil.configuration.presets import chosen
    from fedveil.studies.compare.comparison_spec import By, ComparisonSpec, seeds_from

    shared = load_config(chosen(config, preset), overrides or [])
    spec = ComparisonSpec(
        shared,
        split_list(methods),
        epsilons_of(epsilon),
        seeds_from(shared, seeds),
        partitions=split_list(partition),
        by=cast(By, by),
        metric=metric,
    )
    if compare_with_table(spec, out, jobs).failed:
        raise typer.Exit(1)


@commands.command()
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
    from fedveil.cli.reproduce_terminal import print_recipes, reproduce_with_progress
    from fedveil.studies.reproduce.recipe_rows import Scale
    from fedveil.studies.reproduce.reproduction import ReproductionSpec

    if recipe is None:
        found: Any = print_recipes(data_dir, as_json)
    else:
        spec = ReproductionSpec(recipe, cast(Scale, scale), seeds, data_dir, overrides or [])
        found = reproduce_with_progress(spec, out, jobs, as_json)
    if as_json:
        print_json(found)
