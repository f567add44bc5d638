"""Conversion of inputs, targets and clients to the types of a `Dataset`: lossless casts are reported, others refused."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.catalogue import IGNORED, Targets
from fedveil.data.own.cards import OwnCard, is_number, reading
from fedveil.errors import DataError

Array = NDArray[Any]
EXACT, LONGEST = 2**24, 2**64
"""Float32 represents all whole numbers up to EXACT; from LONGEST on, floats are refused as ids and times."""
_FIXES = {
    "O": "objects: make it one array of numbers; sequences and pictures of different sizes must be padded to one shape",
    "U": "text: give numbers; for columns of text use from_frame with a public list of their values, categories={...}",
    "M": "dates: give numbers, such as days since a public date: (dates - np.datetime64('2024-01-01')) / np.timedelta64(1, 'D')",
    "m": "time differences: give numbers, such as differences / np.timedelta64(1, 'D')",
    "c": "complex numbers: give real and imaginary part as two numbers",
}
_FIXES["S"], _FIXES["T"] = _FIXES["U"], _FIXES["U"]


@dataclass(frozen=True)
class Labelled:
    """Targets with their shape and type, the number of classes (0: quantities), and the casts that were made."""

    y: Array
    target: Targets
    classes: int
    casts: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()


def array_of(values: Any, what: str) -> Array:
    """Return an array of numbers or text from an array, a tensor, a column or a list.

    Raises:
        DataError: it holds anything else; the message says what to do.
    """
    if hasattr(values, "detach"):
        values = _of_tensor(values.detach().cpu(), what)
    elif isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise DataError(f"{what} has masked values: put a public constant in their place, as {what}.filled(0) does")
    elif hasattr(values, "to_numpy"):
        values = values.to_numpy()
    elif hasattr(values, "toarray"):
        raise DataError(f"{what} is a sparse matrix ({type(values).__name__}): give {what}.toarray()")
    try:
        array = np.asarray(values)
    except ValueError:  # rows of different lengths
        array = np.empty(0, dtype=object)
    if array.dtype.kind == "O" and array.size and all(isinstance(one, Real | np.bool_) for one in array.flat):
        array = np.array(array.tolist())  # of nullable columns
    if array.dtype.kind in "OMmc" or array.dtype.kind not in "biufUST":
        raise DataError(f"{what}: {_FIXES.get(array.dtype.kind, f'{array.dtype}: give numbers')}")
    return array


def _of_tensor(tensor: Any, what: str) -> Any:
    """Return the numbers of a plain tensor. Subclasses may carry more (masks, units, shards); those of torchvision do not."""
    kind = type(tensor)
    if (kind.__module__, kind.__name__) != ("torch", "Tensor") and not kind.__module__.startswith("torchvision."):
        raise DataError(
            f"{what} is a {kind.__name__}, a subclass of Tensor, which may mean more than its numbers: give a plain tensor, as "
            f"{what}.as_subclass(torch.Tensor) does, or an array"
        )
    try:
        return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    except (TypeError, RuntimeError) as problem:  # sparse, quantised, or with a conjugation still to be done
        raise DataError(f"{what} is no plain dense tensor ({str(problem).splitlines()[0]}): give one, or an array") from None


def as_inputs(x: Array, vocabulary: int = 0) -> tuple[Array, tuple[str, ...]]:
    """Return inputs as uint8 (pictures), int64 (tokens) or float32, and the casts that were made.

    Args:
        vocabulary: number of tokens, if the inputs are tokens.

    Raises:
        DataError: an unsupported type or shape, or a cast that would lose information.
    """
    if x.ndim == 0 or len(x) == 0:
        raise DataError("x has no examples: give an array of shape (examples, ...)")
    _refuse_text(x, "x")
    if vocabulary:
        if x.dtype.kind not in "iu":
            raise DataError(f"x is {x.dtype} and vocabulary = {vocabulary}: tokens are whole numbers; give an array of integers")
        _refuse_outside("x: tokens", x, vocabulary, "vocabulary")
        return np.ascontiguousarray(x, np.int64), _cast("tokens", x.dtype, np.int64)
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        raise DataError(
            f"x has shape {x.shape}, which looks like (examples, height, width, channels): give (examples, channels, height, "
            f"width), as x.transpose(0, 3, 1, 2) is"
        )
    if x.dtype == np.uint8 and x.ndim >= 3:
        return _picture(x)
    flat = x[:, None] if x.ndim == 1 else x
    shaped = ("examples () -> (1,): one feature",) if x.ndim == 1 else ()
    return as_float(flat, "x"), (*shaped, *_cast("examples", x.dtype, np.float32))


def as_float(values: Array, what: str) -> Array:
    """Return numbers as float32.

    Raises:
        DataError: whole numbers that float32 cannot distinguish, numbers beyond its range, NaN, or infinity.
    """
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(values, np.float32)
    if values.dtype != np.float32 and _merges_whole_numbers(np.asarray(values), cast):
        raise DataError(
            f"{what} holds whole numbers beyond {EXACT}, which float32 does not hold apart: divide it by a public number and "
            f"give it as floats, or leave it out if it is an id"
        )
    bad = np.asarray(~np.isfinite(cast).reshape(len(cast), -1).all(1))
    if bad.any():
        raise DataError(
            f"{what}: {int(bad.sum())} of {len(bad)} examples hold NaN, infinite numbers, or numbers beyond float32, the "
            f"first is {int(bad.argmax())}: put a public constant in their place, or leave these examples out"
        )
    return cast


def _merges_whole_numbers(values: Array, cast: Array) -> bool:
    """Return whether the cast changes a whole number, whatever type the file or the table gives it."""
    large = np.abs(cast) >= EXACT
    if not large.any():
        return False
    wide = values[large].astype(np.float64)
    whole = (wide == np.floor(wide)) & (np.abs(wide) <= LONGEST)
    return bool((whole & ((wide != cast[large]) | (np.abs(wide) >= 2**53))).any())  # from there float64 holds them apart no more


def as_targets(y: Array, card: OwnCard, names: tuple[str, ...] = (), what: str = "y") -> Labelled:
    """Return targets as int64 classes or float32 quantities, by the card or else their type; rows of yes or no are quantities.

    Raises:
        DataError: labels that the card does not list, or that it must list; quantities as for `as_float`.
    """
    if y.ndim == 0 or len(y) == 0:
        raise DataError(f"{what} has no targets: give one for each example")
    if isinstance(card.classes, tuple):
        return _listed(y, card, what)
    several_yes_or_no = y.dtype.kind == "b" and y.ndim == 2
    if card.classes is None and y.dtype.kind in "biu" and not several_yes_or_no:
        return _labels(y, *_counted(y, what), what, card)
    if card.classes:
        return _labels(_whole(y, what), card.classes, (), what, card)
    _refuse_text(y, what, "give classes=[...], the public list of its labels")
    target = Targets(y.shape[1:], "float32", names, card.unit)
    return Labelled(as_float(y, what), target, 0, _cast("targets", y.dtype, np.float32))


def as_ids(values: Any, examples: int, what: str = "client") -> Array:
    """Return the id of each example's client, as integers or text.

    Raises:
        DataError: something else, or not one for each example.
    """
    ids = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    if isinstance(values, list | tuple) and not all(isinstance(one, str) for one in values) and ids.dtype.kind in "OUT":
        # of a missing one among texts numpy makes the text nan
        ids = np.array([*values, None], dtype=object)[:-1]
    if ids.dtype.kind == "O" and all(isinstance(one, str) and one for one in ids.reshape(-1)):
        ids = ids.astype(np.str_)
    elif ids.dtype.kind == "O" and ids.size and all(isinstance(one, Integral) for one in ids.reshape(-1)):
        ids = np.array(ids.tolist())
    if ids.shape != (examples,):
        raise DataError(f"{what} has shape {ids.shape}: give one id for each of the {examples} examples")
    if ids.dtype.kind in "OUT" and (empty := int((ids == "").sum())):
        raise DataError(f"{what} has {empty} empty id{'s' * (empty > 1)}: leave these examples out, or name their clients")
    if ids.dtype.kind not in "iuUT":
        raise DataError(
            f"{what} is {ids.dtype}: give everybody an id that is an integer or text, and leave out examples without one"
        )
    return ids


def _cast(what: str, old: Any, new: Any) -> tuple[str, ...]:
    return () if old == new else (f"{what} {old} -> {np.dtype(new)}",)


def _picture(x: Array) -> tuple[Array, tuple[str, ...]]:
    if x.ndim == 3:
        return np.ascontiguousarray(x[:, None]), (f"examples {x.shape[1:]} -> {(1, *x.shape[1:])}: one channel",)
    return np.ascontiguousarray(x), ()


def _listed(y: Array, card: OwnCard, what: str) -> Labelled:
    """Return the positions of labels in the public list; if the list holds names, numbers from 0 are positions already.

    The meaning of a label depends only on the label and the list, not on the type of y: files and lists get their type from their
    contents, so one record could change everybody's labels.
    """
    labels = card.classes
    assert isinstance(labels, tuple)
    cast, number = ("labels -> their place in classes",), {reading(label): i for i, label in enumerate(labels)}
    itself = {"False": 0, "True": 1} | {str(i): i for i in range(len(labels))}
    if all(isinstance(one, str) and (itself[one] == i if one in itself else not is_number(one)) for i, one in enumerate(labels)):
        if y.dtype.kind in "iuf":
            return replace(_labels(_whole(y, what), len(labels), (), what, card), casts=cast)
        number = itself | number
    known, where = np.unique(y, return_inverse=True)
    unlisted = sum(reading(one) not in number for one in known.tolist())
    if unlisted:
        raise DataError(
            f"{what} holds {unlisted} label{'s' * (unlisted > 1)} that classes does not list ({', '.join(map(str, labels))}): "
            f"list all possible labels, or leave these examples out"
        )
    codes = np.array([number[reading(one)] for one in known.tolist()], np.int64)[where].reshape(y.shape)
    return Labelled(codes, Targets(y.shape[1:], "int64", card.class_names), len(labels), cast)


def _labels(y: Array, classes: int, counted: tuple[str, ...], what: str, card: OwnCard) -> Labelled:
    checked = y[y != IGNORED] if y.ndim > 1 else y
    _refuse_outside(f"{what}: labels", checked, classes, "classes")
    target = Targets(y.shape[1:], "int64", card.class_names)
    return Labelled(np.ascontiguousarray(y, np.int64), target, classes, _cast("labels", y.dtype, np.int64), counted)


def _counted(y: Array, what: str) -> tuple[int, tuple[str, ...]]:
    """Count the classes, if the card does not give their number."""
    if y.dtype.kind == "b":
        return 2, ()
    if y.ndim == 2 and y.shape[1] == 1:
        raise DataError(
            f"{what} holds one integer in a list of its own each: give y[:, 0], or, of a table, the name of the target "
            f"and no list"
        )
    if y.ndim == 2 and bool((np.isin(y, (0, 1)).all(1) & (y.sum(1) == 1)).all()):
        raise DataError(
            f"{what} holds one 1 in each row, which looks one-hot: give the number of the class, y.argmax(1); or classes=0 for a "
            f"0 or 1 for each of several labels"
        )
    if y.ndim > 1:
        raise DataError(
            f"{what} holds {y.shape[1:]} integers for each example: give classes=..., how many classes each place can have, or "
            f"classes=0 for quantities, such as times, and for a 0 or 1 for each of several labels"
        )
    low, high = int(y.min()), int(y.max())
    if low == high:
        raise DataError(f"{what} holds one label only, so there is nothing to learn: give classes=..., if there can be others")
    if low < 0 or len(np.unique(y)) <= high:
        raise DataError(
            f"{what}: labels go from {low} to {high} and are not 0, 1, ... without a gap: give classes=[...], the public list of "
            f"all labels (or classes=0, if they are quantities)"
        )
    return high + 1, ("number of classes",)


def _whole(y: Array, what: str) -> Array:
    _refuse_text(y, what, "give classes=[...], the public list of its labels")
    if y.dtype.kind == "f" and not (np.isfinite(y).all() and (y == np.floor(y)).all()):
        raise DataError(f"{what} holds numbers that are not whole, and classes is given: leave classes out for quantities")
    return y


def _refuse_outside(what: str, values: Array, count: int, key: str) -> None:
    low, high = (int(values.min()), int(values.max())) if values.size else (0, 0)
    if low < 0 or high >= count:
        raise DataError(f"{what} go from {low} to {high}, and {key} = {count} allows 0 to {count - 1}: correct one of them")


def _refuse_text(values: Array, what: str, fix: str = "") -> None:
    if values.dtype.kind in "UST":
        raise DataError(f"{what}: text: {fix}" if fix else f"{what}: {_FIXES['U']}")


def as_times(values: Any, examples: int, what: str = "test: latest") -> Array:
    """Return times that can be compared: numbers, dates, or text in ISO 8601.

    Text that holds numbers is read as numbers, and dates among them are refused: the numbers would be read as years.

    Raises:
        DataError: something else, missing times, or not one for each example.
    """
    times = np.asarray(values.to_numpy() if hasattr(values, "to_numpy") else values)
    numbers = [is_number(str(one)) for one in times.reshape(-1).tolist()] if times.dtype.kind in "OUT" else []
    if any(numbers):
        times = times.astype(np.float64) if all(numbers) else np.empty(0, dtype=object)
    elif times.dtype.kind in "OUT":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of time zones, which would be lost
                times = times.astype("datetime64[us]")
        except (TypeError, ValueError, UserWarning, DeprecationWarning):
            times = np.empty(0, dtype=object)
    if (
        times.dtype.kind not in "iufM"
        or times.shape != (examples,)
        or bool(np.isnat(times).any() if times.dtype.kind == "M" else np.isnan(times).any())
    ):
        zone = ", without a time zone, which would be lost (pandas: .dt.tz_convert('UTC').dt.tz_localize(None))"
        raise DataError(
            f"{what}: give one time for each of the {examples} examples: numbers, dates, or text such as '2024-07-01'"
            f"{zone * _zoned(values)}"
        )
    return times


def _zoned(values: Any) -> bool:
    """Return whether some of the times, objects or texts, have a time zone."""
    ends, times = re.compile(r"\d(Z|[+-]\d\d:?\d\d)$"), np.asarray(values, dtype=object).reshape(-1)
    return any(getattr(one, "tzinfo", None) is not None or ends.search(str(one)) for one in times)
