"""Comparisons, recipes and tuning in the terminal: a live table, then the results."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedveil.accounting.selection import Selection
from fedveil.drawing import Paper
from fedveil.errors import ConfigError
from fedveil.experiment.config import Config
from fedveil.report.compare_page import check_runs, plot_comparison, write_files
from fedveil.report.compare_paper import latex, verdict_sentences
from fedveil.report.privacy_section import outcome_lines
from fedveil.report.reproduce_figure import plot_reproduction
from fedveil.studies.cell import CellState, Listener
from fedveil.studies.compare.comparison import Comparison, compare, default_out
from fedveil.studies.compare.comparison_plan import ComparisonListener, ComparisonSpec, Planned
from fedveil.studies.compare.comparison_rows import Row, claimed, guarantee, mean_and_sd, proven, short_names, verdict
from fedveil.studies.reproduce.recipe import PAPERS, Recipe, kept, rows
from fedveil.studies.reproduce.recipe_files import job_of, load_recipe
from fedveil.studies.reproduce.recipe_jobs import RecipeListener
from fedveil.studies.reproduce.recipe_list import recipe_names
from fedveil.studies.reproduce.recipe_table import as_json, body, header, remarks, scale_text, title, write_results
from fedveil.studies.reproduce.reproduction import Presence, Reproduction, ReproductionSpec, presence, reproduce
from fedveil.studies.reproduce.running_time import seconds_of, spoken
from fedveil.studies.statistics import LEVEL
from fedveil.studies.tune.proxy_grid import TuningSpec, overrides
from fedveil.studies.tune.search import SearchSpec, Tuned, look_at_all, private_search, tune_on

CHECKING = "checking what each method can promise"


class LiveTable:
    """Live table with a row per method and a column per guarantee; each cell shows finished seeds, accuracy and running rounds.

    Args:
        planned: the rows. states: of their cells, before anything runs.
    """

    def __init__(self, planned: Sequence[Planned], states: Sequence[CellState]) -> None:
        self.planned = planned
        self.states = {state.cell.name: state for state in states}
        self.left: float | None = None
        self.since = time.monotonic()
        self.total = {c.name: c.config.training.rounds for row in planned for c in row.cells}
        self._names = short_names(list(dict.fromkeys(row.method for row in planned)))

    def change(self, state: CellState, left: float | None) -> None:
        """Update a cell and the estimate of the remaining seconds."""
        self.states[state.cell.name], self.left = state, left
        self.since = time.monotonic()

    def __rich__(self) -> Group:
        """Return the table and the line below it."""
        columns = sorted({row.epsilon for row in self.planned})
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("method")
        for epsilon in columns:
            table.add_column("no noise" if math.isinf(epsilon) else f"ε = {epsilon:g}", min_width=14)
        for method, partition in dict.fromkeys((row.method, row.partition) for row in self.planned):
            mine = {r.epsilon: r for r in self.planned if (r.method, r.partition) == (method, partition)}
            name = Text(self._names[method]).append(f" {partition}" if partition else "", style="dim")
            table.add_row(name, *(self._cell(mine[e]) if e in mine else "" for e in columns))
        return Group(table, self._foot())

    def _cell(self, row: Planned) -> Text:
        if not row.cells:
            return Text("not possible", style="yellow")
        states = [self.states[c.name] for c in row.cells]
        done = [s for s in states if s.state == "done"]
        failed = sum(s.state == "failed" for s in states)
        scores = [s.score for s in done if s.score is not None]
        text = Text(f"{len(done)}/{len(states)}", style="green" if len(done) == len(states) else "")
        if scores:
            text.append(f" {states[0].cell.main.text(fmean(scores))}", style="bold")
        for s in states:
            if s.state == "running":
                text.append(f" [{s.rounds}/{s.total}]", style="cyan")
        if failed:
            text.append(f" {failed} failed", style="red")
        return text

    def _foot(self) -> Table:
        rounds = sum(self.total[name] if s.state in ("done", "failed") else s.rounds for name, s in self.states.items())
        total = sum(self.total.values())
        foot = Table.grid(padding=(0, 2))
        foot.add_row(ProgressBar(total=total, completed=rounds, width=30), f"{rounds} of {total} rounds", self._time_left())
        return foot

    def _time_left(self) -> str:
        if self.left is None:
            return "measuring the time left"
        seconds = max(0, round(self.left - (time.monotonic() - self.since)))
        return f"about {seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d} left"


class _TableListener(ComparisonListener):
    """Listener that shows the live table, or one line per finished run if the output is not a terminal."""

    def __init__(self, live: Live) -> None:
        self.live, self.rows, self.table = live, list[Planned](), LiveTable([], [])

    def checking(self, what: str) -> None:
        self.live.update(Text(f"{CHECKING}: {what}"))

    def planned(self, rows: Sequence[Planned]) -> None:
        self.rows = list(rows)

    def started(self, states: Sequence[CellState]) -> None:
        self.table = LiveTable(self.rows, states)
        self.live.update(self.table)

    def changed(self, state: CellState, left: float | None) -> None:
        self.table.change(state, left)
        if not self.live.console.is_terminal and state.state in ("done", "failed"):
            main = state.cell.main
            score = "" if state.score is None else f" {main.phrase} {main.text(state.score)}"
            line = f"{state.cell.name}: {state.state}{score} {state.error}".rstrip()
            self.live.console.print(line, highlight=False, markup=False)


def compare_with_table(
    spec: ComparisonSpec, out: Path | None, jobs: int | None, *, paper: Paper | None = None, as_latex: bool = False
) -> int:
    """Compare with a live table, print the result, and write the files.

    Args:
        paper: size and font of compare.pdf, which is drawn too. as_latex: print the table in LaTeX.

    Returns:
        The exit status: 1 if a run failed, or if a compared run is contradicted.
    """
    console, folder = Console(), out or default_out(spec.config)
    with Live(Text(CHECKING), console=console, refresh_per_second=4, transient=True) as live:
        try:
            comparison = compare(spec, folder, jobs, _TableListener(live))
        except KeyboardInterrupt:
            console.print(f"interrupted; the same command goes on where it was (--out {folder})", highlight=False, soft_wrap=True)
            raise
        live.update(Text("verifying the runs, writing tables and pictures"))
        checked = check_runs(comparison)
        paths = write_files(comparison, checked)
    render_comparison(comparison, console)
    for line in outcome_lines(checked):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    for what in ("page", "picture", "table"):
        if what in paths:
            console.print(f"{what}: {paths[what]}", highlight=False, soft_wrap=True)
    if paper is not None and "picture" in paths:
        figure = plot_comparison(comparison, folder / "compare.pdf", paper)
        console.print(f"figure: {figure}", highlight=False, soft_wrap=True)
    if as_latex:
        typer.echo(f"\n{latex(comparison)}", nl=False)
    return int(bool(comparison.failed) or any(run.exit_status == 1 for run in checked.values()))


def render_comparison(done: Comparison, console: Console) -> None:
    """Print the ranked tables, the problems, and the assumptions of the numbers."""
    names = done.names
    console.print(f"\n[bold]{escape(done.what[0].upper() + done.what[1:])}[/]: mean ± sample standard deviation over seeds")
    for (partition, at), block in done.blocks.items():
        table = Table(
            title=escape(guarantee(partition, at, done.by)),
            title_justify="left",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        table.add_column("rank", justify="right")
        table.add_column("method", overflow="fold", min_width=min(14, max(len(names[row.method]) for row in block)))
        for heading in ("mean ± sd", "claimed ε", "proven ε"):
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column("against the best", min_width=18)
        for row in (row for row in block if row.values):
            table.add_row(*_row_cells(row, names[row.method]), style="bold" if row.rank == 1 else "")
        if table.row_count:
            console.print(table)
    for line, where in done.problems.items():
        console.print(f"[yellow]{escape(line)}[/] [dim]({escape(', '.join(where))})[/]", highlight=False)
    for sentence in verdict_sentences(done):
        console.print(escape(sentence), highlight=False, style="bold")
    console.print()
    for sentence in done.sentences:
        console.print(escape(sentence), highlight=False, style="dim")
    if resting := done.assumptions.items:
        console.print(
            f"The proven numbers rest on {len(resting)} assumption{'s' * (len(resting) > 1)}: see compare.md.", style="dim"
        )
    console.print()


def _row_cells(row: Row, name: str) -> list[str | Text]:
    verdict_text = Text(verdict(row), style="red" if row.against and row.against.holm < LEVEL else "")
    return [str(row.rank or "–"), name, mean_and_sd(row), claimed(row), proven(row), verdict_text]


def split_list(text: str) -> list[str]:
    """Split a text at commas, except those in brackets or braces."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "[{(") - (character in ")}]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def epsilons_of(text: str) -> list[float]:
    """Return the numbers of `--epsilon`."""
    return [_number(part) for part in split_list(text)]


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"--epsilon {text!r}: give numbers with commas, for instance --epsilon 2,4,8 (inf is no noise)"
        ) from None


