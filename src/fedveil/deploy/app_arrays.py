"""The model of a third-party Flower app: the arrays of an instruction as one flat vector, the update, and back.

The first instruction alone, which the server knows, determines what is released: every array of finite floating-point numbers,
except those that count batches. Everything else, such as integer buffers and masks of infinite values, is sent back as received.
Names, order, shapes and types of the reply are those of the instruction, whatever a train function returns.
"""

from __future__ import annotations

import math
import zlib
from base64 import b64decode, b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedveil.errors import ConfigError, UpdateRefused
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

UNTOUCHED = ("num_batches_tracked",)
"""Last name parts of arrays that are not parameters; Flower's FedAvg turns them from integers into floats."""

_VARIANCES = ("running_var", "moving_variance")
"""Last name parts of variances in batch normalisation of PyTorch, and of Keras."""
_LARGEST, _HEADER = 16, 4096
"""Limits in bytes, per number and for the header; larger arrays are not opened."""
_LARGEST_NORM = 1e6
"""L2 norm above which an update counts as diverged."""
_ROUNDING = 1e-6
"""Tolerance for an average of equal integers, relative to 1 or to the larger of them."""
_LAST_PLACES = 4096
"""Tolerance for an average of equal integers, in units in the last place."""
_SHOWN = 6


class Misfit(UpdateRefused):
    """Raised for a reply whose arrays differ from those of the instruction, regardless of their values."""


class Kind(NamedTuple):
    """An array as first received.

    released: whether its update is released; None if the array is refused, since training changes it and it cannot be released.
    integers: its values, if they are integers, in base 64 of their compressed bytes, because floats do not represent all of them.
    """

    dtype: str
    shape: tuple[int, ...]
    released: bool | None
    integers: str = ""

    @classmethod
    def of(cls, array: NDArray[Any], released: bool) -> Kind:
        """Return the kind of an array that is received for the first time."""
        integers = b64encode(zlib.compress(array.tobytes(), 1)).decode() if array.dtype.kind in "iu" else ""
        return cls(array.dtype.str, array.shape, released, integers)

    @property
    def first(self) -> NDArray[Any]:
        """Return the integers as first received."""
        return np.frombuffer(zlib.decompress(b64decode(self.integers)), self.dtype).reshape(self.shape)


Kinds = Mapping[str, Kind]
"""Kinds of a model's arrays by name."""


