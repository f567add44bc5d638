"""Recipes: the papers' tables and figures as grids of configurations, with the published values alongside.

A recipe is a TOML file `recipes/METHOD/NAME.toml`. Its rows are all combinations of the entries of its axes; its columns define
the values of each row; `published` holds the paper's values, nested like the axes, then by column if there are several.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation

from fedveil.errors import ConfigError, nearest, unknown

Series = Sequence[tuple[int, float]]
Measured = Mapping[str, Series]
"""The result of a measurement of one row: series by name; a figure that belongs to no round has round 1."""


def _values(series: Series) -> list[float]:
    return [value for _, value in series]


COLLECTORS: dict[str, Callable[[Series], float]] = {
    "last": lambda series: series[-1][1],
    "best": lambda series: max(_values(series)),
    "mean": lambda series: statistics.fmean(_values(series)),
    "median": lambda series: statistics.median(_values(series)),
    "sum": lambda series: sum(_values(series)),
    "spread": lambda series: statistics.pstdev(_values(series)),
}
"""`spread` is the standard deviation over the rounds."""


def collected(measured: Measured, of: str, collect: str, upto: int | None = None) -> float | str:
    """Return one number of a measurement, or why there is none.

    Args:
        of: the series. collect: the collector. upto: the last round used.
    """
    series = measured.get(of, ())
    if not series:
        return f"this run has no {of}"
    considered = [point for point in series if upto is None or point[0] <= upto]
    return COLLECTORS[collect](considered) if considered else f"nothing was measured up to round {upto}"


PAPERS = {"000": "LaDP-FL", "001": "FedGLP-ADP", "002": "Noisy-FedAvg", "003": "FedANC", "004": "ALDP-FL"}
"""The five papers by their number, with the name of their method."""


_ARMS = ("method", "components", "threshold", "gamma", "arm", "defence", "controller", "k", "sigma", "setting")
"""Axes whose entries are compared with each other, by name."""


class Printed(float):
    """A number that remembers how it was printed, such as 0.30."""

    text: str

    def __new__(cls, text: str | float) -> Printed:
        """Return the number that a text states."""
        number = super().__new__(cls, text)
        number.text = str(text)
        return number


Value = float | str
"""A published value: a number, or the text of the table instead (a dash, a spread, a bound); empty for no entry."""
Overrides = dict[str, Any]
Only = Mapping[str, Sequence[str]]
"""The chosen labels by name of the axis; all labels of other axes."""
_ALL: Only = {}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecipeEntry(_Part):
    """One position on an axis, as a difference from the base configuration.

    preset: base configuration of these rows. set: overrides `section.key = value`, or `measure.key` for an option of the
    measurement. small: additional overrides at small scale. small_with: by label of another axis, additional overrides at small
    scale in rows with that label. missing: why these rows cannot be run. note: a remark on these rows.
    """

    label: str
    preset: str = ""
    set: Overrides = {}
    small: Overrides = {}
    small_with: dict[str, Overrides] = {}
    missing: str = ""
    note: str = ""


class Axis(_Part):
    """One dimension of the table."""

    name: str
    entries: tuple[RecipeEntry, ...] = Field(min_length=1)


class RecipeColumn(_Part):
    """One value of each row.

    of: name of a series of the measurement. collect: its collector (see `fedveil.studies.reproduce.recipe`). round: the
    last one considered, counted from 1 at paper scale; at small scale the round at the same share of the run. times: factor,
    such as 100 for per cent. relative: divide by the value of the row with these labels instead. missing: why the column cannot
    be measured; it then contains published values only.
    """

    label: str
    of: str = ""
    collect: str = "last"
    round: int | None = Field(None, ge=1)
    times: float = 1.0
    relative: dict[str, str] = {}
    missing: str = ""


class Small(_Part):
    """The small scale, which takes minutes on two cores: overrides as in an entry, and the remaining labels of axes."""

    set: Overrides = {}
    keep: dict[str, tuple[str, ...]] = {}


class Stated(_Part):
    """A figure in the text of the paper that belongs to no single row."""

    what: str
    value: SkipValidation[Value]


class Recipe(_Part):
    """One table or figure of a paper.

    preset, set: base configuration of all rows. measure: the measurement of each row by name, with its options.
    notes: gaps in the paper, and how the rows fill them. stated: other figures in its text.
    missing: why no row can be run.
    picture: `dots`, our values and the published ones; `curves`, series over the rounds; an axis of numbers: values over it.
    """

    title: str
    paper: Literal["000", "001", "002", "003", "004"]
    table: str
    preset: str = ""
    set: Overrides = {}
    measure: dict[str, Any] = {"name": "run"}
    notes: tuple[str, ...] = ()
    stated: tuple[Stated, ...] = ()
    missing: str = ""
    picture: str = "dots"
    published: list[Any] = []
    axes: tuple[Axis, ...] = Field(min_length=1)
    columns: tuple[RecipeColumn, ...] = Field(min_length=1)
    small: Small = Small()


@dataclass(frozen=True)
class RecipeRow:
    """One row of a recipe: its entries, one for each axis, and the published value of each column (or None)."""

    entries: tuple[RecipeEntry, ...]
    published: tuple[Value | None, ...]
    missing: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, one for each axis."""
        return tuple(entry.label for entry in self.entries)


