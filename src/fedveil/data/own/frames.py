"""Tables of any library: their columns, the columns as features, and the table as a data set."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from numbers import Real
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import Info
from fedveil.data.dataset import Dataset, Origin
from fedveil.data.own.arrays import OWN_TEST, LabelledExamples, divided, rule_text, separate
from fedveil.data.own.cards import SplitRule, TableCard, Value, canonical, checked_card, is_number, reading
from fedveil.data.own.casts import LONGEST, Labelled, as_float, as_ids, as_targets, as_times
from fedveil.data.own.drawn_by_item import read_by_row
from fedveil.errors import ConfigError, DataError, nearest

_log = logging.getLogger(__name__)

Array = NDArray[Any]
_NUMBERS = (Real, Decimal, np.bool_)
Kind = Literal["number", "text", "date", "object"]


@dataclass(frozen=True)
class TableColumn:
    """Values of one column; absent ones are 0 or empty in `values`. stored: the type in the table.

    hint: a possible reason why values seem absent.
    """

    name: str
    kind: Kind
    values: Array
    absent: NDArray[np.bool_]
    stored: str
    hint: str = ""


def names_of(table: Any) -> tuple[str, ...]:
    """Return the names of the columns.

    Raises:
        DataError: not a table, or two columns have the same name.
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
    """Refuse the name of a column that the table does not have."""
    if name not in names:
        there = f"there are {', '.join(names)}" if names else "the table has no columns at all"
        raise DataError(f"there is no column {name!r}{nearest(name, names)}; {there}")


def column_of(table: Any, name: str) -> TableColumn:
    """Return one column.

    Raises:
        DataError: there is none of that name.
    """
    refuse_unknown(name, names_of(table))
    series = table[name]
    try:
        values, stored = _values(series)
    except TypeError:
        raise DataError(f"column {name!r} is a single value of type {type(series).__name__}: give a value for each row") from None
    if values.ndim != 1:
        return TableColumn(name, "object", values, np.zeros(len(values), np.bool_), f"arrays of shape {values.shape[1:]}")
    found = _sorted_out(name, values, _absent(series, values), stored)
    pandas = hasattr(series, "isna") and found.kind == "text"
    return replace(found, hint=", or, where NA is a name, read the file with keep_default_na=False") if pandas else found


def _values(series: Any) -> tuple[Array, str]:
    """Return a column as an array, and the type that the table gives it."""
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
    """Return a mask of missing values: those that the table marks, and NaN, None and NaT."""
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
    """Return whether the value is an integer beyond 64 bits."""
    if isinstance(one, Decimal):
        return one.is_finite() and abs(one) > LONGEST and one == one.to_integral_value()
    return isinstance(one, int) and abs(one) > LONGEST


def _numbers(there: list[Any]) -> Array:
    """Return numbers of any kind as an array; those without a numpy type become floats."""
    found = np.asarray([float(one) if isinstance(one, Decimal) else one for one in there])
    if found.dtype.kind in "biuf":
        return found
    try:
        return np.array([float(one) for one in there])
    except OverflowError:
        return np.full(len(there), np.inf)  # which is refused


_FEW, _UNSCALED = 20, 10.0
"""Number of rows from which distinct whole numbers look like an id; distance from 0 from which a feature counts as unscaled."""
_LISTED = 12
"""Number of columns that a note about casts names one by one."""
_FIXES = {
    "text": "holds text: list all values that it can have in categories={{{0!r}: [...]}}, or leave it out of features",
    "digits": "holds numbers as text: make numbers of them, as pd.to_numeric does, or list them in categories={{{0!r}: [...]}}",
    "date": "holds dates: give a number, such as days since a public date, or leave it out of features",
    "object": "holds {1}: give one number or text in each row, or leave it out of features",
}


_DATE = re.compile(r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}")
"""Pattern for the beginning of a date."""


@dataclass(frozen=True)
class _FeatureLayout:
    """Names of the features after encoding, with the public mean and standard deviation of each."""

    names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def _feature_layout(card: TableCard, features: tuple[str, ...]) -> _FeatureLayout:
    """Return the layout from the card alone, without any data.

    Raises:
        ConfigError: the card speaks of a column that is no feature, or normalises a category.
    """
    for key in ("categories", "missing", "normalise", "indicators"):
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
        if name in card.indicators:
            names.append(f"{name} is missing")
            mean.append(0.0)
            std.append(1.0)
    return _FeatureLayout(tuple(names), tuple(mean), tuple(std))


