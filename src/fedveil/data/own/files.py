"""Tables in files, and folders of pictures."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedveil.data.own.cards import is_number
from fedveil.data.own.casts import LONGEST
from fedveil.data.own.frames import column_of, no_missing
from fedveil.errors import DataError, nearest

Array = NDArray[Any]
_LONGEST_LINE = 2**24
"""Longest line, in characters: a file without line breaks is not a table, and would be read into memory as a whole."""
_BOOLEANS = {"True": True, "TRUE": True, "true": True, "False": False, "FALSE": False, "false": False}


def read_table(file: Path, columns: Collection[str], texts: Collection[str] = ()) -> Any:
    """Read a table from a file, in the format of its suffix.

    Args:
        columns: those that are needed; others are not read. texts: columns to read as text, such as ids with leading zeros.

    Raises:
        DataError: it cannot be read, or lacks a column.
    """
    return _reader(file)(file, columns, texts)


def read_rows(file: Path, columns: Collection[str], texts: Collection[str] = ()) -> Iterator[Any]:
    """Yield each row as a separate table, so that no row affects how another is read. Arguments as for `read_table`.

    If a file is read as a whole, one text among numbers turns the whole column into text, and a row that is too long is an error.
    Here, the cells of such a row are missing.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    if _reader(file) is _parquet:
        table = _parquet(file, columns, texts)
        yield from (table.slice(i, 1) for i in range(len(table)))
        return
    rows = _rows(file, errors="replace")
    header = next(rows)
    _need(file, header, columns)
    for row in rows:
        known = dict(zip(header, row if len(row) == len(header) else [""] * len(header), strict=True))
        yield {name: _parsed([known[name]], name in texts) for name in columns}


def _reader(file: Path) -> Callable[[Path, Collection[str], Collection[str]], Any]:
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file}: a table ends in {', '.join(_READERS)}: save it as one of them")
    if not file.is_file():
        lost = f"{file} is a link that leads to no file" if file.is_symlink() else f"there is no file {file}"
        raise DataError(f"{lost}: paths are relative to the configuration that names them")
    return reader


def _lines(file: Path, errors: str) -> Iterator[str]:
    with open(file, newline="", encoding="utf-8-sig", errors=errors) as text:
        while line := text.readline(_LONGEST_LINE):
            if len(line) == _LONGEST_LINE or ("\0" in line and errors == "strict"):
                raise DataError(
                    f"{file} is no table in UTF-8: it holds {'zero bytes' if chr(0) in line else 'a line without an end'}, as a "
                    f"damaged file does, or one in UTF-16: save it as CSV in UTF-8"
                )
            yield line


