"""Data sets of torch: anything with a length whose items are (input, target), such as TensorDataset, Subset, torchvision's."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.dataset import Dataset
from fedveil.data.own.arrays import of_arrays
from fedveil.data.own.casts import array_of
from fedveil.data.own.drawn_by_item import items_by_themselves
from fedveil.errors import DataError


def from_torch(dataset: Any, *, client: Any = None, test: Any = None, **public: Any) -> Dataset:
    """A data set of a map-style torch Dataset; random transforms are drawn once, for each item by itself.

    Args:
        dataset: items are (input, target), or (input, target, client) with `client=2`. client: whose example each is; or the
            place of the client's id in an item. test: as for `from_arrays`, or another torch Dataset.
        public: as for `from_arrays`.

    Raises:
        DataError, ConfigError: as `from_arrays`; or an iterable data set, items of other forms, or of which one decides about
            others (see `items_by_themselves`).
    """
    fields = items_of(dataset)
    if len(fields) > (3 if isinstance(client, int) else 2):
        raise DataError(
            f"the items of the {type(dataset).__name__} have {len(fields)} parts, and (input, target"
            f"{', client' if isinstance(client, int) else ''}) would be read: give client=2 where the third says whose example "
            f"each is, or a dataset without the others"
        )
    if isinstance(client, int):
        if not 2 <= client < len(fields):
            raise DataError(
                f"client = {client}: the items of the dataset have {len(fields)} parts: give 2 or more, or an array of ids"
            )
        client = [str(one) for one in np.asarray(array_of(fields[client], "client")).tolist()]
    if hasattr(test, "__getitem__") and hasattr(test, "__len__") and not isinstance(test, dict | tuple | list):
        test = items_of(test)[:2]
    return of_arrays((fields[0], fields[1]), client, test, public, f"torch: {type(dataset).__name__}")


def items_of(dataset: Any) -> tuple[Any, ...]:
    """The parts of all items, stacked part by part.

    Raises:
        DataError: not map-style, empty, or items that have no two parts, differ in shape, or depend on others.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")) or len(dataset) == 0:
        raise DataError(
            f"{type(dataset).__name__} has no length, or is empty: give a map-style dataset, such as TensorDataset, with at "
            f"least one example"
        )
    items = items_by_themselves(dataset)
    if not all(isinstance(item, tuple | list) and len(item) == len(items[0]) >= 2 for item in items):
        raise DataError(f"the items of the {type(dataset).__name__} are not all (input, target): give a dataset whose items are")
    return tuple(stacked([item[part] for item in items], f"part {part} of the items") for part in range(len(items[0])))


def stacked(values: list[Any], what: str) -> NDArray[Any]:
    """Arrays, tensors, pictures of Pillow, numbers or texts of one shape, as one array; pictures as (channels, height, width).

    Raises:
        DataError: they differ in shape, or in type: in a common one, one example would change what the others mean.
    """
    arrays = [_picture(np.asarray(one)) if hasattr(one, "getbands") else array_of(one, what) for one in values]
    if len({array.shape for array in arrays}) > 1:
        raise DataError(f"{what}: examples differ in shape: pad, crop or resize them to one shape")
    if len({array.dtype.kind if array.dtype.kind in "UT" else array.dtype for array in arrays}) > 1:
        raise DataError(f"{what}: examples differ in type: give all of them the same, such as bytes or float32")
    return np.stack(arrays)


def _picture(pixels: NDArray[Any]) -> NDArray[Any]:
    return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))
