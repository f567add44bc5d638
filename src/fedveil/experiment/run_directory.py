"""The run directory: its files and tables, in formats that other tools open, and its lock.

`history.csv` has one row per round; `layers.csv` one per round and layer; `clients.csv` one per evaluated round and client;
`participants.csv` one per round and participating client, if a method measures each of them; `failures.csv` one per client
that was left out of a round. `columns.json` declares the columns that the method added, so that a report can use their texts.

The public half of each record is in the first two tables at the top. The private half is in the folder `private`, under the same
names, and in the other tables. The halves are joined when they are read.
"""

from __future__ import annotations

import csv
import fcntl
import io
import json
import math
import os
import platform
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from fedveil import __version__
from fedveil.errors import ConfigError, LedgerError
from fedveil.experiment.given_paths import PRIVATE as PRIVATE
from fedveil.experiment.given_paths import SALT as SALT
from fedveil.experiment.given_paths import require_new, unbegun
from fedveil.federation.history import Columns, Record, Row, in_client_table
from fedveil.ledger.files import owner_only_folder, replace_whole
from fedveil.ledger.ledger import Ledger
from fedveil.registry import distributions_of
from fedveil.tasks.task import Column

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from fedveil.data.partition import Partition
    from fedveil.training.params import Layout


_locked: set[int] = set()


