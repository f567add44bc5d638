"""The history on disk: the tables of a run directory, written and read here and nowhere else.

`history.csv` has one row a round; `layers.csv` one a round and layer; `clients.csv` one an evaluated round and client;
`participants.csv` one a round and client that took part, where a method measures each of them; `failures.csv` one a client that
was left out of a round. `columns.json` declares the columns that the method added, so that a report takes their words from it.

The public half of each record lies at the top, in the first two; the private half lies in the folder `private`, under the same
names and in the other tables. They are joined when they are read.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedveil.federation.history import Columns, Record, Row, in_client_table
from fedveil.run.run_directory import headers_of, private_folder, table_text, write_json, write_text
from fedveil.tasks.column import Column

if TYPE_CHECKING:
    from fedveil.training.params import Layout

csv.field_size_limit(1 << 30)  # the reasons of a round's failures stand in one cell
TABLES = ("history.csv", "layers.csv", "clients.csv", "participants.csv", "failures.csv")
_SPLIT = {"history.csv": ("round",), "layers.csv": ("round", "layer")}
"""The tables that both halves have, and what their rows are joined by; the others are wholly private."""
DECLARED = "columns.json"


def write_history(folder: Path, history: Sequence[Record], layout: Layout, columns: Columns | None = None) -> None:
    """Write the whole history, and the declarations of the method's own columns."""
    columns = columns or Columns()
    if columns.own:
        write_json(folder / DECLARED, [asdict(column) for column in columns.own])
    for path, rows in _files(folder, history, layout, columns).items():
        write_text(path, table_text(rows, headers_of(rows)))


def append_history(folder: Path, history: Sequence[Record], layout: Layout, columns: Columns | None = None) -> None:
    """Add the last round to the tables, which hold the rounds before it; a table that gets new columns is written anew."""
    columns = columns or Columns()
    for path, rows in _files(folder, history[-1:], layout, columns).items():
        if not _appended(path, rows):
            whole = _files(folder, history, layout, columns)[path]
            write_text(path, table_text(whole, headers_of(whole)))


def parse_columns(text: str) -> Columns:
    """The columns that a run declared; an older run directory has no such file, and its own columns get defaults.

    Raises:
        ValueError: not a list of columns.
    """
    try:
        return Columns(_declared(values) for values in json.loads(text))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _declared(values: dict[str, Any]) -> Column:
    """Version 0.1 declared which columns are private, not which are public."""
    if "private" in values:
        values = {**values, "public": not values["private"]}
        del values["private"]
    return Column(**values)


