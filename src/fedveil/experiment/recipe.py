"""Recipes: the papers' tables and figures as grids of configurations, with the published values beside them.

A recipe is a TOML file `recipes/METHOD/NAME.toml`. Its rows are all combinations of the entries of its axes; its columns say
what is collected of each row; `published` holds the paper's values, nested like the axes, then by column if there are several.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from fedveil.errors import ConfigError, explain, nearest
from fedveil.experiment.preset import names as preset_names

FOLDER = Path(__file__).parent / "recipes"
PAPERS = {"000": "LaDP-FL", "001": "FedGLP-ADP", "002": "Noisy-FedAvg", "003": "FedANC", "004": "ALDP-FL"}
"""The five papers by their number, with the name of their method."""


class Printed(float):
    """A number that remembers how it was printed, such as 0.30."""

    text: str

    def __new__(cls, text: str | float) -> Printed:
        number = super().__new__(cls, text)
        number.text = str(text)
        return number


Value = float | str
"""A published value: a number, or what the table says instead (a dash, a spread, a bound); empty where it says nothing."""
Overrides = dict[str, Any]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Entry(_Part):
    """One position on an axis: how it differs from the base configuration.

    preset: base configuration of these rows. set: overrides `section.key = value`, or `measure.key` for an option of the
    measurement. small: further ones at small scale. missing: why these rows cannot be run. note: what a reader must know about
    these rows.
    """

    label: str
    preset: str = ""
    set: Overrides = {}
    small: Overrides = {}
    missing: str = ""
    note: str = ""


class Axis(_Part):
    """One dimension of the table."""

    name: str
    entries: tuple[Entry, ...] = Field(min_length=1)


class Column(_Part):
    """What is collected of each row.

    of: name of a series of the measurement. collect: what of the series (see `fedveil.experiment.recipe_collect`). round: the
    last one considered, counted from 1 at paper scale; at small scale the round at the same share of the run. times: factor,
    such as 100 for per cent. relative: the value divided by that of the row with these labels instead. missing: why it cannot
    be collected.
    """

    label: str
    of: str = ""
    collect: str = "last"
    round: int | None = Field(None, ge=1)
    times: float = 1.0
    relative: dict[str, str] = {}
    missing: str = ""


class Small(_Part):
    """The version that ends in minutes on two cores: overrides as in an entry, and the labels that an axis keeps."""

    set: Overrides = {}
    keep: dict[str, tuple[str, ...]] = {}


class Stated(_Part):
    """A figure that the paper's text gives and that belongs to no single row."""

    what: str
    value: SkipValidation[Value]


class Recipe(_Part):
    """One table or figure of a paper.

    preset, set: base configuration of all rows. measure: what is done with a row's configuration, by name, with its options.
    notes: what the paper does not state, and how the rows deal with it. stated: what else its text says of this table.
    missing: why nothing of it can be run.
    picture: `dots`, ours beside theirs; `curves`, the first column's series over the rounds.
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
    picture: Literal["dots", "curves"] = "dots"
    published: list[Any] = []
    axes: tuple[Axis, ...] = Field(min_length=1)
    columns: tuple[Column, ...] = Field(min_length=1)
    small: Small = Small()


@dataclass(frozen=True)
class Row:
    """One row of a recipe: its entries, one for each axis, and the published value of each column (None where there is none)."""

    entries: tuple[Entry, ...]
    published: tuple[Value | None, ...]
    missing: str = ""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, one for each axis."""
        return tuple(entry.label for entry in self.entries)


def recipe_names() -> list[str]:
    """All recipes, `method/table`, in the order of the papers."""
    order = ["ladp-fl", "fedglp-adp", "noisy-fedavg", "fedanc", "aldp-fl"]
    found = [f"{path.parent.name}/{path.stem}" for path in FOLDER.glob("*/*.toml")]
    return sorted(found, key=lambda name: (order.index(name.split("/")[0]), "/fig" in name, _digits(name)))


