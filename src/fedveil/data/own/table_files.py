"""Tables in files, as dicts of columns."""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import DataError

Array = NDArray[Any]


def read_table(file: Path, columns: Collection[str], texts: Collection[str] = ()) -> Any:
    """A table from a file, read as its name ends.

    Args:
        columns: those that are needed; others are not looked at.
        texts: columns that are text, whatever they look like, such as ids with leading zeros.

    Raises:
        DataError: it cannot be read, or lacks a column.
    """
    return _reader(file)(file, columns, texts)


def read_rows(file: Path, columns: Collection[str], texts: Collection[str] = ()) -> Iterator[Any]:
    """Each row as a table of its own: what one holds has no bearing on how another is read. Arguments as `read_table`.

    In a file that is read together a text among numbers makes text of all of them, and a row that is too long an error. Here the
    cells of such a row are missing.

    Raises:
        DataError: the file cannot be read, or lacks a column.
    """
    if _reader(file) is _parquet:
        table = _parquet(file, columns, texts)
        yield from (table.slice(i, 1) for i in range(len(table)))
        return
    header, rows = _cells(file, errors="replace")
    _need(file, header, columns)
    for row in rows:
        known = dict(zip(header, row if len(row) == len(header) else [""] * len(header), strict=True))
        yield {name: _parsed([known[name]], name in texts) for name in columns}


def _reader(file: Path) -> Callable[[Path, Collection[str], Collection[str]], Any]:
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        raise DataError(f"{file}: a table ends in {', '.join(READERS)}: save it as one of them")
    if not file.is_file():
        raise DataError(f"there is no file {file}: paths are relative to the configuration that names them")
    return reader


def _cells(file: Path, errors: str = "strict") -> tuple[list[str], list[list[str]]]:
    """The header and the rows below it; errors: what to do with bytes that are no UTF-8, as `open` does it."""
    try:
        with open(file, newline="", encoding="utf-8-sig", errors=errors) as lines:
            rows = list(csv.reader(lines, delimiter="\t" if file.suffix.lower() == ".tsv" else ","))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{file} cannot be read as a table in UTF-8: {error}") from None
    rows = [row for row in rows if row]
    if len(rows) < 2:
        raise DataError(f"{file} has no rows below its header: the first line names the columns")
    return rows[0], rows[1:]


def _csv(file: Path, columns: Collection[str], texts: Collection[str]) -> dict[str, Array]:
    header, rows = _cells(file)
    _need(file, header, columns)
    wrong = next((i for i, row in enumerate(rows) if len(row) != len(header)), None)
    if wrong is not None:
        raise DataError(
            f"{file}: row {wrong + 1} has {len(rows[wrong])} values for {len(header)} columns: quote values that hold commas"
        )
    return {name: _parsed([row[i] for row in rows], name in texts) for i, name in enumerate(header) if name in columns}


def _parsed(cells: list[str], text: bool) -> Array:
    """Numbers where all cells that are not empty are numbers; what is empty is missing."""
    values: list[Any] = [cell.strip() or None for cell in cells]
    if not text:
        try:
            return np.array([np.nan if value is None else float(value) for value in values])
        except ValueError:
            pass
    found = np.empty(len(values), dtype=object)
    found[:] = values
    return found


def _parquet(file: Path, columns: Collection[str], texts: Collection[str]) -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{file}: reading Parquet needs pyarrow: pip install 'fedveil[parquet]'") from None
    try:
        _need(file, pyarrow.parquet.read_schema(file).names, columns)
        return pyarrow.parquet.read_table(file, columns=list(columns))
    except (OSError, ValueError) as error:
        raise DataError(f"{file} cannot be read as Parquet: {error}") from None


def _need(file: Path, header: list[str], columns: Collection[str]) -> None:
    for name in columns:
        if header.count(name) != 1:
            raise DataError(
                f"{file} has {'no' if name not in header else 'more than one'} column {name!r}; it has {', '.join(header)}"
            )


READERS: dict[str, Callable[[Path, Collection[str], Collection[str]], Any]] = {
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
"""By the end of the file's name."""
