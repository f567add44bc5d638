"""A loaded data set: checked arrays, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.declared import IGNORED, Array, Info
from fedveil.errors import DataError


@dataclass(frozen=True)
class Origin:
    """Everything except casts and notes is public: it depends on names and on the user's options, not on the data's values.

    source: what it was made from. features: names of the inputs. casts: changes of type, one line each. They depend on the types
    of tables and lists, which may depend on values: one 34.5 turns a column of integers into floats.
    categories, missing: the public lists and constants with which columns were encoded. test: the rule of the test split.
    indicators: columns that have a further feature, 1 where their value was missing.
    counted: what was counted in the data and is treated as public all the same.
    notes: doubts about features and test set, for the owner of the data: they follow from values.
    ranked: whether one example's time may decide if another one is for testing. timed: whether its own time decides.
    """

    source: str
    test: str
    features: tuple[str, ...] = ()
    casts: tuple[str, ...] = ()
    categories: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    missing: Mapping[str, object] = field(default_factory=dict)
    counted: tuple[str, ...] = ()
    ranked: bool = False
    timed: bool = False
    indicators: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def public(self) -> dict[str, Any]:
        """Return the public fields, which the data card holds."""
        return {key: value for key, value in asdict(self).items() if key not in ("casts", "notes")}


Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """Examples, targets and, if there are any, users of the two official splits.

    x_train, x_test: (examples, *info.input_shape), uint8 from 0 to 255 for images, float32 for signals, int64 for tokens from 0
    to info.vocabulary - 1, C-contiguous.
    y_train, y_test: (examples, *info.target.shape), classes int64 from 0 to info.classes - 1, in sequences and pictures also
    IGNORED; or quantities float32. users_train, users_test: int64 ids of the natural users, or None.
    origin: of user-supplied data, made by `from_frame` and the like.
    Raises DataError if shapes, types, targets or values are not so.
    """

    info: Info
    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    users_train: Ints | None = None
    users_test: Ints | None = None
    origin: Origin | None = None

    def __post_init__(self) -> None:
        _check_split(self.info, "train", self.x_train, self.y_train, self.users_train)
        _check_split(self.info, "test", self.x_test, self.y_test, self.users_test)

    def __repr__(self) -> str:
        info, users = self.info, self.users_train
        targets = f"{info.classes} classes" if info.classes else "quantities"
        people = "" if users is None else f" of {len(np.unique(users))} clients"
        lines = [
            f"{info.name}: {len(self.x_train)} examples{people} to train, {len(self.x_test)} to test; "
            f"inputs ({_sides(info.input_shape)}) {self.x_train.dtype}, targets {targets}"
        ]
        if self.origin is not None:
            lines += [f"  from {self.origin.source}; test split: {self.origin.test}"]
            lines += [f"  cast: {cast}" for cast in self.origin.casts]
            lines += [f"  note: {note}" for note in self.origin.notes]
            lines += [f"  counted in the data, treated as public: {what}" for what in self.origin.counted]
        return "\n".join(lines)

    def standardise(self, x: Array) -> Array:
        """Standardise examples with the constants of this data set."""
        return standardise(x, self.info)


def strata(info: Info, y: Array) -> Ints:
    """Return the group of each example: its class, or 0 for all if an example does not have exactly one class."""
    return y if info.strata > 1 else np.zeros(len(y), np.int64)


def standardise(x: Array, info: Info) -> Array:
    """Return (x / scale - mean) / std per channel, in float32, with the constants of the catalogue; tokens are unchanged.

    The constants are published ones, or fixed ranges where none is published: no statistic of the private data is computed
    at run time, so the step costs no privacy at run time. (Published constants were once computed by others from the whole
    public training set.)
    x: (examples, *info.input_shape), or one example, in the units of the data set. DataError for another shape.
    """
    shape = info.input_shape
    if x.shape[-len(shape) :] != shape or x.ndim not in (len(shape), len(shape) + 1):
        raise DataError(f"{info.name}: cannot standardise an array of shape {x.shape}; give (examples, {_sides(shape)})")
    if info.vocabulary:
        return x
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
    wanted = ("int64",) if info.vocabulary else ("uint8", "float32")
    if x.dtype not in wanted:
        raise DataError(f"{where}: examples are {x.dtype}; expected {' or '.join(wanted)}")
    if info.vocabulary:
        _check_range(f"{where}: tokens", x, info.vocabulary)
    _check_targets(where, info, y, len(x))
    if users is not None and (users.dtype != np.int64 or users.shape != (len(x),)):
        raise DataError(f"{where}: users are {users.dtype} of shape {users.shape}; expected int64 of shape ({len(x)},)")
    _check_finite(where, "examples", x)


def _check_targets(where: str, info: Info, y: Array, examples: int) -> None:
    target = info.target
    if y.dtype != target.dtype or y.shape != (examples, *target.shape):
        expected = f"({', '.join(str(side) for side in (examples, *target.shape))})"
        raise DataError(f"{where}: targets are {y.dtype} of shape {y.shape}; expected {target.dtype} of shape {expected}")
    if info.classes:
        _check_range(f"{where}: labels", y[y != IGNORED] if target.shape else y, info.classes)
    _check_finite(where, "targets", y)


def _check_range(what: str, values: Array, count: int) -> None:
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low < 0 or high >= count:
        raise DataError(f"{what} go from {low} to {high}; expected 0 to {count - 1}")


def _check_finite(where: str, what: str, values: Array) -> None:
    if values.dtype == np.float32:
        bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
        if bad.any():
            raise DataError(f"{where}: {int(bad.sum())} {what} hold NaN or infinite values, the first is {int(bad.argmax())}")


def _sides(shape: tuple[int, ...]) -> str:
    return ", ".join(str(side) for side in shape)
