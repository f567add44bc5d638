"""Tables: encoding by what is public, every refusal in its exact words, and the same data from every library."""

from __future__ import annotations

import datetime
import subprocess
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedveil as fv
from fedveil.data.dataset import Dataset
from fedveil.errors import ConfigError, DataError, FedveilError

N = 30
COLUMNS: dict[str, list[Any]] = {
    "patient": [f"p{i % 6}" for i in range(N)],
    "age": [20 + i for i in range(N)],
    "nights": [float(i % 4) for i in range(N)],
    "smoker": [i % 3 == 0 for i in range(N)],
    "ward": ["abc"[i % 3] for i in range(N)],
    "cost": [i * 0.5 for i in range(N)],
}
WARD = {"ward": ["a", "b", "c"]}


def frame(**changed: Any) -> pd.DataFrame:
    return pd.DataFrame({**COLUMNS, **changed})


def own(table: Any = None, **more: Any) -> Dataset:
    keys = {"target": "cost", "client": "patient", "categories": WARD, "test": {"share": 0.2}, **more}
    return fv.from_frame(frame() if table is None else table, **keys)  # type: ignore[no-any-return]


def rows(data: Dataset) -> np.ndarray:
    """All rows with their target, sorted."""
    x, y = np.concatenate([data.x_train, data.x_test]), np.concatenate([data.y_train, data.y_test])
    both = np.column_stack([x, y])
    return both[np.lexsort(both.T[::-1])]


def test_columns_become_features_by_what_is_public() -> None:
    data = own(normalise={"age": (50, 20)}, unit="EUR", name="visits")
    assert data.origin is not None
    assert data.origin.features == ("age", "nights", "smoker", "ward=a", "ward=b", "ward=c")
    assert rows(data)[1].tolist() == [21, 1, 0, 0, 1, 0, 0.5]
    assert data.info.mean == (50, 0, 0, 0, 0, 0)
    assert data.info.std == (20, 1, 1, 1, 1, 1)
    assert (data.info.classes, data.info.target.names, data.info.target.unit) == (0, ("cost",), "EUR")
    assert data.origin.casts == (
        *("age: int64 -> float32", "nights: float64 -> float32", "smoker: bool -> float32", "targets float64 -> float32"),
    )
    assert data.origin.categories == {"ward": ("a", "b", "c")}
    assert (len(data.x_train), len(data.x_test), data.info.users) == (24, 6, 6)


def test_the_features_are_those_named_in_that_order() -> None:
    data = own(features=["nights", "age"], categories={})
    assert rows(data)[1].tolist() == [0, 24, 2]
    assert data.origin is not None
    assert data.origin.features == ("nights", "age")


def test_missing_values_become_the_public_constant_and_are_not_counted_on_the_card() -> None:
    table = frame(nights=[None, *COLUMNS["nights"][1:]], ward=[None, *COLUMNS["ward"][1:]])
    data = own(table, missing={"nights": -1, "ward": "c"})
    assert rows(data)[0].tolist() == [20, -1, 1, 0, 0, 1, 0]
    assert data.origin is not None
    assert data.origin.missing == {"nights": -1, "ward": "c"}
    assert own(missing={"nights": -1}).origin.casts == data.origin.casts  # type: ignore[union-attr]


def test_a_column_of_the_test_split_is_no_feature() -> None:
    day = pd.date_range("2024-01-01", periods=N)
    data = own(frame(day=day), test={"latest": "day", "since": datetime.date(2024, 1, 20)})
    assert len(data.x_test) == N - 19
    assert data.origin is not None
    assert "day" not in data.origin.features
    assert data.origin.test == "all examples from 2024-01-20 on by day"
    share = own(frame(day=[str(one.date()) for one in day]), test={"latest": "day", "share": 0.2})
    assert share.origin is not None
    assert share.origin.ranked
    assert sorted(share.y_test) == [12.0, 12.5, 13.0, 13.5, 14.0, 14.5]