@dataclass(frozen=True)
class AppArrays:
    """Arrays at the start of a round, by name.

    Args:
        kinds: the arrays as first received.
        untouched: last name parts of arrays that are sent back as received, whatever their type.
    """

    arrays: Mapping[str, NDArray[Any]]
    kinds: Kinds
    untouched: tuple[str, ...] = UNTOUCHED

    @classmethod
    def of(
        cls, record: Any, untouched: Sequence[str] = UNTOUCHED, known: Sequence[Kinds] = (), *, late: bool = False
    ) -> AppArrays:
        """Copy the arrays of an ArrayRecord; integers that a strategy has turned into floats become integers again.

        Args:
            known: earlier models of this run. late: whether the run has had rounds in which this client was not asked.

        Raises:
            ConfigError: no array can be trained, some are complex or not numeric, or finite ones have become non-finite.
        """
        arrays = {name: array.numpy() for name, array in record.items()}
        if wrong := [name for name, array in arrays.items() if array.dtype.kind == "c"]:
            raise ConfigError(
                f"complex parameters are not released: {wrong[:_SHOWN]}: keep real and imaginary part as two arrays"
            )
        if wrong := [name for name, array in arrays.items() if array.dtype.kind not in "fiub"]:
            raise ConfigError(
                f"a model may hold only arrays of numbers, and these are not: {wrong[:_SHOWN]}: keep them out of it"
            )
        shapes = {name: array.shape for name, array in arrays.items()}
        kinds = next((one for one in known if {name: kind.shape for name, kind in one.items()} == shapes), None)
        if kinds is None:
            kinds = _first_kinds(arrays, tuple(untouched), late=late)
        elif wrong := [name for name, kind in kinds.items() if kind.released is None]:
            raise not_constant(wrong)
        elif wrong := [name for name, kind in kinds.items() if kind.released and not np.isfinite(arrays[name]).all()]:
            raise ConfigError(
                f"the model has NaN or infinite values in {wrong[:_SHOWN]}, which it did not have before: it has diverged"
            )
        made = cls({name: _as_first(array, kinds[name]) for name, array in arrays.items()}, kinds, tuple(untouched))
        if not any(array.size for array in map(made.arrays.__getitem__, made._released)):
            raise ConfigError(
                f"the model has no array of finite floating-point numbers to release; it has {list(made.arrays)[:_SHOWN]}"
            )
        return made

    @property
    def _released(self) -> list[str]:
        return [name for name, kind in self.kinds.items() if kind.released]

    @cached_property
    def layout(self) -> Layout:
        """Return the layout of the released arrays."""
        return Layout.of({name: self.arrays[name].shape for name in self._released})

    @property
    def caveat(self) -> str:
        """Return a warning for an app whose released arrays have variances, or an empty string."""
        if not (names := [name for name in self._released if _last(name) in _VARIANCES]):
            return ""
        return (
            f"{', '.join(names[:_SHOWN])}: noise can make a variance negative, and a model that evaluates with it gives NaN: use "
            f"group normalisation (fv.fix), or leave the statistics as they are sent, with "
            f"untouched={(*self.untouched, 'running_mean', 'running_var')}"
        )

    @property
    def norm(self) -> float:
        """Return the L2 norm of the released arrays at the start of the round."""
        with np.errstate(all="ignore"):
            return float(np.sqrt(sum(float(np.square(self.arrays[n], dtype=np.float64).sum()) for n in self.layout.names)))

    @property
    def record(self) -> Any:
        """Return the arrays as an ArrayRecord."""
        return self._record({})

    def update(self, content: Any) -> Floats:
        """Return the update [d] in the content of a train function's reply.

        Raises:
            Misfit: the reply lacks such arrays.
        """
        record = self._replied(content)
        large = [n for n in self.layout.names if len(record[n].data) > _LARGEST * self.arrays[n].size + _HEADER]
        try:
            after = {name: record[name].numpy() for name in self.layout.names if not large}
        except Exception as problem:
            raise UpdateRefused(f"the arrays of the reply cannot be read ({type(problem).__name__})") from problem
        wrong = large or [n for n, a in after.items() if a.dtype.kind != "f" or a.shape != self.arrays[n].shape]
        if wrong:
            raise Misfit(f"these arrays of the reply have another shape than they had, or no floats: {wrong[:_SHOWN]}")
        with np.errstate(all="ignore"):
            moved = [after[n].astype(np.float64) - self.arrays[n].astype(np.float64) for n in self.layout.names]
            return np.concatenate([part.reshape(-1).astype(np.float32) for part in moved])

    def refilled(self, content: Any) -> list[str]:
        """Return names of unreleased float arrays with NaN or infinite values that a reply has changed: they are not constant."""
        record, changed = self._replied(content), []
        for name, kind in self.kinds.items():
            before = self.arrays[name]
            if kind.released or before.dtype.kind != "f" or _last(name) in self.untouched or np.isfinite(before).all():
                continue
            if name in record and not np.array_equal(record[name].numpy(), before, equal_nan=True):
                changed.append(name)
        return changed

    @property
    def nothing(self) -> Floats:
        """Return a zero update [d], replacing one that may not be released."""
        return np.zeros(self.layout.dimension, np.float32)

    def moved(self, step: Floats) -> Any:
        """Return the arrays after a released step [d], as an ArrayRecord in the order of the instruction."""
        parts = zip(self.layout.names, np.split(step, np.cumsum(self.layout.sizes)[:-1]), strict=True)
        return self._record({name: self._stepped(name, part) for name, part in parts})

    def as_sent(self, record: Any) -> Any:
        """Return a strategy's new arrays in their original types, with all unreleased arrays as they were."""
        return self._record({name: record[name].numpy().astype(self.arrays[name].dtype) for name in self.layout.names})

    def _replied(self, content: Any) -> Any:
        """Return the one ArrayRecord of a reply, which must have all released arrays.

        Raises:
            Misfit: the message names the arrays on both sides.
        """
        try:
            records = dict(content.array_records)
        except Exception as problem:
            raise Misfit(f"the reply has no arrays ({type(problem).__name__})") from problem
        (record,) = records.values() if len(records) == 1 else ({},)
        if missing := [name for name in self.layout.names if name not in record]:
            back = {name: list(one)[:_SHOWN] for name, one in records.items()}
            raise Misfit(
                f"the reply needs one ArrayRecord with the arrays of the instruction: {list(self.layout.names)[:_SHOWN]} were "
                f"sent, and {back} came back (without {missing[:_SHOWN]})"
            )
        return record

    def _stepped(self, name: str, step: NDArray[np.float32]) -> NDArray[Any]:
        before = self.arrays[name]
        with np.errstate(all="ignore"):
            return np.asarray(before.astype(np.float64) + step.reshape(before.shape)).astype(before.dtype)

    def _record(self, changed: Mapping[str, NDArray[Any]]) -> Any:
        from flwr.app import Array, ArrayRecord

        return ArrayRecord({name: Array(np.asarray(changed.get(name, before))) for name, before in self.arrays.items()})