Listed = dict[str, Any]


def listed(data_dir: Path | None = None) -> list[Listed]:
    """Return a row for every recipe: description, number of runnable rows, required data, estimated time."""
    presence_of = cache(lambda name: presence(name, None if data_dir is None else str(data_dir)))
    return [_listed(name, load_recipe(name), presence_of) for name in recipe_names()]


def _listed(name: str, recipe: Recipe, presence_of: Callable[[str], Presence]) -> Listed:
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
        "data": {data: presence_of(data) for data in needed},
        "small": spoken(seconds_of(recipe, "small")) if runnable else "",
        "full": spoken(seconds_of(recipe, "paper")) if runnable else "",
    }


class _ProgressListener(RecipeListener):
    """Listener that prints what will run, then shows a progress bar over all rounds, then over the measurements."""

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
    """Run a recipe with a progress bar, print our numbers next to the paper's, and write the results to files."""
    console = Console(stderr=as_rows)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[left]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        try:
            done = reproduce(spec, out, jobs, _ProgressListener(spec, bar))
        except KeyboardInterrupt:
            bar.stop()
            again = f"interrupted in {spec.recipe}; the same command goes on where it was (--out {out})"
            Console(stderr=True).print(again, highlight=False, soft_wrap=True)
            raise
    folder = write_results(done)
    picture = plot_reproduction(done)
    if not as_rows:
        render_reproduction(done, console)
        console.print(f"\nResults: {folder}" + (f", picture: {picture}" if picture else ""), highlight=False, soft_wrap=True)
    return as_json(done)


