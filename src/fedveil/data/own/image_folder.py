"""Folders of pictures: who and what is on them stands in the names of their folders, or in a table."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedveil.data.own.encoding import no_missing
from fedveil.data.own.frame_columns import column_of
from fedveil.data.own.table_files import read_table
from fedveil.errors import DataError

ENDS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
_WITHOUT_LOSS = {1: {"1": "L", "L": "L"}, 3: {"RGB": "RGB", "L": "RGB", "1": "RGB", "P": "RGB"}}
"""How a picture becomes one of so many channels: mode of the file -> mode to read it in."""


class Pictures(NamedTuple):
    """Pixels (pictures, channels, height, width), the class and, where they are named, the client of each."""

    x: NDArray[np.uint8]
    labels: list[str]
    clients: list[str] | None


def by_folders(root: Path, levels: Sequence[str], shape: Sequence[int]) -> Pictures:
    """Pictures below a folder, in the order of their paths.

    Args:
        levels: what the names of the folders stand for, from the top: `class`, `client`, or both.

    Raises:
        DataError: no pictures, or one that lies elsewhere or has another shape.
    """
    if not root.is_dir():
        raise DataError(f"there is no folder {root}: paths are relative to the configuration that names them")
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in ENDS and not file.is_dir())
    if not files:
        raise DataError(f"{root} holds no pictures: they end in {', '.join(ENDS)}")
    folders = [file.relative_to(root).parts[:-1] for file in files]
    for file, parts in zip(files, folders, strict=True):
        if len(parts) != len(levels):
            raise DataError(f"{file} does not lie in {root}/{'/'.join(levels).upper()}/: move it, or correct data.source.labels")
    named = {level: [parts[i] for parts in folders] for i, level in enumerate(levels)}
    return Pictures(_pixels(files, shape), named["class"], named.get("client"))


def by_table(root: Path, table: Path, columns: Sequence[str], shape: Sequence[int]) -> Pictures:
    """Pictures that a table lists: its column `file` is a path below the folder.

    Args:
        columns: `class`, `client`, or both.

    Raises:
        DataError: a picture or a column that is not there, or another shape.
    """
    wanted = ("file", *columns)
    read = read_table(table, wanted, wanted)
    named = {name: no_missing(column_of(read, name), f"{name} of {table.name}") for name in wanted}
    values = {name: [str(value) for value in column.values] for name, column in named.items()}
    return Pictures(_pixels([root / name for name in values["file"]], shape), values["class"], values.get("client"))


def _pixels(files: Sequence[Path], shape: Sequence[int]) -> NDArray[np.uint8]:
    x = np.empty((len(files), *shape), dtype=np.uint8)
    for i, file in enumerate(files):
        x[i] = _picture(file, tuple(shape))
    return x


def _picture(file: Path, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    from PIL import Image

    channels, height, width = shape
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(file) as picture:  # of large ones: their size is checked here
            mode = _WITHOUT_LOSS.get(channels, {}).get(picture.mode)
            if mode is None or picture.size != (width, height):
                raise DataError(
                    f"{file} is {picture.height}x{picture.width} in mode {picture.mode}, and data.source.shape = {list(shape)}: "
                    f"convert and resize the pictures to one shape first"
                )
            pixels = np.asarray(picture.convert(mode), dtype=np.uint8)
    except DataError:
        raise
    except Exception as error:  # of many kinds, where a file is damaged, and of its own where it is far too large
        raise DataError(f"{file} cannot be read as a picture: {error or type(error).__name__}") from None
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
