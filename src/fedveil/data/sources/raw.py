"""What a reader hands back, before it is checked against the catalogue."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from fedveil.data.catalogue import Info
from fedveil.errors import DataError

Array = NDArray[Any]
MOST_BYTES = 2**29
"""Above what any file inside an archive of the catalogue has: a longer one is a bomb and is not unpacked."""


class RawData(NamedTuple):
    """Two splits as they were stored; images are (examples, channels, height, width)."""

    x_train: Array
    y_train: Array
    x_test: Array
    y_test: Array
    users_train: Array | None = None
    users_test: Array | None = None


@dataclass(frozen=True)
class Format:
    """A way in which a data set may lie in a directory.

    expects: the file names, for messages.
    read: (directory, info) -> arrays, or None if the files are not there; DataError if they are there and cannot be used.
    """

    expects: str
    read: Callable[[Path, Info], RawData | None]


def unpacked(archive: zipfile.ZipFile, name: str) -> bytes:
    """A member of a zip archive; KeyError if it is not there, DataError if it would unpack to more than `MOST_BYTES`."""
    size = archive.getinfo(name).file_size
    if size > MOST_BYTES:
        raise DataError(f"{archive.filename}: {name} unpacks to {size} bytes; at most {MOST_BYTES} are read")
    return archive.read(name)