def test_a_table_of_their_own_for_testing() -> None:
    data = own(test=frame().iloc[:4].drop(columns="patient"))
    assert (len(data.x_train), len(data.x_test), data.info.users) == (N, 4, 6)
    assert rows(own()).shape == (N, 7)


def test_classes_by_a_public_list_and_several_targets() -> None:
    text = own(target="ward", classes=["a", "b", "c"], categories={})
    assert (text.info.classes, text.info.target.names) == (3, ("a", "b", "c"))
    assert rows(text)[:3, -1].tolist() == [0, 1, 2]
    both = own(target=["cost", "nights"])
    assert (both.info.target.shape, both.info.target.names) == ((2,), ("cost", "nights"))
    assert own(target="smoker").info.classes == 2


def test_several_columns_of_yes_and_no_are_labels_and_not_one_class_for_each_place() -> None:
    data = own(frame(cheap=[i < 9 for i in range(N)]), target=["smoker", "cheap"])
    assert (data.info.classes, data.info.target.names) == (0, ("smoker", "cheap"))
    assert data.y_train.dtype == np.float32
    assert rows(data)[:, -2:].sum(0).tolist() == [10, 9]
    assert own(frame(cheap=[i < 9 for i in range(N)]), target=["smoker", "cheap"], classes=2).info.classes == 2


def test_a_cast_of_many_columns_is_said_in_one_short_line() -> None:
    wide = pd.DataFrame({f"a{i}": np.arange(N) + i for i in range(40)} | {"cost": np.zeros(N)})
    data = fv.from_frame(wide, target="cost", test=0.2)
    assert data.origin is not None
    assert data.origin.casts[0] == "a0, a1, ..., a39 (40 columns): int64 -> float32"
    assert len(data.origin.features) == 40


def test_the_order_of_rows_and_columns_changes_no_client() -> None:
    table = frame()
    mixed = table.sample(frac=1, random_state=3)[table.columns[::-1]]
    one, other = (own(t, features=["age"], categories={}, test={"clients": 0.4}) for t in (table, mixed))
    assert sorted(one.x_test.ravel()) == sorted(other.x_test.ravel())
    assert one.users_train is not None
    assert other.users_train is not None
    by_age = [dict(zip(d.x_train.ravel().tolist(), d.users_train.tolist(), strict=True)) for d in (one, other)]  # type: ignore[union-attr]
    assert by_age[0] == by_age[1]


class Series:
    """A column as polars and pyarrow have it."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.dtype = "Column"

    def is_null(self) -> np.ndarray:
        return np.array([value is None for value in self.values])

    def to_numpy(self) -> np.ndarray:
        holes = any(value is None for value in self.values) and not any(isinstance(value, str) for value in self.values)
        return np.array([np.nan if value is None else value for value in self.values] if holes else self.values)


class Frame:
    """A table as polars has it: columns by name, and nothing of pandas."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns = list(columns)
        self._columns = columns

    def __getitem__(self, name: str) -> Series:
        return Series(self._columns[name])