def parse_table(name: str, text: str, columns: Columns) -> list[Row]:
    """The rows of a table's text: its indices as int, numbers as float, texts as str, and absent values as None.

    Raises:
        ValueError: a cell is not of that type, a row is longer than the header, or what its rows are joined by is missing.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if (names := list(reader.fieldnames or ())) and len(set(names)) < len(names):
        raise ValueError("a column stands twice in its header")
    held = {header: _column(name, header, columns) for header in reader.fieldnames or ()}
    if held and (missing := [key for key in _SPLIT.get(name, ()) if key not in held]):
        raise ValueError(f"it has no column {missing[0]!r}")
    rows = []
    for row in reader:
        if None in row:
            raise ValueError(f"line {reader.line_num} has more cells than the header")
        rows.append({header: _parsed(held[header], cell) for header, cell in row.items()})
    return rows


def joined(table: str, public: Sequence[Row], private: Sequence[Row]) -> list[Row]:
    """The rows of a table with what is private of them; every other lies in one place, in version 0.1 at the top."""
    if table not in _SPLIT or not (public or table == "history.csv"):
        return [*(private or public)]
    more = {_key(table, row): row for row in private}
    found = [row | more.pop(_key(table, row), {}) for row in public]
    rest = more.values() if table != "history.csv" else ()  # rounds by layer of which nothing is public
    return sorted([*found, *rest], key=lambda row: row["round"])


def _key(table: str, row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _SPLIT[table])


def _column(table: str, header: str, columns: Columns) -> Column:
    """What a header of a table stands for."""
    if table == "clients.csv":
        by_client = (column for column in columns.values() if column.kind == "client")
        return next((column for column in by_client if in_client_table(column.name) == header), columns[header])
    by_layer = table == "layers.csv" and columns[header].kind == "number"
    return columns.by_layer(header) if by_layer else columns[header]


def _parsed(column: Column, text: str | None) -> int | float | str | None:
    if text is None or text == "":
        return None
    if column.kind == "text":
        return text
    if column.kind == "index":
        return int(text)
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"{column.name} is {text!r}, not a number") from None
    return None if math.isnan(number) else number


def as_written(folder: Path, record: Record, columns: Columns) -> Record:
    """Return a record that a checkpoint of version 0.2 holds as one row, in the halves in which the run directory holds it."""
    if len(record.public) > 1:
        return record
    shown = {"round"}
    for name in _SPLIT:
        if (folder / name).is_file():
            headers = next(csv.reader(io.StringIO((folder / name).read_text(encoding="utf-8"), newline="")), [])
            shown |= {_column(name, header, columns).name for header in headers}
    return Record({k: v for k, v in record.items() if k in shown}, {k: v for k, v in record.items() if k not in shown})


def _files(folder: Path, history: Sequence[Record], layout: Layout, columns: Columns) -> dict[Path, list[Row]]:
    """The rows of each file that has any."""
    private = _tables([{"round": record["round"], **record.private} for record in history], layout, columns)
    found = {private_folder(folder) / name: rows for name, rows in private.items() if any(len(row) > 1 for row in rows)}
    return found | {folder / name: rows for name, rows in _tables([r.public for r in history], layout, columns).items()}


def _tables(history: Sequence[Row], layout: Layout, columns: Columns) -> dict[str, list[Row]]:
    """The rows of each table that has any."""
    rows = [
        [_round_row(row) for row in history],
        [cells for row in history for cells in _layer_rows(row, layout, columns)],
        [cells for row in history for cells in _client_rows(row, columns)],
        [{"round": row["round"], **cells} for row in history for cells in row.get("by_client", [])],
        [{"round": row["round"], "client": c, "failure": why} for row in history for c, why in row.get("failures", {}).items()],
    ]
    return {name: found for name, found in zip(TABLES, rows, strict=True) if found}


def _round_row(row: Row) -> Row:
    """The numbers and texts of a round, and who was left out and why."""
    cells = {k: v for k, v in row.items() if not isinstance(v, list | dict)}
    if not row.get("failures"):
        return cells
    return {**cells, "failures": "; ".join(f"{client}: {why}" for client, why in row["failures"].items())}


def _layer_rows(row: Row, layout: Layout, columns: Columns) -> list[Row]:
    """One row a layer of everything in the record that is by layer."""
    found = layer_cells(row, len(layout), columns)
    if not found:
        return []
    return [
        {"round": row["round"], "layer": name, **{column.header: values[i] for column, values in found.items()}}
        for i, name in enumerate(layout.names)
    ]


def layer_cells(row: Row, layers: int, columns: Columns) -> dict[Column, list[float]]:
    """The columns of a row that hold a number for each of so many layers."""
    lists = {columns.of(k, v): v for k, v in row.items() if isinstance(v, list) and k != "by_client"}
    return {column: values for column, values in lists.items() if column.kind == "layer" and len(values) == layers}


def _client_rows(row: Row, columns: Columns) -> list[Row]:
    """One row a client of an evaluated round; without personal models there is no column of them."""
    held = {in_client_table(name): values for name, values in row.items() if columns[name].kind == "client" and values}
    clients = len(next(iter(held.values()), []))
    return [{"round": row["round"], "client": i, **{header: v[i] for header, v in held.items()}} for i in range(clients)]


def _appended(path: Path, rows: Sequence[Row]) -> bool:
    """Whether the rows could be added to a table on disk: it is there, and has their columns."""
    try:
        with path.open("r+", newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
            if fits := set(headers_of(rows)) <= set(header):
                file.seek(0, os.SEEK_END)
                file.write(table_text(rows, header, header=False))
            return fits
    except FileNotFoundError:
        return False
