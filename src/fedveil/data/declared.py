"""Declarations of data sets: facts, files, and the functions that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from numpy.typing import NDArray

Array = NDArray[Any]
IGNORED = -100
"""Marks a position in a sequence or picture without a class, such as padding."""


@dataclass(frozen=True)
class Targets:
    """Shape and type of the target of one example; by default the number of a class.

    shape: `()` is one number. dtype: int64 for classes, float32 for quantities. names: of its entries, or of the classes.
    unit: of quantities, as on an axis.
    """

    shape: tuple[int, ...] = ()
    dtype: Literal["int64", "float32"] = "int64"
    names: tuple[str, ...] = ()
    unit: str = ""


@dataclass(frozen=True)
class Info:
    """Public facts about a data set, known before it is loaded.

    input_shape: one example: (channels, height, width) for images, (channels, time) for signals, (length,) for tokens.
    classes: their number; 0 if targets are quantities.
    train_size, test_size: examples of the official split; 0 where the number depends on how the files were prepared.
    users: natural users of both splits together, 0 if there are none.
    source: its origin and licence. embedded: it comes with a dependency, nothing is downloaded.
    mean, std: one constant per channel, in the units of `Dataset.x_train` divided by `scale`; see `dataset.standardise`.
    scale: 255 for images stored as bytes, 1 for signals.
    target: what targets look like. vocabulary: number of tokens where inputs are tokens, int64 from 0; else 0.
    features_of: the public network that made the examples, and its digest; empty where they are not features (`fv.embed`).
    counted: what of this was counted in the data, though it is treated as public.
    """

    name: str
    title: str
    input_shape: tuple[int, ...]
    classes: int
    train_size: int
    test_size: int
    users: int
    source: str
    embedded: bool
    mean: tuple[float, ...]
    std: tuple[float, ...]
    scale: float = 255.0
    target: Targets = Targets()
    vocabulary: int = 0
    features_of: str = ""
    counted: tuple[str, ...] = ()

    @property
    def strata(self) -> int:
        """Number of classes by which examples can be grouped; 1 if an example does not have exactly one class."""
        return self.classes if self.classes and not self.target.shape else 1


@dataclass(frozen=True)
class Remote:
    """One file: its addresses in the order in which they are tried, and its digest as pooch writes it (algorithm:hex)."""

    name: str
    digest: str
    places: tuple[str, ...]

    @property
    def urls(self) -> tuple[str, ...]:
        """Full URLs."""
        return tuple(place + self.name for place in self.places)


class RawData(NamedTuple):
    """The two splits as stored; images are (examples, channels, height, width)."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    users_train: Array | None = None
    users_test: Array | None = None


@dataclass(frozen=True)
class Format:
    """A file format of a data set in a directory. expects: the file names, for messages.
    read: (directory, info) -> arrays, or None if the files are not there; DataError if they are there and cannot be used.
    """

    expects: str
    read: Callable[[Path, Info], RawData | None]


@dataclass(frozen=True)
class DataSet:
    """A built-in data set.

    folders: names of the folders that may hold its files. files: downloads. formats: of its files, besides an npz archive of
    its name. by_hand: how to get it if no digest is known that could check a download.
    """

    info: Info
    folders: tuple[str, ...] = ()
    files: tuple[Remote, ...] = ()
    formats: tuple[Format, ...] = ()
    by_hand: str = ""