def polars(columns: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("polars", reason="needs polars, 180 MB").DataFrame(columns)


def pyarrow(columns: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("pyarrow", reason="needs pyarrow, 170 MB").table(columns)


def nullable(columns: dict[str, list[Any]]) -> pd.DataFrame:
    return pd.DataFrame(columns).convert_dtypes()


@pytest.mark.parametrize("library", [polars, pyarrow, Frame, dict, nullable], ids=lambda one: str(one.__name__))
def test_every_library_gives_the_same_data(library: Any) -> None:
    holes = {**COLUMNS, "nights": [None, *COLUMNS["nights"][1:]], "ward": [None, *COLUMNS["ward"][1:]]}
    keys: dict[str, Any] = {"missing": {"nights": 9, "ward": "a"}, "test": {"clients": 0.4}}
    wanted, found = own(frame(**holes), **keys), own(library(holes), **keys)
    for name in ("x_train", "y_train", "x_test", "y_test", "users_train"):
        assert np.array_equal(getattr(wanted, name), getattr(found, name)), name
    assert found.info == wanted.info
    with pytest.raises(DataError, match=r"^column 'nights' has 1 missing value: give a public constant"):
        own(library(holes))


def test_neither_library_is_imported() -> None:
    code = (
        "import sys, fedveil as fv; t = {'a': [1., 2., 3.], 'y': [0, 1, 1]}; fv.from_frame(t, target='y', test={'share': .3}); "
        "print({'pandas', 'polars', 'pyarrow', 'torch'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


CATEGORY = pd.Categorical(COLUMNS["ward"])
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "text": (
        {},
        {"categories": {}},
        "column 'ward' holds text: list all values that it can have in categories={'ward': [...]}, or leave it out of features",
    ),
    "pandas' categories": (
        {"ward": CATEGORY},
        {"categories": {}},
        "column 'ward' holds text: list all values that it can have in categories={'ward': [...]}, or leave it out of features",
    ),
    "unlisted": (
        {"ward": ["d", *COLUMNS["ward"][1:]]},
        {},
        "column 'ward' holds 1 value that categories['ward'] does not list: list all that it can have, or replace them first",
    ),
    "missing": (
        {"nights": [None, None, *COLUMNS["nights"][2:]]},
        {},
        "column 'nights' has 2 missing values: give a public constant that stands for them, missing={'nights': ...}, or leave "
        "these rows out",
    ),
    "missing category": (
        {"ward": [None, *COLUMNS["ward"][1:]]},
        {},
        "column 'ward' has 1 missing value: give a public constant that stands for them, missing={'ward': ...}, or leave these "
        "rows out",
    ),
    "missing target": (
        {"cost": [np.nan, *COLUMNS["cost"][1:]]},
        {},
        "column 'cost' has 1 missing value, and it is the target: leave these rows out",
    ),
    "missing client": (
        {"patient": [None, *COLUMNS["patient"][1:]]},
        {},
        "column 'patient' has 1 missing value, and it is the client: leave these rows out, or, where NA is a name, read the file "
        "with keep_default_na=False",
    ),
    "two columns": (
        {"nights": [None, *COLUMNS["nights"][1:]]},
        {"categories": {}},
        "column 'nights' has 1 missing value: give a public constant that stands for them, missing={'nights': ...}, or leave "
        "these rows out; column 'ward' holds text: list all values that it can have in categories={'ward': [...]}, or leave it "
        "out of features",
    ),
    "dates": (
        {"age": pd.date_range("2024-01-01", periods=N)},
        {},
        "column 'age' holds dates: give a number, such as days since a public date, or leave it out of features",
    ),
    "dates of Python": (
        {"age": [datetime.date(2024, 1, 1)] * N},
        {},
        "column 'age' holds dates: give a number, such as days since a public date, or leave it out of features",
    ),
    "lists": (
        {"age": [[1, 2]] * N},
        {},
        "column 'age' holds list: give one number or text in each row, or leave it out of features",
    ),
    "mixed": (
        {"age": ["old", *COLUMNS["age"][1:]]},
        {},
        "column 'age' holds 1 of 30 values that are no numbers, which are written as 1234.5: correct them, or leave them empty "
        "and give a public constant, missing={'age': ...}; numbers that are names need categories={'age': [...]}",
    ),
    "mixed with what is neither": (
        {"age": [b"old", *COLUMNS["age"][1:]]},
        {},
        "column 'age' holds bytes: give one number or text in each row, or leave it out of features",
    ),
    "digits": (
        {"age": [str(one) for one in COLUMNS["age"]]},
        {},
        "column 'age' holds numbers as text: make numbers of them, as pd.to_numeric does, or list them in categories={'age': "
        "[...]}",
    ),
    "an odd target": (
        {"cost": ["?", *map(str, COLUMNS["cost"][1:])]},
        {},
        "column 'cost' (the target) holds 1 of 30 values that are no numbers, which are written as 1234.5: correct them, or "
        "leave these rows out; labels that are names need classes=[...]",
    ),
    "infinite": (
        {"nights": [np.inf, *COLUMNS["nights"][1:]]},
        {},
        "column 'nights': 1 of 30 examples hold NaN, infinite numbers, or numbers beyond float32, the first is 0: put a public "
        "constant in their place, or leave these examples out",
    ),
    "ids": (
        {"age": [2**40 + i for i in range(N)]},
        {},
        "column 'age' holds whole numbers beyond 16777216, which float32 does not hold apart: divide it by a public number and "
        "give it as floats, or leave it out if it is an id",
    ),
    "float clients": (
        {"patient": [i % 3 / 2 for i in range(N)]},
        {},
        "column 'patient' (the client) is float64: give everybody an id that is an integer or text, and leave out examples "
        "without one",
    ),
    "text target": (
        {"cost": COLUMNS["ward"]},
        {},
        "column 'cost' (the target): text: give classes=[...], the public list of its labels",
    ),
    "target of dates": (
        {"cost": pd.date_range("2024-01-01", periods=N)},
        {},
        "column 'cost' (the target) holds datetime64[us]: give numbers, or text with classes=[...]",
    ),
    "no such target": (
        {},
        {"target": "costs"},
        "there is no column 'costs' (did you mean 'cost'?); there are patient, age, nights, smoker, ward, cost",
    ),
    "no such client, and the column that was meant holds text": (
        {},
        {"client": "person", "features": None},
        "there is no column 'person'; there are patient, age, nights, smoker, ward, cost",
    ),
    "target among features": (
        {},
        {"features": ["cost"], "categories": {}},
        "the column 'cost' is a feature and the target: choose one",
    ),
    "client among features": ({}, {"features": ["patient"]}, "the column 'patient' is a feature and the client: choose one"),
    "one label": (
        {"cost": [0] * N},
        {},
        "column 'cost' (the target) holds one label only, so there is nothing to learn: give classes=..., if there can be others",
    ),
}


def test_a_category_is_read_alike_among_numbers_and_texts() -> None:
    """What reads a file makes numbers of "01" where all others are numbers, and texts where one of them is a text."""
    ward, listed = np.arange(N) % 2 + 1, {"ward": ["01", "02", "none"]}
    texts = np.array([f"0{one}" for one in ward], dtype=object)
    texts[0] = "none"
    rows = {"age": np.arange(N, dtype=float), "cost": np.arange(N) / 2, "ward": ward}
    numbers, mixed = (fv.from_frame(rows | {"ward": one}, target="cost", categories=listed) for one in (ward, texts))
    assert int((numbers.x_train != mixed.x_train).any(1).sum() + (numbers.x_test != mixed.x_test).any(1).sum()) == 1
    with pytest.raises(ConfigError, match="a column of numbers holds"):
        fv.from_frame(rows, target="cost", categories={"ward": ["1", "01", "2"]})


IMPOSSIBLE: dict[str, tuple[dict[str, Any], str]] = {
    "drop": (
        {"missing": "drop"},
        "missing = 'drop': nothing is computed from private data without noise; give public constants, from a public table "
        "or the range that the values can have, such as missing={'age': 0}",
    ),
    "from data": (
        {"normalise": "from data"},
        "normalise = 'from data': nothing is computed from private data without noise; give public constants, from a public "
        "table or the range that the values can have, such as normalise={'age': (50, 20)}",
    ),
    "std": ({"normalise": {"age": (50, 0)}}, "normalise['age']: the standard deviation is 0; give a number above 0"),
    "constants that are none": (
        {"normalise": {"age": (float("nan"), 1)}},
        "normalise.age.0 = nan is not possible: input should be a finite number",
    ),
    "no feature": (
        {"normalise": {"agee": (50, 1)}},
        "normalise names the column 'agee', which is no feature (did you mean 'age'?): correct or remove it",
    ),
    "normalised category": (
        {"normalise": {"ward": (50, 1)}},
        "normalise names the column 'ward', which categories turns into 0 and 1: remove one of them",
    ),
    "a set of features": (
        {"features": {"age", "ward"}},
        "features is given as a set, which has no order of its own: give a list",
    ),
    "a set of categories": (
        {"categories": {"ward": {"a", "b", "c"}}},
        "categories is given as a set, which has no order of its own: give a list",
    ),
    "one feature": ({"features": "age"}, "features = 'age': give a list of columns, such as ['age']"),
    "features in a dict": (
        {"features": {"age": 1, "nights": 2}},
        "features = {'age': 1, 'nights': 2}: give a list of columns, such as ['age', 'nights']",
    ),
    "features as a number": ({"features": 3}, "features = 3: give a list of columns, such as ['3']"),
    "a feature twice": (
        {"features": ["age", "age"]},
        "features = ['age', 'age']: name one column or more, each once; left out, it is all others",
    ),
    "no features": ({"features": []}, "features = []: name one column or more, each once; left out, it is all others"),
    "category twice": (
        {"categories": {"ward": ["a", "a"]}},
        "categories['ward'] = ['a', 'a']: list each value that the column can have, once; a column of numbers holds '1', '01' "
        "and '1.0' as one",
    ),
    "text for a number": ({"missing": {"age": "none"}}, "missing['age'] = 'none': the column holds numbers, so give a number"),
    "fill not listed": (
        {"missing": {"ward": "d"}},
        "missing['ward'] = 'd' is not in categories['ward']: list it there, too",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_of_columns(case: str) -> None:
    columns, keys, wanted = REFUSED[case]
    with pytest.raises(DataError) as caught:
        own(frame(**columns), **keys)
    assert str(caught.value) == wanted


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_refusals_of_facts(case: str) -> None:
    keys, wanted = IMPOSSIBLE[case]
    with pytest.raises(ConfigError) as caught:
        own(**keys)
    assert str(caught.value) == wanted


def test_refusals_of_tables() -> None:
    class Lazy:
        columns = ("a",)

        def collect(self) -> None: ...

    twice = pd.DataFrame(np.zeros((3, 2)), columns=["a", "a"])
    nothing = pd.DataFrame({"cost": [1.0], "patient": ["a"]})
    lonely = nothing.assign(age=1.0)
    for table, wanted in (
        (Lazy(), "Lazy is not a table in memory: call its collect() first"),
        ([1, 2], "list is not a table in memory: give a DataFrame of pandas or polars, or a dict of arrays"),
        (
            {**lonely, "age": np.ma.array([1.0], mask=[True])},
            "column 'age' has 1 missing value: give a public constant that stands for them, missing={'age': ...}, or leave these "
            "rows out",
        ),
        (lonely[:0], "the table has no rows: give at least one for training and one for testing"),
        ({**lonely, "nights": [1, 2]}, "column 'age' has 1 values, and 'nights' has 2: give one for each row"),
        (
            {"a": nothing, "b": nothing},
            "a dict of 2 tables is not one table: join them, with a column that says whose each row is, such as pd.concat("
            "[one.assign(client=name) for name, one in tables.items()])",
        ),
        (
            pd.DataFrame(np.zeros((3, 2))),
            "the names of the columns must be different texts: rename them, as df.columns = df.columns.astype(str) does",
        ),
        (twice, "the names of the columns must be different texts: rename those that are not"),
        (nothing, "there are no features: give features=[...], the columns to learn from"),
        (pd.DataFrame(), "there is no column 'cost'; the table has no columns at all"),
    ):
        with pytest.raises(FedveilError) as caught:
            own(table, categories={})
        assert str(caught.value) == wanted


def test_the_card_does_not_tell_whether_anybody_lacks_a_value() -> None:
    """One missing value makes a column of integers one of floats in pandas."""
    whole = pd.DataFrame({"who": np.arange(90) % 30, "age": np.arange(90), "ill": np.arange(90) % 2})
    lacking = whole.copy()
    lacking.loc[7, "age"] = None
    cards = (
        fv.from_frame(table, target="ill", client="who", missing={"age": 0.0}, classes=[0, 1]).origin
        for table in (whole, lacking)
    )
    assert len({repr(card) for card in cards}) == 1