def encoded(table: Any, card: TableCard, features: tuple[str, ...]) -> tuple[Array, tuple[str, ...]]:
    """Return the features as (rows, width) float32, and the casts that were made.

    Raises:
        DataError: columns that need further facts on the card; the message has a part for each of them.
    """
    columns = [column_of(table, name) for name in features]
    _same_length(columns)
    parts, problems = [], []
    for column in columns:
        try:
            parts.append(encode_column(column, card))
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


def _same_length(columns: Sequence[TableColumn]) -> None:
    """Refuse columns of different lengths, and empty ones."""
    first = len(columns[0].values)
    if other := next((column for column in columns if len(column.values) != first), None):
        raise DataError(
            f"column {columns[0].name!r} has {first} values, and {other.name!r} has {len(other.values)}: give one for each row"
        )
    if not first:
        raise DataError("the table has no rows: give at least one for training and one for testing")


def no_missing(column: TableColumn, role: str) -> TableColumn:
    """Return the column itself.

    Raises:
        DataError: values are missing in it.
    """
    if column.absent.any():
        raise DataError(f"{_missing(column)}, and it is the {role}: leave these rows out{column.hint}")
    return column


def encode_column(column: TableColumn, card: TableCard) -> Array:
    """Return the features [rows, k] of one column.

    Raises:
        DataError: a value that the card does not allow.
    """
    found = _values_of(column, card)
    return np.concatenate([found, column.absent[:, None]], axis=1, dtype=np.float32) if column.name in card.indicators else found


def _values_of(column: TableColumn, card: TableCard) -> Array:
    fill = card.missing.get(column.name)
    if column.absent.any() and fill is None:
        raise DataError(
            f"{_missing(column)}: give a public constant that stands for them, missing={{{column.name!r}: ...}}, or leave these "
            f"rows out"
        )
    if column.name in card.categories:
        return _indicators(column, card.categories[column.name], fill)
    if column.kind == "text" and (odd := _odd_numbers(column)):
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


def _odd_numbers(column: TableColumn) -> str:
    """Describe texts in a column of numbers that are not numbers, or are written in another format; empty if there are none."""
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
    return ", ".join(names) if len(names) <= _LISTED else f"{names[0]}, {names[1]}, ..., {names[-1]} ({len(names)} columns)"


def _missing(column: TableColumn) -> str:
    count = int(column.absent.sum())
    return f"column {column.name!r} has {count} missing value{'s' * (count > 1)}"


def from_frame(
    df: Any, *, target: str | list[str], client: str | None = None, features: Any = None, test: Any = None, **public: Any
) -> Dataset:
    """Make a data set of a DataFrame of pandas or polars, a table of pyarrow, or a dict of arrays.

    Args:
        target: the column to learn, or several of them. client: the column with the owner of each row; the owners are the
        clients, unless the configuration has a partition. features: columns, in this order; left out, all others.
        test: which rows are for testing (see `own_split`; `latest` is the name of a column), or a table of their own.
            Left out, a fifth of the clients.
        public: what is public: name, classes, unit, categories, missing, indicators, normalise, split_seed (see
            `TableCard`).

    Raises:
        DataError: a column that cannot be learned from as it is; the message says what to do.
        ConfigError: an impossible argument.
    """
    own_test = read_by_row(test) if hasattr(test, "columns") or hasattr(test, "column_names") else None
    rule, table = None if own_test is not None else test, read_by_row(df)
    names_of(table)  # before what the arguments say of them
    chosen = {} if features is None else {"features": features}
    card = checked_card(TableCard, target=target, client=client, test=rule, **chosen, **public)
    library = type(df).__module__.partition(".")[0]
    made = of_table(table, card, own_test, f"a table of {library}" if library != "builtins" else "a dict of columns")
    for note in made.origin.notes if made.origin is not None else ():
        _log.warning("from_frame: %s", note)
    return made