def unfit(update: Floats) -> str:
    """Return why an update [d] is not released as it is, or an empty string."""
    norm = math.sqrt(float(np.square(update, dtype=np.float64).sum()))
    if not math.isfinite(norm):
        return "the update has NaN or infinite values (a smaller learning rate may help)"
    return f"the update has norm {norm:.4g}, above {_LARGEST_NORM:g}" if norm > _LARGEST_NORM else ""


def not_constant(names: Sequence[str]) -> ConfigError:
    """Return the error for a model in which training changes arrays that cannot be released."""
    return ConfigError(
        f"the model came with NaN or infinite values in {list(names)[:_SHOWN]}, and training changed these arrays: only a "
        f"constant one goes back as it came; nothing was charged: start from finite values"
    )


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _first_kinds(arrays: Mapping[str, NDArray[Any]], untouched: tuple[str, ...], *, late: bool) -> dict[str, Kind]:
    """Determine the kinds of a model's arrays when they are first received.

    A client that is first asked in a later round may be sent integers as floats, because a strategy averaged them. Whole numbers
    in double precision are taken for integers, unless everything that was sent is whole.
    """
    released = {n for n, a in arrays.items() if a.dtype.kind == "f" and _last(n) not in untouched and bool(np.isfinite(a).all())}
    whole = {n for n in released if late and arrays[n].dtype == np.float64 and _is_whole(arrays[n])}
    released -= whole if whole != released else set()
    return {name: Kind.of(array, name in released) for name, array in arrays.items()}


def _is_whole(array: NDArray[Any]) -> bool:
    return bool(np.all(np.abs(array - np.rint(array)) <= _ROUNDING * np.maximum(1, np.abs(array))))


def _as_first(array: NDArray[Any], kind: Kind) -> NDArray[Any]:
    """Return an array in its first type, if that was an integer type and nothing but rounding is lost.

    Integers that equal their first values up to rounding become exactly these.
    """
    dtype = np.dtype(kind.dtype)
    if kind.released:
        return array if array.dtype.kind == "f" else array.astype(dtype)
    if dtype.kind not in "iub" or array.dtype.kind != "f" or not (np.isfinite(array).all() and _is_whole(array)):
        return array
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    whole = np.rint(array)
    fits, same = (whole >= least) & (whole < most + 1), np.zeros(array.shape, bool)
    if kind.integers:
        with np.errstate(all="ignore"):
            before = kind.first.astype(array.dtype)
            same = np.abs(array - before) <= _LAST_PLACES * np.spacing(np.abs(before))
    if not np.all(fits | same):
        return array
    restored = np.where(fits, whole, 0).astype(dtype)
    return np.where(same, kind.first, restored) if kind.integers else restored
