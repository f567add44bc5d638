"""A loaded data set: checked arrays, nothing lazy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import Info
from fedveil.errors import DataError

Array = NDArray[Any]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Examples, labels and, where there are any, users of the two official splits.

    x_train, x_test: (examples, *info.input_shape), uint8 from 0 to 255 for images, float32 for signals, C-contiguous.
    y_train, y_test: int64 from 0 to info.classes - 1. users_train, users_test: int64 ids of the natural users, or None.
    Raises DataError if shapes, types, labels or values are not so.
    """

    info: Info
    x_train: Array
    y_train: Ints
    x_test: Array
    y_test: Ints
    users_train: Ints | None = None
    users_test: Ints | None = None

    def __post_init__(self) -> None:
        _check_split(self.info, "train", self.x_train, self.y_train, self.users_train)
        _check_split(self.info, "test", self.x_test, self.y_test, self.users_test)

    def standardise(self, x: Array) -> NDArray[np.float32]:
        """`standardise` with the constants of this data set."""
        return standardise(x, self.info)


def standardise(x: Array, info: Info) -> NDArray[np.float32]:
    """(x / scale - mean) / std per channel, in float32, with the constants of the catalogue.

    The constants are published ones, or fixed ranges where none is published: no statistic of the private data is computed
    at run time, so the step costs no privacy at run time. (Published constants were once computed by others from the whole
    public training set.)
    x: (examples, *info.input_shape), or one example, in the units of the data set. DataError for another shape.
    """
    shape = info.input_shape
    if x.shape[-len(shape) :] != shape or x.ndim not in (len(shape), len(shape) + 1):
        raise DataError(f"{info.name}: cannot standardise an array of shape {x.shape}; give (examples, {_sides(shape)})")
    column = (-1,) + (1,) * (len(shape) - 1)
    mean = np.asarray(info.mean, dtype=np.float32).reshape(column)
    std = np.asarray(info.std, dtype=np.float32).reshape(column)
    out = x.astype(np.float32)
    out -= mean * np.float32(info.scale)
    out /= std * np.float32(info.scale)
    return out


def _check_split(info: Info, split: str, x: Array, y: Array, users: Array | None) -> None:
    where = f"{info.name}, {split} split"
    if x.ndim == 0 or x.shape[1:] != info.input_shape:
        raise DataError(f"{where}: examples have shape {x.shape}; expected (examples, {_sides(info.input_shape)})")
    if len(x) == 0:
        raise DataError(f"{where}: there are no examples")
    if x.dtype not in (np.uint8, np.float32):
        raise DataError(f"{where}: examples are {x.dtype}; expected uint8 or float32")
    if y.dtype != np.int64 or y.shape != (len(x),):
        raise DataError(f"{where}: labels are {y.dtype} of shape {y.shape}; expected int64 of shape ({len(x)},)")
    low, high = int(y.min()), int(y.max())
    if low < 0 or high >= info.classes:
        raise DataError(f"{where}: labels go from {low} to {high}; expected 0 to {info.classes - 1}")
    if users is not None and (users.dtype != np.int64 or users.shape != (len(x),)):
        raise DataError(f"{where}: users are {users.dtype} of shape {users.shape}; expected int64 of shape ({len(x)},)")
    if x.dtype == np.float32:
        bad = ~np.isfinite(x).reshape(len(x), -1).all(axis=1)
        if bad.any():
            raise DataError(f"{where}: {int(bad.sum())} examples hold NaN or infinite values, the first is {int(bad.argmax())}")


def _sides(shape: tuple[int, ...]) -> str:
    return ", ".join(str(side) for side in shape)
