"""Columns of a table as features: numbers as they are, listed categories as columns of 0 and 1, missing values by constants."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.own.cards import TableCard, Value, canonical, is_number, reading
from fedveil.data.own.casts import as_float
from fedveil.data.own.frame_columns import TableColumn, column_of
from fedveil.errors import ConfigError, DataError, nearest

Array = NDArray[Any]
LISTED = 12
"""How many columns of one cast are named one by one."""
_FIXES = {
    "text": "holds text: list all values that it can have in categories={{{0!r}: [...]}}, or leave it out of features",
    "digits": "holds numbers as text: make numbers of them, as pd.to_numeric does, or list them in categories={{{0!r}: [...]}}",
    "date": "holds dates: give a number, such as days since a public date, or leave it out of features",
    "object": "holds {1}: give one number or text in each row, or leave it out of features",
}


_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}")
"""How a text begins that is a date."""


@dataclass(frozen=True)
class FeatureLayout:
    """What the features become: their names, and the public mean and standard deviation of each."""

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def feature_layout(card: TableCard, features: tuple[str, ...]) -> FeatureLayout:
    """From the card alone, without any data.

    Raises:
        ConfigError: the card speaks of a column that is no feature, or normalises a category.
    """
    for key in ("categories", "missing", "normalise"):
        for name in getattr(card, key):
            if name not in features:
                raise ConfigError(
                    f"{key} names the column {name!r}, which is no feature{nearest(name, features)}: correct or remove it"
                )
            if key == "normalise" and name in card.categories:
                raise ConfigError(f"normalise names the column {name!r}, which categories turns into 0 and 1: remove one of them")
    names, mean, std = [], [], []
    for name in features:
        values = card.categories.get(name)
        made = [name] if values is None else [f"{name}={canonical(value)}" for value in values]
        center, spread = card.normalise.get(name, (0.0, 1.0))
        names += made
        mean += [center] * len(made)
        std += [spread] * len(made)
    return FeatureLayout(tuple(names), tuple(mean), tuple(std))


def encoded(table: Any, card: TableCard, features: tuple[str, ...]) -> tuple[Array, tuple[str, ...]]:
    """The features as (rows, width) float32, and the casts that this took.

    Raises:
        DataError: columns that the card would have to say more of; the message has a part for each of them.
    """
    columns = [column_of(table, name) for name in features]
    same_length(columns)
    parts, problems = [], []
    for column in columns:
        try:
            parts.append(_one(column, card))
        except DataError as problem:
            problems.append(str(problem))
    if problems:
        raise DataError("; ".join(problems))
    casts: dict[str, list[str]] = {}
    for column in columns:
        stored = "numbers" if column.name in card.missing else column.stored  # one missing value makes floats of integers
        if column.kind == "number" and stored.lower() != "float32" and column.name not in card.categories:
            casts.setdefault(stored, []).append(column.name)
    said = tuple(f"{_listed(names)}: {stored} -> float32" for stored, names in casts.items())
    return np.ascontiguousarray(np.concatenate(parts, axis=1)), said


def same_length(columns: Sequence[TableColumn]) -> None:
    """Refuse columns of different lengths, and of none."""
    first = len(columns[0].values)
    if other := next((column for column in columns if len(column.values) != first), None):
        raise DataError(
            f"column {columns[0].name!r} has {first} values, and {other.name!r} has {len(other.values)}: give one for each row"
        )
    if not first:
        raise DataError("the table has no rows: give at least one for training and one for testing")


def no_missing(column: TableColumn, role: str) -> TableColumn:
    """The column itself.

    Raises:
        DataError: values are missing in it.
    """
    if column.absent.any():
        raise DataError(f"{_missing(column)}, and it is the {role}: leave these rows out{column.hint}")
    return column


def _one(column: TableColumn, card: TableCard) -> Array:
    fill = card.missing.get(column.name)
    if column.absent.any() and fill is None:
        raise DataError(
            f"{_missing(column)}: give a public constant that stands for them, missing={{{column.name!r}: ...}}, or leave these "
            f"rows out"
        )
    if column.name in card.categories:
        return _indicators(column, card.categories[column.name], fill)
    if column.kind == "text" and (odd := odd_numbers(column)):
        raise DataError(
            f"column {column.name!r} {odd}them empty and give a public constant, missing={{{column.name!r}: ...}}; numbers that "
            f"are names need categories={{{column.name!r}: [...]}}"
        )
    if column.kind != "number":
        digits = column.kind == "text" and all(map(is_number, column.values[~column.absent].tolist()))
        fix = _FIXES["digits" if digits else "date" if _of_dates(column) else column.kind]
        raise DataError(f"column {column.name!r} {fix.format(column.name, column.stored)}")
    if isinstance(fill, str):
        raise ConfigError(f"missing[{column.name!r}] = {fill!r}: the column holds numbers, so give a number")
    values = column.values if fill is None else np.where(column.absent, fill, column.values)
    return as_float(values, f"column {column.name!r}")[:, None]


def odd_numbers(column: TableColumn) -> str:
    """How many texts of a column are no numbers, where some are, or seem to be in another way of writing; else empty."""
    texts = column.values[~column.absent].tolist()
    wrong = [text for text in texts if not is_number(text)]
    names = len(wrong) == len(texts) and not any(re.sub(r"[\W_]", "", text).isdigit() for text in wrong)
    if names or not wrong or _of_dates(column):
        return ""
    return f"holds {len(wrong)} of {len(texts)} values that are no numbers, which are written as 1234.5: correct them, or leave "


def _of_dates(column: TableColumn) -> bool:
    return column.kind == "text" and all(_DATE.match(text) for text in column.values[~column.absent].tolist())


def _indicators(column: TableColumn, listed: Iterable[Value], fill: Value | None) -> Array:
    place = {reading(value): i for i, value in enumerate(listed)}
    if column.kind not in ("number", "text"):
        raise DataError(f"column {column.name!r} holds {column.stored}: categories are text or numbers")
    known, where = np.unique(column.values[~column.absent], return_inverse=True)
    texts = [reading(value) for value in known.tolist()]
    if any(text not in place for text in texts):
        count = sum(text not in place for text in texts)
        raise DataError(
            f"column {column.name!r} holds {count} value{'s' * (count > 1)} that categories[{column.name!r}] does not list: list "
            f"all that it can have, or replace them first"
        )
    if fill is not None and reading(fill) not in place:
        raise ConfigError(f"missing[{column.name!r}] = {fill!r} is not in categories[{column.name!r}]: list it there, too")
    codes = np.zeros(len(column.values), np.int64)
    codes[~column.absent] = np.array([place[text] for text in texts], np.int64)[where.reshape(-1)]
    codes[column.absent] = 0 if fill is None else place[reading(fill)]
    return np.eye(len(place), dtype=np.float32)[codes]


def _listed(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= LISTED else f"{names[0]}, {names[1]}, ..., {names[-1]} ({len(names)} columns)"


def _missing(column: TableColumn) -> str:
    count = int(column.absent.sum())
    return f"column {column.name!r} has {count} missing value{'s' * (count > 1)}"
