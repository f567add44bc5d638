"""Recipes in the terminal: the list of them, and one of them running, with ours beside theirs at the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from fedveil.configuration.config import Config
from fedveil.pages.figures.reproduce_figure import plot_reproduction
from fedveil.studies.grid.cell import CellState
from fedveil.studies.reproduce.recipe import PAPERS, Recipe, kept, rows
from fedveil.studies.reproduce.recipe_data import Presence, presence
from fedveil.studies.reproduce.recipe_files import load_recipe, recipe_names
from fedveil.studies.reproduce.recipe_jobs import RecipeListener
from fedveil.studies.reproduce.recipe_rows import job_of
from fedveil.studies.reproduce.recipe_table import as_json, body, header, remarks, scale_text, title, write_results
from fedveil.studies.reproduce.reproduction import Reproduction, ReproductionSpec, reproduce
from fedveil.studies.reproduce.running_time import seconds_of, spoken

Listed = dict[str, Any]


def listed(data_dir: Path | None = None) -> list[Listed]:
    """Every recipe: what it is, how much of it can be run, what it needs, about how long it takes."""
    there = cache(lambda name: presence(name, None if data_dir is None else str(data_dir)))
    return [_listed(name, load_recipe(name), there) for name in recipe_names()]


def print_recipes(data_dir: Path | None, as_rows: bool = False) -> list[Listed]:
    """Print the list of recipes, unless only its rows are wanted."""
    console = Console(stderr=as_rows)
    with console.status("looking for data sets, timing two small networks"):
        found = listed(data_dir)
    if as_rows:
        return found
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("recipe", no_wrap=True)
    table.add_column("what")
    for heading in ("rows", "small", "paper's"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        table.add_row(*_cells(one), style=None if one["runnable"] else "dim")
    console.print(table)
    console.print(
        "\nrows: those that can be run, of those in the paper; the others keep the paper's values, and the recipe says why."
        "\nsmall, paper's: about how long either scale takes, estimated for all cores of this "
        "machine.\nfedveil reproduce RECIPE [--scale small|paper] runs one.",
        highlight=False,
    )
    return found


def _cells(one: Listed) -> list[str]:
    """A line of the printed list: recipe, what it is and which data it needs, rows, costs."""
    data: dict[str, list[str]] = {}
    for name, there in one["data"].items():
        data.setdefault(there, []).append(name)
    needs = "; ".join(f"{', '.join(names)} {there}" for there, names in data.items())
    what = f"{one['table']}: {one['title']}" + (f"\n[dim]{needs}[/]" if needs else "")
    costs = [one[scale].removeprefix("about ") for scale in ("small", "full")] if one["runnable"] else ["cannot run", ""]
    return [one["recipe"], what, f"{one['runnable']}/{one['runnable'] + one['missing']}", *costs]


def _listed(name: str, recipe: Recipe, there: Callable[[str], Presence]) -> Listed:
    every = rows(recipe)
    runnable = [row for row in every if not row.missing]
    needed = dict.fromkeys(job_of(recipe, row, "paper").config.data.name for row in runnable)
    reasons = Counter(row.missing for row in every if row.missing)
    return {
        "recipe": name,
        "paper": PAPERS[recipe.paper],
        "table": recipe.table,
        "title": recipe.title,
        "runnable": len(runnable),
        "small_rows": sum(kept(recipe, row, "small") for row in runnable),
        "missing": len(every) - len(runnable),
        "reasons": dict(reasons),
        "data": {data: there(data) for data in needed},
        "small": spoken(seconds_of(recipe, "small")) if runnable else "",
        "full": spoken(seconds_of(recipe, "paper")) if runnable else "",
    }


class _ProgressListener(RecipeListener):
    """Shows what will run, then a progress bar over the rounds of all runs, then over the measurements."""

    def __init__(self, spec: ReproductionSpec, bar: Progress) -> None:
        self.spec, self.bar, self.rounds = spec, bar, dict[str, int]()
        self.task = bar.add_task("", total=None, left="", visible=False)

    def planned(self, recipe: Recipe, configs: Sequence[Config], lacking: Mapping[str, str]) -> None:
        console = self.bar.console
        console.print(f"[bold]{recipe.table}: {recipe.title}[/] ({self.spec.scale} scale)", highlight=False)
        if configs:
            needed = ", ".join(dict.fromkeys(config.data.name for config in configs))
            cost = spoken(seconds_of(recipe, self.spec.scale, self.spec.only, self.spec.overrides) * self.spec.seeds)
            console.print(f"{len(configs)} rows to run, {cost} if none was run before. Data: {needed}.", highlight=False)
        for missing, why in lacking.items():
            console.print(f"[bold yellow]Not run, no copy of {missing}:[/] {why}", highlight=False)

    def started(self, states: Sequence[CellState]) -> None:
        self.rounds.update({state.cell.name: state.rounds for state in states})
        total = sum(state.total for state in states)
        self.bar.update(self.task, visible=True, total=total, completed=sum(self.rounds.values()))

    def changed(self, state: CellState, left: float | None) -> None:
        self.rounds[state.cell.name] = state.rounds
        text = "" if left is None else f"{spoken(left)} left"
        self.bar.update(self.task, description=f"training {state.cell.name}", completed=sum(self.rounds.values()), left=text)

    def measuring(self, done: int, total: int, what: str) -> None:
        left = f"{done} of {total}"
        self.bar.update(self.task, visible=True, description=f"measuring {what}", completed=done, total=total, left=left)


def reproduce_with_progress(spec: ReproductionSpec, out: Path, jobs: int | None, as_rows: bool = False) -> dict[str, Any]:
    """Run a recipe with a progress bar; print ours beside theirs, and leave the results in files."""
    console = Console(stderr=as_rows)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        done = reproduce(spec, out, jobs, _ProgressListener(spec, bar))
    folder = write_results(done)
    picture = plot_reproduction(done)
    if not as_rows:
        render(done, console)
        console.print(f"\nResults: {folder}" + (f", picture: {picture}" if picture else ""), highlight=False, soft_wrap=True)
    return as_json(done)


def render(done: Reproduction, console: Console) -> None:
    """Title, scale, ours beside theirs, remarks."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    head = header(done)
    for i, name in enumerate(head):
        table.add_column(name, justify="right" if i >= len(head) - 3 else "left", overflow="fold")
    for cells in body(done):
        table.add_row(*(c.replace("[", r"\[") for c in cells), style="dim" if cells[-2].startswith("[") else None)
    console.print(f"[bold]{title(done)}[/]", highlight=False)
    console.print(table)
    console.print(f"\n{scale_text(done)}\n", highlight=False, markup=False)
    for note in remarks(done):
        console.print(f"- {note}", highlight=False, markup=False)
