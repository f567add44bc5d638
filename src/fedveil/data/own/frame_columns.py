"""Tables of any library, read column by column: pandas, polars, pyarrow, Hugging Face, or a dict of arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedveil.data.own.cards import canonical
from fedveil.data.own.casts import LONGEST
from fedveil.errors import DataError, nearest

Array = NDArray[Any]
_NUMBERS = (Real, Decimal, np.bool_)
Kind = Literal["number", "text", "date", "object"]


@dataclass(frozen=True)
class TableColumn:
    """Values of one column; those that are absent are 0 or empty in `values`. stored: the type that the table had.

    hint: what may have made a value absent that is none.
    """

    name: str
    kind: Kind
    values: Array
    absent: NDArray[np.bool_]
    stored: str
    hint: str = ""


def names_of(table: Any) -> tuple[str, ...]:
    """The names of the columns.

    Raises:
        DataError: it is no table, or two columns have one name.
    """
    many = [*table.values()] if isinstance(table, Mapping) else table if isinstance(table, list | tuple) else ()
    if any(hasattr(one, "columns") or hasattr(one, "column_names") for one in many):
        raise DataError(
            f"a {type(table).__name__} of {len(many)} tables is not one table: join them, with a column that says whose each row "
            f"is, such as pd.concat([one.assign(client=name) for name, one in tables.items()])"
        )
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
    if not all(isinstance(name, str) for name in found):
        fix = "rename them, as df.columns = df.columns.astype(str) does"
        raise DataError(f"the names of the columns must be different texts: {fix}")
    if len(set(found)) < len(found):
        raise DataError("the names of the columns must be different texts: rename those that are not")
    return found


def refuse_unknown(name: str, names: tuple[str, ...]) -> None:
    """Refuse the name of a column that a table has not."""
    if name not in names:
        there = f"there are {', '.join(names)}" if names else "the table has no columns at all"
        raise DataError(f"there is no column {name!r}{nearest(name, names)}; {there}")


def column_of(table: Any, name: str) -> TableColumn:
    """One column.

    Raises:
        DataError: there is none of that name.
    """
    refuse_unknown(name, names_of(table))
    series = table[name]
    try:
        values, stored = _values(series)
    except TypeError:
        raise DataError(f"column {name!r} is one {type(series).__name__}: give a value for each row") from None
    if values.ndim != 1:
        return TableColumn(name, "object", values, np.zeros(len(values), np.bool_), f"arrays of shape {values.shape[1:]}")
    found = _sorted_out(name, values, _absent(series, values), stored)
    pandas = hasattr(series, "isna") and found.kind == "text"
    return replace(found, hint=", or, where NA is a name, read the file with keep_default_na=False") if pandas else found


def _values(series: Any) -> tuple[Array, str]:
    """As an array, and the type that the table has for it."""
    kind = getattr(series, "dtype", None) or getattr(series, "type", None)
    if getattr(kind, "tz", None) or getattr(kind, "time_zone", None):  # which arrays of numpy do not have
        return _objects(series.to_pylist() if hasattr(series, "to_pylist") else series.to_list()), str(kind)
    if hasattr(series, "to_numpy"):
        values = np.asarray(series.to_numpy())
        return values, str(kind or values.dtype)
    if isinstance(series, np.ndarray) or hasattr(series, "detach"):
        values = series if isinstance(series, np.ndarray) else series.detach().cpu().numpy()
        return values, str(values.dtype)
    return _objects(list(series)), "numbers"


def _objects(listed: list[Any]) -> Array:
    found = np.empty(len(listed), dtype=object)
    for i, one in enumerate(listed):
        found[i] = one
    return found


def _absent(series: Any, values: Array) -> NDArray[np.bool_]:
    """Where a value is missing: what the table says, and NaN, None and NaT."""
    if values.dtype.kind in "fMm" and not isinstance(values, np.ma.MaskedArray):
        found = np.isnan(values) if values.dtype.kind == "f" else np.isnat(values)
    else:
        found = np.array([_is_missing(one) for one in values.tolist()], dtype=np.bool_)
    for method in ("isna", "is_null"):
        if hasattr(series, method):
            return found | np.asarray(getattr(series, method)(), dtype=np.bool_)
    return found


def _is_missing(one: Any) -> bool:
    if isinstance(one, Decimal):
        return one.is_nan()
    return one is None or type(one).__name__ in ("NAType", "NaTType") or (isinstance(one, float) and one != one)


def _sorted_out(name: str, values: Array, absent: NDArray[np.bool_], stored: str) -> TableColumn:
    if values.dtype.kind in "biuf":
        clean = np.where(absent, 0, values).astype(values.dtype) if absent.any() else values
        return TableColumn(name, "number", clean, absent, stored)
    if values.dtype.kind in "Mm":
        return TableColumn(name, "date", values, absent, stored)
    there = values[~absent].tolist()
    if all(isinstance(one, _NUMBERS) for one in there):  # also where none is there
        if any(map(_is_long, there)):
            return TableColumn(name, "object", values, absent, f"whole numbers beyond {LONGEST}, which no float holds apart")
        numbers = _numbers(there)
        filled = np.zeros(len(values), dtype=numbers.dtype)
        filled[~absent] = numbers
        return TableColumn(name, "number", filled, absent, stored)
    others = [type(one).__name__ for one in there if not isinstance(one, (str, *_NUMBERS))]
    if not others:
        text = np.full(len(values), "", dtype=object)
        text[~absent] = [canonical(one) for one in there]
        return TableColumn(name, "text", text.astype(np.str_), absent, stored)
    dates = set(others) <= {"date", "datetime", "Timestamp"}
    return TableColumn(name, "date" if dates else "object", values, absent, others[0])


def _is_long(one: Any) -> bool:
    """Whether it is a whole number, and not a float, beyond 64 bits."""
    if isinstance(one, Decimal):
        return one.is_finite() and abs(one) > LONGEST and one == one.to_integral_value()
    return isinstance(one, int) and abs(one) > LONGEST


def _numbers(there: list[Any]) -> Array:
    """Numbers of any kind; those that no type of numpy holds as floats."""
    found = np.asarray([float(one) if isinstance(one, Decimal) else one for one in there])
    if found.dtype.kind in "biuf":
        return found
    try:
        return np.array([float(one) for one in there])
    except OverflowError:
        return np.full(len(there), np.inf)  # which is refused
