"""Data sets of Hugging Face's library `datasets`, which need not be installed: their methods are all that is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedveil.data.dataset import Dataset
from fedveil.data.own.arrays import of_arrays
from fedveil.data.own.cards import TableCard, checked_card
from fedveil.data.own.drawn_by_item import read_by_row
from fedveil.data.own.frame_columns import column_of, names_of
from fedveil.data.own.frames import of_table
from fedveil.data.own.torch_data import stacked
from fedveil.errors import DataError


def from_huggingface(
    dataset: Any, *, target: str = "label", features: Any, client: str | None = None, test: Any = None, **public: Any
) -> Dataset:
    """A data set of a `datasets.Dataset`, or of a DatasetDict with the splits train and, unless `test` says another, test.

    Rows that a function makes (`set_transform`, `with_transform`) are read one by one (see `read_by_row`), and their columns
    are those that it makes.

    Args:
        features: the name of one column that holds whole inputs, such as pictures, arrays or lists of tokens (with
            `vocabulary`); or a list of columns with one number or text each, as for `from_frame`.
        target: the column to learn; the names of a ClassLabel are its classes. client: the column that says whose it is.
        test: as for `from_frame`, or another `datasets.Dataset`. public: as for `from_arrays`, or `from_frame`.

    Raises:
        DataError, ConfigError: as those.
    """
    if isinstance(dataset, Mapping):
        if "train" not in dataset:
            raise DataError(f"a DatasetDict without the split train has {', '.join(dataset)}: give the one to train on")
        test = dataset.get("test") if test is None else test
        dataset = dataset["train"]
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        raise DataError(f"{type(dataset).__name__} is not a datasets.Dataset in memory: load it without streaming")
    names = getattr(dict(getattr(dataset, "features", None) or {}).get(target), "names", None)
    if names and "classes" not in public:
        public["classes"] = tuple(names)
    source = "a datasets.Dataset of Hugging Face"
    own_test = read_by_row(test) if hasattr(test, "column_names") else None
    dataset = read_by_row(dataset)
    if not isinstance(features, str):
        rule = None if own_test is not None else test
        card = checked_card(TableCard, target=target, client=client, features=features, test=rule, **public)
        return of_table(dataset, card, own_test, source)
    ids = None if client is None else column_of(dataset, client).values
    if own_test is not None:
        test = _pair(own_test, features, target)
    elif isinstance(test, Mapping) and isinstance(test.get("latest"), str):
        test = {**test, "latest": column_of(dataset, test["latest"]).values}
    return of_arrays(_pair(dataset, features, target), ids, test, public, source)


def _pair(dataset: Any, features: str, target: str) -> tuple[Any, Any]:
    for name in (features, target):
        if name not in names_of(dataset):
            column_of(dataset, name)  # which says what there is
    return stacked(list(dataset[features]), f"column {features!r}"), stacked(list(dataset[target]), f"column {target!r}")
