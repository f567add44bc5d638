"""Tables of any library, read column by column: pandas, polars, pyarrow, Hugging Face, or a dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import DataError, nearest

Array = NDArray[Any]
Kind = Literal["number", "text", "date", "object"]


@dataclass(frozen=True)
class TableColumn:
    """Values of one column; those that are absent are 0 or empty in `values`. stored: the type that the table had."""

    name: str
    kind: Kind
    values: Array
    absent: NDArray[np.bool_]
    stored: str


def names_of(table: Any) -> tuple[str, ...]:
    """The names of the columns.

    Raises:
        DataError: it is no table, or two columns have one name.
    """
    names = getattr(table, "column_names", None)
    if names is None:
        names = getattr(table, "columns", table if isinstance(table, Mapping) else None)
    if names is None or hasattr(table, "collect"):
        fix = (
            "call its collect() first"
            if hasattr(table, "collect")
            else "give a DataFrame of pandas or polars, or a dict of arrays"
        )
        raise DataError(f"{type(table).__name__} is not a table in memory: {fix}")
    found = tuple(names)
    if len(set(found)) < len(found) or not all(isinstance(name, str) for name in found):
        raise DataError("the names of the columns must be different texts: rename those that are not")
    return found


def refuse_unknown(name: str, names: tuple[str, ...]) -> None:
    """Refuse the name of a column that a table has not."""
    if name not in names:
        raise DataError(f"there is no column {name!r}{nearest(name, names)}; there are {', '.join(names)}")


def column_of(table: Any, name: str) -> TableColumn:
    """One column.

    Raises:
        DataError: there is none of that name.
    """
    refuse_unknown(name, names_of(table))
    series = table[name]
    values, stored = _values(series)
    if values.ndim != 1:
        return TableColumn(name, "object", values, np.zeros(len(values), np.bool_), f"arrays of shape {values.shape[1:]}")
    return _sorted_out(name, values, _absent(series, values), stored)


def _values(series: Any) -> tuple[Array, str]:
    """As an array, and the type that the table has for it."""
    if hasattr(series, "to_numpy"):
        values = np.asarray(series.to_numpy())
        return values, str(getattr(series, "dtype", None) or getattr(series, "type", values.dtype))
    if isinstance(series, np.ndarray):
        return series, str(series.dtype)
    listed = list(series)
    found = np.empty(len(listed), dtype=object)
    for i, one in enumerate(listed):
        found[i] = one
    return found, "numbers"


def _absent(series: Any, values: Array) -> NDArray[np.bool_]:
    """Where a value is missing: what the table says, and NaN, None and NaT."""
    found = np.array([one is None or (isinstance(one, float) and one != one) for one in values.tolist()], dtype=np.bool_)
    if values.dtype.kind in "Mm":
        found = np.isnat(values)
    for method in ("isna", "is_null"):
        if hasattr(series, method):
            return found | np.asarray(getattr(series, method)(), dtype=np.bool_)
    return found


def _sorted_out(name: str, values: Array, absent: NDArray[np.bool_], stored: str) -> TableColumn:
    if values.dtype.kind in "biuf":
        clean = np.where(absent, 0, values).astype(values.dtype) if absent.any() else values
        return TableColumn(name, "number", clean, absent, stored)
    if values.dtype.kind in "Mm":
        return TableColumn(name, "date", values, absent, stored)
    there = values[~absent].tolist()
    if values.dtype.kind in "UT" or all(isinstance(one, str) for one in there):
        text = np.full(len(values), "", dtype=object)
        text[~absent] = there
        return TableColumn(name, "text", text.astype(np.str_), absent, stored)
    if all(isinstance(one, Real) for one in there):
        filled = np.zeros(len(values), dtype=np.asarray(there).dtype)
        filled[~absent] = there
        return TableColumn(name, "number", filled, absent, stored)
    first = type(there[0]).__name__
    return TableColumn(name, "date" if first in ("date", "datetime", "Timestamp") else "object", values, absent, first)