def load_recipe(name: str | Path) -> Recipe:
    """The recipe of that name, or in that file.

    Raises:
        ConfigError: unknown name (names the nearest), or a file that is no recipe (says what is wrong where).
    """
    path = Path(name)
    if path.suffix != ".toml":
        if str(name) not in recipe_names():
            raise ConfigError(
                f"unknown recipe {str(name)!r}{nearest(str(name), recipe_names())}; `fedveil reproduce` lists the recipes"
            )
        path = FOLDER / f"{name}.toml"
    try:
        text = path.read_text(encoding="utf-8")
        as_printed = {k: v for k, v in tomllib.loads(text, parse_float=Printed).items() if k in ("published", "stated")}
        recipe = Recipe.model_validate({**tomllib.loads(text), **as_printed})
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{path} is not a recipe: {explain(error, Recipe)}") from None
    problem = _problem(recipe)
    if problem:
        raise ConfigError(f"{path} is not a recipe: {problem}")
    return recipe


def rows(recipe: Recipe) -> list[Row]:
    """All rows, in the order of the axes, the last one changing fastest."""
    found = []
    for indices in itertools.product(*(range(len(axis.entries)) for axis in recipe.axes)):
        entries = tuple(axis.entries[i] for axis, i in zip(recipe.axes, indices, strict=True))
        missing = recipe.missing or next((entry.missing for entry in entries if entry.missing), "")
        found.append(Row(entries, _published(recipe, indices), missing))
    return found


def kept(recipe: Recipe, row: Row, scale: str) -> bool:
    """Whether the row belongs to this scale."""
    if scale != "small":
        return True
    wanted = recipe.small.keep
    return all(label in wanted.get(axis.name, (label,)) for axis, label in zip(recipe.axes, row.labels, strict=True))


def number(value: Value | None) -> float | None:
    """The number that a published value is, or begins with before its spread; None for bounds, dashes and nothing."""
    if isinstance(value, int | float):
        return float(value)
    match = re.fullmatch(r"\s*(-?[\d,]*\.?\d+(?:e-?\d+)?)\s*(?:±.*|%)?", value or "")
    return float(match[1].replace(",", "")) if match else None


def shown(value: Value | None) -> str:
    """A published value as text, with the digits that the paper prints."""
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


def _problem(recipe: Recipe) -> str:
    """What is wrong with a recipe that its types do not say, or an empty string."""
    from fedveil.experiment.recipe_collect import COLLECTORS
    from fedveil.experiment.recipe_measure import MEASURES

    labels = {axis.name: [entry.label for entry in axis.entries] for axis in recipe.axes}
    if len(labels) < len(recipe.axes) or any(len(set(given)) < len(given) for given in labels.values()):
        return "each axis needs a name of its own, and labels that differ"
    wanted: list[Mapping[str, Any]] = [recipe.small.keep, *({k: (v,) for k, v in c.relative.items()} for c in recipe.columns)]
    for mentioned in wanted:
        for axis, chosen in mentioned.items():
            if axis not in labels or not set(chosen) <= set(labels[axis]):
                return f"{axis} = {', '.join(chosen)}: no such axis or label; there are {labels}"
    given = {recipe.preset, *(entry.preset for axis in recipe.axes for entry in axis.entries)} - {""}
    for preset in sorted(given - set(preset_names())):
        return f"unknown preset {preset!r}{nearest(preset, preset_names())}"
    if not recipe.missing and not recipe.preset and any(not e.preset and not e.missing for e in recipe.axes[0].entries):
        return "preset: missing; give one for all rows, or one with each entry of the first axis"
    if recipe.measure.get("name") not in MEASURES:
        return f"measure.name = {recipe.measure.get('name')!r}: unknown; there are {', '.join(MEASURES)}"
    for column in recipe.columns:
        if column.collect not in COLLECTORS:
            return f"column {column.label}: collect = {column.collect!r}: unknown; there are {', '.join(COLLECTORS)}"
        if not column.of and not column.missing and not recipe.missing:
            return f"column {column.label}: say what it is `of`, or why it is missing"
    return _misshapen(recipe)


def _misshapen(recipe: Recipe) -> str:
    if not recipe.published:
        return ""
    lengths = [len(axis.entries) for axis in recipe.axes] + ([len(recipe.columns)] if len(recipe.columns) > 1 else [])
    level: list[Any] = [recipe.published]
    for name, length in zip([*(axis.name for axis in recipe.axes), "columns"], lengths, strict=False):
        if any(not isinstance(part, list) or len(part) != length for part in level):
            return f"published: every list over {name} needs {length} values, in the order of the axes"
        level = [value for part in level for value in part]
    if any(not isinstance(value, int | float | str) for value in level):
        return "published: values are numbers or text"
    return ""


def _digits(name: str) -> int:
    return int(re.sub(r"\D", "", name.split("/")[1]) or 0)