@contextmanager
def locked(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Lock the directory `path` for this run; the kernel releases the lock when the process ends, however it ends.

    Args:
        wait: wait until the lock is free.

    Raises:
        ConfigError: another run holds the lock, or the file system does not support locks.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ConfigError(
                f"another run is at work in {path}: wait until it has ended, or stop it; choose another --out for a run beside it"
            ) from None
        except OSError as problem:
            raise ConfigError(
                f"cannot lock {path} against a second run ({problem.strerror}): choose an --out on a local disk"
            ) from problem
        _locked.add(descriptor)
        yield
    finally:
        _locked.discard(descriptor)
        os.close(descriptor)


def _release_in_child() -> None:
    """Release the lock in a forked child, which would otherwise extend it: only the run itself holds it."""
    for descriptor in _locked:
        os.close(descriptor)
    _locked.clear()


os.register_at_fork(after_in_child=_release_in_child)


_LISTED_CLIENTS = 5000
"""Largest number of clients that `partition.json` lists."""
_PACKAGES = ("torch", "numpy", "scipy", "pydantic", "safetensors")


def create(path: Path) -> Path:
    """Create a run directory; refuse one with files, except those of a run that ended before its ledger was created."""
    require_new(path)
    path.mkdir(parents=True, exist_ok=True)
    return path


def holds_no_release(path: Path) -> bool:
    """Return whether a directory holds exactly the files of a run that ended before its first charge."""
    ledger = path / "ledger.sqlite"
    if not ledger.is_file():
        return path.is_dir() and unbegun(path)
    try:
        with Ledger.open(ledger, read_only=True) as charged:
            return len(charged) == 0
    except LedgerError:
        return False


def private_folder(path: Path) -> Path:
    """Return the private part of the run directory `path`, created if absent."""
    return owner_only_folder(path / PRIVATE)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: a draft, synced, then renamed; in the private folder readable by the owner only."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes as `write_text` does; on failure no draft remains to fill the disk."""
    replace_whole(path, content, private=path.parent.name == PRIVATE)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """Write the resolved configuration as TOML (`config.toml`), without keys that are None."""
    write_text(path, tomli_w.dumps(present(config)))


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON: infinities and NaN become strings."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def write_versions(path: Path, plugins: Mapping[str, str] | None = None) -> None:
    """Write the versions of packages that affect a result (`versions.json`), and each plugin's SHA-256 and distribution."""
    code = {f"plugin {name}": f"sha256 {digest}" for name, digest in (plugins or {}).items()}
    code |= {f"distribution {found.name}": found.version for found in distributions_of(plugins or ())}
    versions = {"fedveil": __version__, **{p: _version(p) for p in _PACKAGES}}
    write_json(path, {"python": sys.version.split()[0], "platform": platform.platform(), **versions, **code})


_version = cache(version)  # each call parses the package's whole description


def write_partition(path: Path, partition: Partition, labels: NDArray[np.int64], classes: int) -> None:
    """Write the label counts per client (`partition.json`), for evenly spaced clients if there are many."""
    counts, clients = partition.label_counts(labels, classes), len(partition)
    listed = np.unique(np.linspace(0, clients - 1, min(clients, _LISTED_CLIENTS)).round().astype(np.int64)).tolist()
    value = {
        "kind": partition.kind,
        "clients": clients,
        "sha256": partition.fingerprint(),
        "listed": listed,
        "counts": counts[listed].tolist(),
    }
    write_text(path, json.dumps(value) + "\n")


def write_model(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the model's tensors by name (`model.safetensors`)."""
    from safetensors.torch import save

    write_bytes(path, save({name: part.detach().contiguous().clone() for name, part in tensors.items()}))


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV with the columns of all of them."""
    write_text(path, _table_text(rows, _headers_of(rows)))


def _headers_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the columns of all rows, in the order of first occurrence."""
    return list(dict.fromkeys(key for row in rows for key in row))


def _table_text(rows: Sequence[Mapping[str, Any]], headers: Sequence[str], *, header: bool = True) -> str:
    """Return rows as the text of a CSV file, or without its header."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, headers)
    if header:
        writer.writeheader()
    writer.writerows({k: _cell(v) for k, v in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Return a CSV cell: None as empty, infinity as 1e999, which pandas, DuckDB and Python read as a number (unlike `inf`)."""
    if value is None:
        return ""
    return value if not isinstance(value, float) or not math.isinf(value) else f"{'-' if value < 0 else ''}1e999"


def plain(value: Any) -> Any:
    """Return `value` with infinities and NaN as strings, for strict JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def present(value: Any) -> Any:
    """Return `value` without None values, for TOML."""
    if isinstance(value, dict):
        return {k: present(v) for k, v in value.items() if v is not None}
    return value


csv.field_size_limit(1 << 30)  # the reasons of a round's failures are in one cell
TABLES = ("history.csv", "layers.csv", "clients.csv", "participants.csv", "failures.csv")
_SPLIT = {"history.csv": ("round",), "layers.csv": ("round", "layer")}
"""Tables that both halves have, with the columns that join their rows; the others are entirely private."""
DECLARED = "columns.json"


def write_history(folder: Path, history: Sequence[Record], layout: Layout, columns: Columns | None = None) -> None:
    """Write the whole history, and the declarations of the method's columns."""
    columns = columns or Columns()
    if columns.own:
        write_json(folder / DECLARED, [asdict(column) for column in columns.own])
    for path, rows in _files(folder, history, layout, columns).items():
        write_text(path, _table_text(rows, _headers_of(rows)))


def append_history(folder: Path, history: Sequence[Record], layout: Layout, columns: Columns | None = None) -> None:
    """Append the last round to the tables of earlier rounds; a table that gets new columns is rewritten."""
    columns = columns or Columns()
    for path, rows in _files(folder, history[-1:], layout, columns).items():
        if not _appended(path, rows):
            whole = _files(folder, history, layout, columns)[path]
            write_text(path, _table_text(whole, _headers_of(whole)))


def parse_columns(text: str) -> Columns:
    """Return the columns that a run declared; an older run directory has no such file, so its columns get defaults.

    Raises:
        ValueError: not a list of columns.
    """
    try:
        return Columns(_declared(values) for values in json.loads(text))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _declared(values: dict[str, Any]) -> Column:
    """Return a declared column; version 0.1 declared which columns are private, not which are public."""
    if "private" in values:
        values = {**values, "public": not values["private"]}
        del values["private"]
    return Column(**values)


def parse_table(name: str, text: str, columns: Columns) -> list[Row]:
    """Return the rows of a table's text: indices as int, numbers as float, texts as str, and empty cells as None.

    Raises:
        ValueError: a cell is not of that type, a row is longer than the header, or a column that joins rows is missing.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if (names := list(reader.fieldnames or ())) and len(set(names)) < len(names):
        raise ValueError("a column stands twice in its header")
    columns_of = {header: _column(name, header, columns) for header in reader.fieldnames or ()}
    if columns_of and (missing := [key for key in _SPLIT.get(name, ()) if key not in columns_of]):
        raise ValueError(f"it has no column {missing[0]!r}")
    rows = []
    for row in reader:
        if None in row:
            raise ValueError(f"line {reader.line_num} has more cells than the header")
        rows.append({header: _parsed(columns_of[header], cell) for header, cell in row.items()})
    return rows


def joined(table: str, public: Sequence[Row], private: Sequence[Row]) -> list[Row]:
    """Return the rows of a table joined with their private part; private tables are in one place, in version 0.1 at the top."""
    if table not in _SPLIT or not (public or table == "history.csv"):
        return [*(private or public)]
    more = {_key(table, row): row for row in private}
    joined_rows = [row | more.pop(_key(table, row), {}) for row in public]
    rest = more.values() if table != "history.csv" else ()  # rounds by layer without public values
    return sorted([*joined_rows, *rest], key=lambda row: row["round"])


def _key(table: str, row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in _SPLIT[table])


def _column(table: str, header: str, columns: Columns) -> Column:
    """Return the column for a header of a table."""
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
    """Return a record that a checkpoint of version 0.2 holds as one row, split into halves as in the run directory."""
    if len(record.public) > 1:
        return record
    public = {"round"}
    for name in _SPLIT:
        if (folder / name).is_file():
            headers = next(csv.reader(io.StringIO((folder / name).read_text(encoding="utf-8"), newline="")), [])
            public |= {_column(name, header, columns).name for header in headers}
    return Record({k: v for k, v in record.items() if k in public}, {k: v for k, v in record.items() if k not in public})


def _files(folder: Path, history: Sequence[Record], layout: Layout, columns: Columns) -> dict[Path, list[Row]]:
    """Return the rows of each file that has any."""
    private = _tables([{"round": record["round"], **record.private} for record in history], layout, columns)
    files = {private_folder(folder) / name: rows for name, rows in private.items() if any(len(row) > 1 for row in rows)}
    return files | {folder / name: rows for name, rows in _tables([r.public for r in history], layout, columns).items()}


def _tables(history: Sequence[Row], layout: Layout, columns: Columns) -> dict[str, list[Row]]:
    """Return the rows of each table that has any."""
    rows = [
        [_round_row(row) for row in history],
        [cells for row in history for cells in _layer_rows(row, layout, columns)],
        [cells for row in history for cells in _client_rows(row, columns)],
        [{"round": row["round"], **cells} for row in history for cells in row.get("by_client", [])],
        [{"round": row["round"], "client": c, "failure": why} for row in history for c, why in row.get("failures", {}).items()],
    ]
    return {name: found for name, found in zip(TABLES, rows, strict=True) if found}


def _round_row(row: Row) -> Row:
    """Return the numbers and texts of a round, and who was left out and why."""
    cells = {k: v for k, v in row.items() if not isinstance(v, list | dict)}
    if not row.get("failures"):
        return cells
    return {**cells, "failures": "; ".join(f"{client}: {why}" for client, why in row["failures"].items())}


def _layer_rows(row: Row, layout: Layout, columns: Columns) -> list[Row]:
    """Return one row per layer with the record's per-layer values."""
    cells = layer_cells(row, len(layout), columns)
    if not cells:
        return []
    return [
        {"round": row["round"], "layer": name, **{column.header: values[i] for column, values in cells.items()}}
        for i, name in enumerate(layout.names)
    ]


def layer_cells(row: Row, layers: int, columns: Columns) -> dict[Column, list[float]]:
    """Return the columns of a row that hold a number for each of so many layers."""
    lists = {columns.of(k, v): v for k, v in row.items() if isinstance(v, list) and k != "by_client"}
    return {column: values for column, values in lists.items() if column.kind == "layer" and len(values) == layers}


def _client_rows(row: Row, columns: Columns) -> list[Row]:
    """Return one row per client of an evaluated round; without personal models they have no column."""
    by_header = {in_client_table(name): values for name, values in row.items() if columns[name].kind == "client" and values}
    clients = len(next(iter(by_header.values()), []))
    return [{"round": row["round"], "client": i, **{header: v[i] for header, v in by_header.items()}} for i in range(clients)]


def _appended(path: Path, rows: Sequence[Row]) -> bool:
    """Append the rows to a table on disk; return False if it does not exist or lacks their columns."""
    try:
        with path.open("r+", newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
            if fits := set(_headers_of(rows)) <= set(header):
                file.seek(0, os.SEEK_END)
                file.write(_table_text(rows, header, header=False))
            return fits
    except FileNotFoundError:
        return False


def new_run_id() -> str:
    """Return a fresh random name of a run."""
    return uuid.uuid4().hex[:12]