def of_table(table: Any, card: TableCard, own_test: Any, source: str) -> Dataset:
    """Do the same as `from_frame`, with all options on the card."""
    rule = card.test
    latest = rule.latest if rule is not None else None
    used = {*card.targets, *(name for name in (card.client, latest) if name is not None)}
    columns = names_of(table)
    for name in sorted(used):  # else the column that was meant would be taken for a feature
        refuse_unknown(name, columns)
    features = card.features or tuple(name for name in columns if name not in used)
    if not features:
        raise DataError("there are no features: give features=[...], the columns to learn from")
    if both := [name for name in features if name in (*card.targets, card.client)]:
        raise DataError(
            f"the column {both[0]!r} is a feature and the {'client' if both[0] == card.client else 'target'}: choose one"
        )
    examples, casts = examples_of(table, card, features, rule)
    info = table_info(card, features, examples.labelled)
    text = rule_text(rule, card.client is not None) if own_test is None else OWN_TEST
    names = _feature_layout(card, features).names
    origin = Origin(
        source, text, names, casts, card.categories, card.missing, examples.labelled.counted, indicators=card.indicators
    )
    origin = replace(origin, notes=_doubtful_features(table, card, features))
    if own_test is None:
        return divided(examples, rule, card.split_seed, info, origin)
    fixed = card.model_copy(update={"classes": card.classes or examples.labelled.classes, "client": None})
    return separate(examples, examples_of(own_test, fixed, features)[0], info, origin)


def _doubtful_features(table: Any, card: TableCard, features: tuple[str, ...]) -> tuple[str, ...]:
    """Return notes on features that look like an id, or that are far from the scale on which networks learn."""
    notes = []
    for name in (name for name in features if name not in card.categories):
        column = column_of(table, name)
        values = column.values[~column.absent].astype(np.float64)
        center, spread = card.normalise.get(name, (0.0, 1.0))
        largest = float(np.abs((values - center) / spread).max(initial=0.0))
        if len(values) >= _FEW and (values == np.floor(values)).all() and len(np.unique(values)) == len(values):
            notes.append(f"the feature {name!r} is another whole number in each row, as an id is: leave it out of features")
        elif largest > _UNSCALED:
            notes.append(
                f"the feature {name!r} is up to {largest:,.6g} from 0: give its public mean and standard deviation in "
                f"normalise={{{name!r}: (..., ...)}}, since a network learns little from features on another scale"
            )
    return tuple(notes)


def table_info(card: TableCard, features: tuple[str, ...], labelled: Labelled) -> Info:
    """Return the public facts about a table; sizes are 0."""
    layout = _feature_layout(card, features)
    shape = (len(layout.names),)
    info = Info(card.name, "", shape, labelled.classes, 0, 0, 0, "data of one's own", False, layout.mean, layout.std, 1.0)
    return replace(info, target=labelled.target, counted=labelled.counted)


def examples_of(
    table: Any, card: TableCard, features: tuple[str, ...], rule: SplitRule | None = None
) -> tuple[LabelledExamples, tuple[str, ...]]:
    """Return all rows of a table, the times that the test split uses, and the casts that were made.

    Raises:
        DataError: as `from_frame`.
    """
    x, casts = encoded(table, card, features)
    labelled = _targets(table, card)
    ids = times = None
    if card.client is not None:
        column = no_missing(column_of(table, card.client), "client")
        ids = as_ids(column.values, len(x), f"column {card.client!r} (the client)")
    if rule is not None and rule.latest is not None:
        column = no_missing(column_of(table, rule.latest), "time of the test split")
        times = as_times(column.values, len(x), f"column {rule.latest!r}")
    return LabelledExamples(x, labelled, ids, times), (*casts, *labelled.casts)


def _targets(table: Any, card: TableCard) -> Labelled:
    columns = [no_missing(column_of(table, name), "target") for name in card.targets]
    _same_length(columns)
    for column in columns:
        if column.kind not in ("number", "text"):
            raise DataError(
                f"column {column.name!r} (the target) holds {column.stored}: give numbers, or text with classes=[...]"
            )
        if column.kind == "text" and not isinstance(card.classes, tuple) and (odd := _odd_numbers(column)):
            raise DataError(f"column {column.name!r} (the target) {odd}these rows out; labels that are names need classes=[...]")
    if isinstance(card.target, str):
        return as_targets(columns[0].values, card, (card.target,), f"column {card.target!r} (the target)")
    y = np.stack([column.values for column in columns], axis=1)
    if y.dtype.kind == "b" and card.classes is None:  # a yes or no in each column, and not one class for each place
        card = card.model_copy(update={"classes": 0})
    return as_targets(y, card, card.targets, f"columns {', '.join(card.targets)} (the targets)")
