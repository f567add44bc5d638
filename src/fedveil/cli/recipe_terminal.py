"""The list of recipes in the terminal, by paper."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from fedveil.data.catalogue import downloadable
from fedveil.data.load import has_folder
from fedveil.studies.reproduce.recipe import PAPERS, rows
from fedveil.studies.reproduce.recipe_list import data_of, listed_recipe, recipe_names


def print_recipes(data_dir: Path | None) -> None:
    """Print the recipes of each paper: what each reproduces, how many rows can be run, and the data that it needs."""
    console = Console()
    for paper, names in groupby(recipe_names(), key=lambda name: name.split("/")[0]):
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        title = paper
        for name in names:
            recipe = listed_recipe(name)
            title = PAPERS[recipe.paper]
            every = rows(recipe)
            runnable = sum(not row.missing for row in every)
            needed = ", ".join(f"{one} ({_where(one, data_dir)})" for one in data_of(recipe))
            what = f"{recipe.table}: {recipe.title}" + (f"\n[dim]{needed}[/]" if needed else "")
            table.add_row(name, what, f"{runnable} of {len(every)} rows", style=None if runnable else "dim")
        console.print(f"[bold]{title}[/]: fedveil reproduce {paper} takes the whole paper", highlight=False)
        console.print(table)
    typer.echo(
        "\nRows: those that can be run, of those in the paper; the others keep the paper's values, and the recipe says why.\n"
        "fedveil reproduce RECIPE [--scale small|paper] runs one and says first about how long it takes; --json estimates all."
    )


def _where(name: str, data_dir: Path | None) -> str:
    return "here" if has_folder(name, data_dir) else "to download" if downloadable(name) else "absent"