def render_reproduction(done: Reproduction, console: Console) -> None:
    """Print title, scale, our numbers next to the paper's, and remarks."""
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


class Lines(Listener):
    """Listener that prints a line for each run that ends. scores: whether to print its score on the test set."""

    def __init__(self, *, scores: bool = True) -> None:
        self.done, self.scores = 0, scores

    def changed(self, state: CellState, left: float | None) -> None:
        if state.state in ("done", "failed"):
            self.done += 1
            score = state.error or ("" if state.score is None or not self.scores else state.cell.main.text(state.score))
            typer.echo(f"run {self.done}: {state.cell.name} {score}", err=True)


def tune_with_table(spec: TuningSpec, out: Path, jobs: int | None) -> None:
    """Run the grid, and print all settings, best first, and the chosen one."""
    tuned = tune_on(spec, out, jobs, Lines())
    Console().print(_table(spec, tuned))
    runs = len(tuned.trials) * spec.seeds
    typer.echo(
        f"{runs} runs on {spec.proxy}, which is public: nothing of {spec.config.data.name} was used, and nothing is charged.\n"
        f"chosen: {' '.join(f'--set {item}' for item in overrides(tuned.trials[0].setting))}\n"
        f"{out / 'tuned.toml'} has the configuration with these keys: fedveil run {out / 'tuned.toml'}"
    )


def search_privately(spec: SearchSpec, out: Path, selection: Selection) -> None:
    """Search, and print the release: nothing before the end, and nothing that reveals the number of runs."""
    typer.echo("searching; nothing is shown before the end, since it would tell how many runs there were", err=True)
    path, statement = private_search(spec, out, selection)
    typer.echo(f"{statement.notes[0]}\n{path} is the run: fedveil verify {path}, fedveil certify {path}")


def look_with_table(spec: SearchSpec, out: Path, jobs: int | None) -> None:
    """Run every setting on the private data; print all of them, best first, and their total cost."""
    results = look_at_all(spec, out, jobs, Lines(scores=spec.score_noise is None))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in spec.grid:
        table.add_column(key)
    table.add_column("score by the clients, with noise" if spec.score_noise else "score on the test set", justify="right")
    for one in results:
        table.add_row(*(escape(f"{value}") for value in one.setting.values()), f"{one.score:.4g}")
    Console().print(table)
    statement = results[0].state.statement
    assert statement is not None
    typer.echo(f"{statement.notes[0]}\n{results[0].state.path} is the best of them: fedveil verify {results[0].state.path}")


def _table(spec: TuningSpec, tuned: Tuned) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for key in spec.grid:
        table.add_column(key)
    table.add_column(f"{tuned.metric.title} on {spec.proxy}", justify="right")
    for trial in tuned.trials:
        score = f"failed: {trial.error}" if trial.error else tuned.metric.text(trial.mean)
        table.add_row(*(escape(f"{value}") for value in trial.setting.values()), escape(score))
    return table