def _rows(file: Path, errors: str = "strict") -> Iterator[list[str]]:
    """Return the header, and the rows below it; errors: how to treat bytes that are not UTF-8, as for `open`."""
    delimiter, count = "\t" if file.suffix.lower() == ".tsv" else ",", 0
    try:
        for row in csv.reader(_lines(file, errors), delimiter=delimiter, strict=errors == "strict"):
            if row:
                count += 1
                yield row
    except UnicodeDecodeError as error:
        raise DataError(f"{file} cannot be read as a table in UTF-8: {error}: save it in UTF-8") from None
    except (OSError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as a table in UTF-8, row {count}: {error}") from None
    if count < 2:
        raise DataError(f"{file} has no rows below its header: the first line names the columns")


def _csv(file: Path, columns: Collection[str], texts: Collection[str]) -> dict[str, Array]:
    rows = _rows(file)
    header = next(rows)
    _need(file, header, columns)
    cells: dict[str, list[str]] = {name: [] for name in header if name in columns}
    kept = [(i, cells[name]) for i, name in enumerate(header) if name in cells]
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise DataError(
                f"{file}: row {number} has {len(row)} values for {len(header)} columns: quote values that hold commas"
            )
        for i, column in kept:
            column.append(row[i])
    return {name: _parsed(column, name in texts) for name, column in cells.items()}


def _parsed(cells: list[str], text: bool) -> Array:
    """Convert a column to numbers or bools if all non-empty cells allow it; empty cells are missing."""
    values: list[Any] = [cell.strip() or None for cell in cells]
    there = [value for value in values if value is not None]
    if not text and all(map(is_number, there)):
        return np.array([np.nan if value is None else _number(value) for value in values])
    if not text and all(value in _BOOLEANS for value in there):
        values = [_BOOLEANS.get(value) for value in values]
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _number(text: str) -> float | int:
    """Return the value as a float, or as an int if it is a whole number that no float represents exactly."""
    number = float(text)
    return int(text) if LONGEST < abs(number) < np.inf and text.lstrip("+-").isdigit() else number


def _parquet(file: Path, columns: Collection[str], texts: Collection[str]) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading Parquet needs pyarrow: pip install 'fedveil[parquet]'") from None
    try:
        _need(file, pyarrow.parquet.read_schema(file).names, columns)
        return pyarrow.parquet.read_table(file, columns=list(columns))
    except (OSError, ValueError, pyarrow.lib.ArrowNotImplementedError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from None


def _need(file: Path, header: list[str], columns: Collection[str]) -> None:
    for name in columns:
        if name in header and header.count(name) == 1:
            continue
        raise DataError(
            f"{file} has {'no' if name not in header else 'more than one'} column {name!r}; it has {', '.join(header)}"
            f"{'' if name in header else _likely(name, header)}"
        )


def _likely(name: str, header: list[str]) -> str:
    """Return the likely reason why a column is not found, or an empty string."""
    if len(header) == 1 and (marks := [mark for mark in ";\t|," if mark in header[0]]):
        return (
            f": values seem to be separated by {marks[0]!r}: save it as .csv with commas, and numbers with a point, or as .tsv "
            f"with tabs"
        )
    if name in (stripped := [column.strip() for column in header]):
        return f": the header has blanks around it ({header[stripped.index(name)]!r}): take them out"
    return nearest(name, header)


_READERS: dict[str, Callable[[Path, Collection[str], Collection[str]], Any]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
"""Readers by the suffix of the file's name."""


_ENDS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp")
_WITHOUT_LOSS = {1: {"1": "L", "L": "L"}, 3: {"RGB": "RGB", "L": "RGB", "1": "RGB", "P": "RGB"}}
"""For each number of channels: mode of the file -> mode in which to read it."""


class Pictures(NamedTuple):
    """Pixels (pictures, channels, height, width), the class of each picture and, if given, its client."""

    x: NDArray[np.uint8]
    labels: list[str]
    clients: list[str] | None


def by_folders(root: Path, levels: Sequence[str], shape: Sequence[int]) -> Pictures:
    """Read the pictures below a folder, in the order of their paths.

    Args:
        levels: the meaning of the folders' names, from the top: `class`, `client`, or both.

    Raises:
        DataError: no pictures, or one in another place or of another shape.
    """
    if not root.is_dir():
        raise DataError(f"there is no folder {root}: paths are relative to the configuration that names them")
    files = sorted(file for file in root.rglob("*") if file.suffix.lower() in _ENDS and not file.is_dir())
    if not files:
        raise DataError(f"{root} holds no pictures: they end in {', '.join(_ENDS)}")
    folders = [file.relative_to(root).parts[:-1] for file in files]
    for file, parts in zip(files, folders, strict=True):
        if len(parts) != len(levels):
            raise DataError(f"{file} does not lie in {root}/{'/'.join(levels).upper()}/: move it, or correct data.source.labels")
    named = {level: [parts[i] for parts in folders] for i, level in enumerate(levels)}
    return Pictures(_pixels(files, shape), named["class"], named.get("client"))


def by_table(root: Path, table: Path, columns: Sequence[str], shape: Sequence[int]) -> Pictures:
    """Read the pictures that a table lists; its column `file` holds paths below the folder.

    Args:
        columns: `class`, `client`, or both.

    Raises:
        DataError: a missing picture or column, or a picture of another shape.
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
