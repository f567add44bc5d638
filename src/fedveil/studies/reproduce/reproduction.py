"""Reproduce a recipe: run its rows, which can be resumed, and compare our values with the paper's.

Runs lie under `OUT/runs`, one directory for each configuration, so that recipes which need the same run share it; the results of
a recipe lie under `OUT/RECIPE/SCALE`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np

from fedveil.data.catalogue import downloadable, info
from fedveil.data.load import load
from fedveil.errors import ConfigError, DataError, nearest
from fedveil.studies.reproduce.recipe import (
    Measured,
    Only,
    Recipe,
    RecipeColumn,
    RecipeRow,
    check_against,
    check_only,
    collected,
    kept,
    number,
    rows,
)
from fedveil.studies.reproduce.recipe_files import SCALES, RowJob, Scale, job_of, load_recipe
from fedveil.studies.reproduce.recipe_jobs import MeasuredRow, RecipeListener, measured

Presence = Literal["here", "to download", "absent"]


def presence(name: str, data_dir: str | None = None) -> Presence:
    """Return whether a data set can be read, or can be downloaded by `fedveil`, or neither."""
    try:
        load(name, data_dir, download=False)
    except DataError:
        return "to download" if downloadable(info(name).name) else "absent"
    return "here"


def chance_of(data: str, data_dir: str | None = None) -> float | None:
    """Return the accuracy of guessing on the test set: the share of the most common class, or 1 / classes without data.

    None if the task has no classes.
    """
    try:
        classes = info(data).classes
        if classes < 2:
            return None
        labels = load(data, data_dir, download=False).y_test
    except ConfigError:
        return None
    except DataError:
        return 1 / classes
    return float(np.unique(labels, return_counts=True)[1].max() / labels.size)


def unavailable(names: Iterable[str], data_dir: str | None = None) -> dict[str, str]:
    """Download missing data sets if possible, and return the unavailable ones, each with what to do."""
    lacking = {}
    for name in names:
        if presence(name, data_dir) == "here":
            continue
        try:
            load(name, data_dir)
        except DataError as error:
            lacking[name] = str(error)
    return lacking


@dataclass(frozen=True)
class RowOutcome:
    """The outcome of one row.

    Args:
        values: by column, the numbers of seeds. problems: by column, why numbers are missing.
        problem: why the whole row was not run. measured: measurement of the first seed. folders: of runs and files of the row.
        ended: why a run of it stopped early. chance: accuracy of guessing on its data, if there are classes.
    """

    row: RecipeRow
    values: tuple[tuple[float, ...], ...] = ()
    problems: tuple[str, ...] = ()
    problem: str = ""
    measured: Measured = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    ended: str = ""
    chance: float | None = None

    def mean(self, column: int) -> float | None:
        """The mean over the seeds, or None."""
        values = self.values[column] if self.values else ()
        return sum(values) / len(values) if values else None

    def difference(self, column: int) -> float | None:
        """Our mean minus the published value, or None if one of them is missing."""
        ours, theirs = self.mean(column), number(self.row.published[column])
        return None if ours is None or theirs is None else ours - theirs


@dataclass(frozen=True)
class Reproduction:
    """A recipe's rows at one scale, each with its outcome.

    Args:
        left_out: number of omitted rows of the paper's scale. against: the method with which tests compare the others;
            empty for the one with the largest mean.
    """

    name: str
    recipe: Recipe
    scale: Scale
    seeds: int
    overrides: tuple[str, ...]
    only: Only
    outcomes: tuple[RowOutcome, ...]
    left_out: int
    folder: Path
    against: str = ""


@dataclass(frozen=True)
class ReproductionSpec:
    """The specification of a reproduction.

    Args:
        recipe: name or file. seeds: repetitions of each row. data_dir: folder of the data sets.
        overrides: `section.key=value`, for all rows, applied last. only: chosen labels by axis; other axes have
            all labels of the scale. against: label of the method with which tests over seeds compare the others; empty for the
            one with the largest mean.

    Raises:
        ConfigError: the scale is unknown, there is no seed, or `against` is given with one seed.
    """

    recipe: str | Path
    scale: Scale = "small"
    seeds: int = 1
    data_dir: str | Path | None = None
    overrides: Sequence[str] = ()
    only: Only = field(default_factory=dict)
    against: str = ""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            raise ConfigError(f"--scale {self.scale}: unknown{nearest(self.scale, SCALES)}; there are {', '.join(SCALES)}")
        if self.seeds < 1:
            raise ConfigError(f"--seeds {self.seeds}: at least 1")
        if self.against and self.seeds < 2:
            raise ConfigError(f"--against {self.against}: tests are over seeds, of which there is one; give --seeds 2 or more")


def chosen_rows(spec: ReproductionSpec) -> tuple[Recipe, list[RecipeRow]]:
    """Return the recipe and its chosen rows; nothing is run.

    Raises:
        ConfigError: the recipe, an axis or a label is unknown.
    """
    recipe = load_recipe(spec.recipe)
    check_only(recipe, spec.only)
    chosen = [row for row in rows(recipe) if kept(recipe, row, spec.scale, spec.only)]
    check_against(recipe, chosen, spec.against)
    return recipe, chosen


def reproduce(
    spec: ReproductionSpec,
    out: str | Path = "reproduced",
    jobs: int | None = None,
    listener: RecipeListener | None = None,
) -> Reproduction:
    """Run the missing parts of a recipe and return all of it.

    Args:
        out: common folder of recipes. jobs: runs and measurements in parallel; by default the number of cores.
        listener: called for the plan, the progress of runs, and measurements.

    Raises:
        ConfigError: a row is invalid, or an axis or a label is unknown. DataError: the data of all rows are missing.
    """
    (recipe, chosen), root, listener = chosen_rows(spec), Path(out), listener or RecipeListener()
    todo = {
        (i, seed): job_of(recipe, row, spec.scale, seed=seed, data_dir=spec.data_dir, overrides=spec.overrides)
        for i, row in enumerate(chosen)
        for seed in range(spec.seeds)
        if not row.missing
    }
    data_dir = None if spec.data_dir is None else str(spec.data_dir)
    lacking = unavailable(dict.fromkeys(job.config.data.name for job in todo.values()), data_dir)
    todo_here = {key: job for key, job in todo.items() if job.config.data.name not in lacking}
    if todo and not todo_here:
        raise DataError(" ".join(lacking.values()))
    listener.planned(recipe, [job.config for job in todo_here.values()], lacking)
    measures = measured(recipe, todo_here, root, jobs, listener)
    shares = {i: (job, job_of(recipe, chosen[i], "paper")) for (i, seed), job in todo_here.items() if seed == 0}
    outcomes = []
    for i, row in enumerate(chosen):
        absent = todo[i, 0].config.data.name if (i, 0) in todo and (i, 0) not in todo_here else ""
        problem = row.missing or (f"the data set {absent} is not here" if absent else "")
        if problem:
            outcomes.append(RowOutcome(row, problem=problem))
        else:
            found = [measures[i, seed] for seed in range(spec.seeds)]
            outcome = _outcome(recipe, row, found, _upto(recipe.columns, *shares[i]))
            outcomes.append(replace(outcome, chance=chance_of(todo[i, 0].config.data.name, data_dir)))
    name = Path(spec.recipe).stem if Path(spec.recipe).suffix == ".toml" else str(spec.recipe)
    return Reproduction(
        name=str(spec.recipe),
        recipe=recipe,
        scale=spec.scale,
        seeds=spec.seeds,
        overrides=tuple(spec.overrides),
        only=spec.only,
        outcomes=tuple(_with_relatives(recipe, outcomes)),
        left_out=len(rows(recipe)) - len(chosen),
        folder=root / name / (f"{spec.scale}-only" if spec.only else spec.scale),
        against=spec.against,
    )


def _value(measured: Measured | str, column: RecipeColumn, last: int | None) -> float | str:
    """Return the value of a column from a measurement, or why there is none."""
    return measured if isinstance(measured, str) else collected(measured, column.of, column.collect, last)


def _outcome(recipe: Recipe, row: RecipeRow, found: Sequence[MeasuredRow], upto: Sequence[int | None]) -> RowOutcome:
    values, problems = [], []
    for column, last in zip(recipe.columns, upto, strict=True):
        got = [column.missing or _value(f.measured, column, last) for f in found]
        values.append(tuple(v * column.times for v in got if not isinstance(v, str)))
        problems.append(next((v for v in got if isinstance(v, str)), ""))
    first = found[0].measured
    return RowOutcome(
        row,
        tuple(values),
        tuple(problems),
        measured={} if isinstance(first, str) else first,
        folders=tuple(f.folder for f in found),
        ended=next((f.ended for f in found if f.ended), ""),
    )


def _with_relatives(recipe: Recipe, outcomes: Sequence[RowOutcome]) -> list[RowOutcome]:
    """Return the outcomes with relative columns divided by the values of their reference rows."""
    by_label = {o.row.labels: o for o in outcomes}
    done = []
    for outcome in outcomes:
        values, problems = list(outcome.values), list(outcome.problems)
        for i, column in enumerate(recipe.columns):
            if not column.relative or not values:
                continue
            labels = tuple(column.relative.get(a.name, own) for a, own in zip(recipe.axes, outcome.row.labels, strict=True))
            base = by_label.get(labels)
            divisor = None if base is None else base.mean(i)
            values[i] = tuple(v / divisor for v in outcome.values[i]) if divisor else ()
            if base is None and not problems[i]:
                problems[i] = f"it is relative to the row {', '.join(labels)}, which is not among those chosen"
        done.append(replace(outcome, values=tuple(values), problems=tuple(problems)))
    return done


def _upto(columns: Sequence[RecipeColumn], job: RowJob, full: RowJob) -> list[int | None]:
    """Return the last round of each column: as in the recipe, or at the same share of a shorter run."""
    share = job.config.training.rounds / full.config.training.rounds
    return [None if c.round is None else max(1, round(c.round * share)) for c in columns]
