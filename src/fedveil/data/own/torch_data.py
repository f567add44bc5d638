"""Data sets of torch, and of Hugging Face's library `datasets`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.dataset import Dataset
from fedveil.data.own.arrays import of_arrays
from fedveil.data.own.cards import TableCard, checked_card
from fedveil.data.own.casts import array_of
from fedveil.data.own.drawn_by_item import items_by_themselves, read_by_row
from fedveil.data.own.frames import column_of, names_of, of_table
from fedveil.errors import DataError


def from_torch(dataset: Any, *, client: Any = None, test: Any = None, **public: Any) -> Dataset:
    """Make a data set of a map-style torch Dataset; random transforms are drawn once, for each item separately.

    Args:
        dataset: items are (input, target), or (input, target, client) with `client=2`. client: the owner of each example, or the
        position of the client's id in an item. test: as for `from_arrays`, or another torch Dataset.
        public: as for `from_arrays`.

    Raises:
        DataError, ConfigError: as `from_arrays`; or an iterable data set, items of other forms, or items that depend on others
        (see `items_by_themselves`).
    """
    fields = _items_of(dataset)
    if len(fields) > (3 if isinstance(client, int) else 2):
        raise DataError(
            f"the items of the {type(dataset).__name__} have {len(fields)} parts, and (input, target"
            f"{', client' if isinstance(client, int) else ''}) would be read: give client=2 if the third part names the client "
            f"of each example, or a dataset without the other parts"
        )
    if isinstance(client, int):
        if not 2 <= client < len(fields):
            raise DataError(
                f"client = {client}: the items of the dataset have {len(fields)} parts: give 2 or more, or an array of ids"
            )
        client = [str(one) for one in np.asarray(array_of(fields[client], "client")).tolist()]
    if hasattr(test, "__getitem__") and hasattr(test, "__len__") and not isinstance(test, dict | tuple | list):
        test = _items_of(test)[:2]
    return of_arrays((fields[0], fields[1]), client, test, public, f"torch: {type(dataset).__name__}")


def _items_of(dataset: Any) -> tuple[Any, ...]:
    """Return the parts of all items, stacked part by part.

    Raises:
        DataError: not map-style, empty, or items that do not have two parts, differ in shape, or depend on others.
    """
    name = type(dataset).__name__
    if several := _several(dataset):
        raise DataError(several)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or len(dataset) == 0:
        loader = hasattr(dataset, "dataset") and hasattr(dataset, "__iter__")
        raise DataError(
            f"a {name} hands out batches, not examples: give its data set, as loader.dataset is"
            if loader
            else f"{name} has no length, or is empty: give a map-style dataset, such as TensorDataset, with at least one example"
        )
    items = items_by_themselves(dataset)
    if isinstance(items[0], Mapping) and len(items[0]) > 1:
        keys = [str(key) for key in items[0]]
        raise DataError(
            f"the items of the {name} are dicts with {', '.join(keys)}: make pairs (input, target) of them, such as "
            f"[(item[{keys[0]!r}], item[{keys[-1]!r}]) for item in dataset]"
        )
    if not all(isinstance(item, tuple | list) and len(item) == len(items[0]) >= 2 for item in items):
        raise DataError(f"the items of the {name} are not all (input, target): give a dataset whose items are")
    return tuple(stacked([item[part] for item in items], f"part {part} of the items") for part in range(len(items[0])))


def _several(dataset: Any) -> str:
    """Return advice if the argument is a list or dict of data sets or loaders, one for each client; empty for a data set."""
    mapped = isinstance(dataset, Mapping)
    ones: list[Any] = list(dataset.values()) if mapped else list(dataset) if isinstance(dataset, list | tuple) else []
    plain = (str, bytes, tuple, list, Mapping, np.ndarray, np.generic)
    sets = [one for one in ones if hasattr(one, "__len__") and not isinstance(one, plain) and not hasattr(one, "detach")]
    if not sets or len(sets) < len(ones) or not all(hasattr(one, "__getitem__") or hasattr(one, "dataset") for one in sets):
        return ""
    made, names = ("list(sets.values())", "list(sets)") if mapped else ("sets", "range(len(sets))")
    loaders = "" if all(hasattr(one, "__getitem__") for one in sets) else ", where sets are the loaders' .dataset"
    return (
        f"a {type(dataset).__name__} of {len(ones)} data sets is not one data set: join them, and say whose each example is: "
        f"from_torch(torch.utils.data.ConcatDataset({made}), client=np.repeat({names}, [len(one) for one in "
        f"{'sets.values()' if mapped else 'sets'}])){loaders}"
    )


def stacked(values: list[Any], what: str) -> NDArray[Any]:
    """Stack arrays, tensors, pictures of Pillow, numbers or texts of one shape; pictures as (channels, height, width).

    Raises:
        DataError: they differ in shape or in type; with a common type, one example would change the meaning of the others.
    """
    if not values:
        raise DataError(f"{what}: there are no examples: give at least one for training and one for testing")
    arrays = [_picture(np.asarray(one)) if hasattr(one, "getbands") else array_of(one, what) for one in values]
    if len({array.shape for array in arrays}) > 1:
        raise DataError(f"{what}: examples differ in shape: pad, crop or resize them to one shape")
    if len({array.dtype.kind if array.dtype.kind in "UT" else array.dtype for array in arrays}) > 1:
        raise DataError(f"{what}: examples differ in type: give all of them the same, such as bytes or float32")
    return np.stack(arrays)


def _picture(pixels: NDArray[Any]) -> NDArray[Any]:
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def from_huggingface(
    dataset: Any, *, target: str = "label", features: Any, client: str | None = None, test: Any = None, **public: Any
) -> Dataset:
    """Make a data set of a `datasets.Dataset`, or of a DatasetDict with the splits train and, unless `test` names another, test.

    Rows that a function makes (`set_transform`, `with_transform`) are read one by one (see `read_by_row`), and their columns
    are those that it makes.

    Args:
        features: the name of one column that holds whole inputs, such as pictures, arrays or lists of tokens (with
            `vocabulary`); or a list of columns with one number or text each, as for `from_frame`.
        target: the column to learn; the names of a ClassLabel are its classes. client: the column with the owner of each example.
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
