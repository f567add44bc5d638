"""Commands about data sets: which there are and where they lie, how to get one, how a configuration deals one out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedveil.cli.command_options import ConfigPath, Overrides, TrustPlugins, configuration, print_table
from fedveil.cli.completion import data_set_names
from fedveil.errors import nearest


class _DataCommands(TyperGroup):
    """The commands; what is none may be meant for the name of a data set."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if hasattr(error, "message"):
                from fedveil.data.catalogue import CATALOGUE

                error.message += f" A data set is got with `fedveil data get NAME`{nearest(args[0], CATALOGUE)}."
            raise


data_app = typer.Typer(
    cls=_DataCommands,
    help="List the data sets and where they lie, get one, or plot how a configuration partitions one.",
    invoke_without_command=True,
)
DataDirectory = Annotated[Path | None, typer.Option("--dir", help="Directory to look in first, as data.data_dir names it.")]


@data_app.callback()
def data(context: typer.Context) -> None:
    """List the data sets, and where each lies on this machine."""
    if context.invoked_subcommand is None:
        from fedveil.data.catalogue import CATALOGUE
        from fedveil.data.load import ENVIRONMENT, located
        from fedveil.data.remote import REMOTES

        places = {name: located(name) for name in CATALOGUE}
        missing = {name: "downloaded when first used" if name in REMOTES else "to be made by hand" for name in CATALOGUE}
        print_table([(i.name, f"{i.title} {i.input_shape}: {places[i.name] or missing[i.name]}") for i in CATALOGUE.values()])
        typer.echo(f"\nHow to get one: fedveil data get NAME. Where they are looked for: data.data_dir, then {ENVIRONMENT}.")


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="Name of a data set.", autocompletion=data_set_names)], folder: DataDirectory = None
) -> None:
    """Find a data set on this machine, or download it, and check it; what to do by hand where neither works."""
    from fedveil.data.load import load, located

    loaded = load(name, folder)
    typer.echo(
        f"{name}: {len(loaded.x_train)} training and {len(loaded.x_test)} test examples, {located(name, folder)}; "
        f"source: {loaded.info.source}"
    )


@data_app.command("plot")
def data_plot(
    config: ConfigPath,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Image file to write.")] = Path("partition.png"),
    trust_plugins: TrustPlugins = False,
) -> None:
    """Plot how many examples of each label each client holds."""
    from fedveil.data.dataset import strata
    from fedveil.pages.figures.partition_figure import plot_partition
    from fedveil.run.assembly import prepare
    from fedveil.run.resolve import data_spec

    ready = prepare(data_spec(configuration(config, None, overrides, trust_plugins)))
    info = ready.dataset.info
    plot_partition(ready.partition, strata(info, ready.dataset.y_train), info.strata, out)
    typer.echo(f"partition plot: {out}")