def rows(recipe: Recipe) -> list[RecipeRow]:
    """Return all rows, in the order of the axes; the last axis changes fastest."""
    found = []
    for indices in itertools.product(*(range(len(axis.entries)) for axis in recipe.axes)):
        entries = tuple(axis.entries[i] for axis, i in zip(recipe.axes, indices, strict=True))
        missing = recipe.missing or next((entry.missing for entry in entries if entry.missing), "")
        found.append(RecipeRow(entries, _published(recipe, indices), missing))
    return found


def kept(recipe: Recipe, row: RecipeRow, scale: str, only: Only = _ALL) -> bool:
    """Return whether the row belongs to this scale, or for axes in `only` has one of those labels."""
    wanted = {**(recipe.small.keep if scale == "small" else {}), **only}
    return all(label in wanted.get(axis.name, (label,)) for axis, label in zip(recipe.axes, row.labels, strict=True))


def check_only(recipe: Recipe, only: Only) -> None:
    """Refuse an axis or a label that the recipe does not have."""
    axes = {axis.name: [entry.label for entry in axis.entries] for axis in recipe.axes}
    for name, labels in only.items():
        if name not in axes:
            raise unknown("--only", name, "axis of this table", axes)
        for label in labels:
            if label not in axes[name]:
                there = ", ".join(f'"{known}"' for known in axes[name])
                raise ConfigError(f"--only {name}={label}: no row has this label{nearest(label, axes[name])}; there are {there}")


def compared_axis(recipe: Recipe) -> int | None:
    """Return the axis whose entries are compared with each other over the seeds, or None."""
    return next((i for i, axis in enumerate(recipe.axes) if axis.name in _ARMS), None)


def check_against(recipe: Recipe, chosen: Sequence[RecipeRow], label: str) -> None:
    """Refuse a non-empty label that no compared row of those chosen has."""
    axis = compared_axis(recipe)
    if not label:
        return
    if axis is None:
        axes = ", ".join(axis.name for axis in recipe.axes)
        raise ConfigError(f"--against {label}: this table compares no methods; its axes are {axes}")
    there = dict.fromkeys(row.labels[axis] for row in chosen if not row.missing)
    if label not in there:
        raise unknown("--against", label, f"{recipe.axes[axis].name} among the rows that are run", there)


def number(value: Value | None) -> float | None:
    """Return the number of a published value, without its spread; None for bounds, dashes and empty values."""
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"\s*(-?[\d,]*\.?\d+(?:e-?\d+)?)\s*(?:±.*|%)?", value or "")
    return float(match[1].replace(",", "")) if match else None


def as_printed(value: Value | None) -> str:
    """Return a published value as text, with the digits of the paper."""
    if value is None or isinstance(value, str):
        return value or ""
    return value.text if isinstance(value, Printed) else f"{value:,.10g}"


def _published(recipe: Recipe, indices: tuple[int, ...]) -> tuple[Value | None, ...]:
    if not recipe.published:
        return (None,) * len(recipe.columns)
    value: Any = recipe.published
    for index in indices:
        value = value[index]
    values = value if len(recipe.columns) > 1 else [value]
    return tuple(None if v == "" else v for v in values)
