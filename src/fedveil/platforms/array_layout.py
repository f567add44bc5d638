"""Updates as dicts of numpy arrays: which arrays are released, as one flat vector, and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedveil.errors import UpdateRefused

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.training.params import Layout

    Arrays = dict[str, NDArray[Any]]

_SHOWN = 6
"""Most names that an error lists."""


@dataclass(frozen=True)
class ArrayLayout:
    """Names of an update's arrays in order, with the type and shape of each.

    Floating-point arrays are released. Integer arrays are returned unchanged.
    """

    kinds: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, update: object) -> ArrayLayout:
        """Return the layout of an update.

        Raises:
            UpdateRefused: it is not a dict of numpy arrays of floats and integers, or has no float.
        """
        layout = cls(tuple((name, array.dtype.str, array.shape) for name, array in _arrays(update).items()))
        if not layout.flat.dimension:
            raise UpdateRefused(f"the update needs at least one floating-point number to release; it has the arrays {layout}")
        return layout

    @cached_property
    def flat(self) -> Layout:
        """Return the layout of the flat vector of all released arrays."""
        from fedveil.training.params import Layout

        released = {name: shape for name, dtype, shape in self.kinds if np.dtype(dtype).kind == "f"}
        if not released:
            raise UpdateRefused(f"the update needs at least one floating-point array to release; it has the arrays {self}")
        return Layout.of(released)

    @cached_property
    def digest(self) -> str:
        """Return a name for these names, types and shapes, 12 hex digits, whatever their order."""
        return hashlib.sha256(json.dumps(sorted(self.kinds)).encode()).hexdigest()[:12]

    @property
    def untouched(self) -> tuple[str, ...]:
        """Return the names of the integer arrays."""
        return tuple(name for name, dtype, _ in self.kinds if np.dtype(dtype).kind in "iu")

    @property
    def zero(self) -> NDArray[np.float32]:
        """Return a vector [d] of zeros."""
        return np.zeros(self.flat.dimension, np.float32)

    def split(self, update: object) -> tuple[NDArray[np.float32], Arrays]:
        """Return copies of the released arrays, as one float32 vector [d], and of the integer arrays.

        Raises:
            UpdateRefused: the names, types or shapes differ from this layout, or a number is NaN or infinite in float32.
        """
        arrays = _arrays(update)
        kinds = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
        expected = {name: (dtype, shape) for name, dtype, shape in self.kinds}
        if kinds != expected:
            odd = [name for name in {**expected, **kinds} if kinds.get(name) != expected.get(name)][:_SHOWN]
            raise UpdateRefused(
                f"the update has other arrays than the first one: {_listed(kinds, odd)} instead of {_listed(expected, odd)}: "
                f"give the same names, types and shapes in every round"
            )
        released = {name: arrays[name] for name in self.flat.names}
        with np.errstate(all="ignore"):
            vector = np.concatenate([array.reshape(-1).astype(np.float32) for array in released.values()])
        if not np.isfinite(vector).all():
            odd = [n for n, part in self._parts(vector).items() if not np.isfinite(part).all()][:_SHOWN]
            raise UpdateRefused(f"the update has NaN, infinite or too large values (above 3.4e38) in {odd}: nothing was released")
        return vector, {name: arrays[name].copy() for name in self.untouched}

    def joined(self, vector: NDArray[np.float32], untouched: Arrays) -> Arrays:
        """Return a released vector [d] and integer arrays as an update, in the types of this layout."""
        parts = self._parts(vector) | untouched
        return {name: _as_type(parts[name].reshape(shape), np.dtype(dtype)) for name, dtype, shape in self.kinds}

    def _parts(self, vector: NDArray[np.float32]) -> Arrays:
        ends = np.cumsum(self.flat.sizes)[:-1]
        return dict(zip(self.flat.names, np.split(vector, ends), strict=True))

    def __str__(self) -> str:
        return _listed({name: (dtype, shape) for name, dtype, shape in self.kinds}, [name for name, *_ in self.kinds][:_SHOWN])


def _arrays(update: object) -> Arrays:
    """Return a copy of the dict of an update, in which numpy's scalars, as arithmetic makes them of 0-d arrays, are arrays.

    Raises:
        UpdateRefused: something in it is not a numpy array of floats or integers under a name.
    """
    if not isinstance(update, Mapping):
        raise UpdateRefused(f"an update is a dict of numpy arrays by name, got {type(update).__name__}")
    arrays = {name: np.asarray(array) if isinstance(array, np.generic) else array for name, array in update.items()}
    for name, array in arrays.items():
        if type(name) is not str:
            raise UpdateRefused(f"the names of an update's arrays are strings, got {name!r} ({type(name).__name__})")
        if type(array) is not np.ndarray:
            kind = f"{type(array).__module__}.{type(array).__qualname__}"
            raise UpdateRefused(f"{name!r} must be a plain numpy array, got {kind}: give numpy.array(...) of it")
        if array.dtype.kind not in "fiu":
            raise UpdateRefused(
                f"{name!r} must hold floating-point numbers, which are released, or integers, which are returned unchanged; it "
                f"has the type {array.dtype}: leave it out, or convert it"
            )
    return arrays


def _as_type(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return values in another type; what exceeds a shorter float becomes its largest number."""
    if dtype.kind == "f" and dtype.itemsize < values.dtype.itemsize:
        values = np.clip(values, np.finfo(dtype).min, np.finfo(dtype).max)
    return np.asarray(values, dtype=dtype)


def _listed(kinds: Mapping[str, tuple[str, tuple[int, ...]]], names: list[str]) -> str:
    return str({name: "{} of shape {}".format(*kinds[name]) if name in kinds else "missing" for name in names})
