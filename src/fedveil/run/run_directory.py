"""The run directory: what a run leaves behind, in formats that other tools open as they are."""

from __future__ import annotations

import csv
import io
import json
import math
import platform
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tomli_w

from fedveil import __version__
from fedveil.errors import ConfigError, LedgerError
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.ledger_head import head_path, read_head
from fedveil.ledger.owner_only import owner_only_folder
from fedveil.ledger.whole_files import DRAFT, replace_whole

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from fedveil.data.partition import Partition

PRIVATE = "private"
"""The subfolder of what is computed from private data without noise: mode 700, its files 600."""
SALT = "salt"
"""32 random bytes in the private folder, with which digests are keyed that are published."""
_FIRST = ("versions.json", "config.toml", "statement.json", "statement.md", PRIVATE, "data.json")
"""What a run writes before its ledger, with which it can be resumed."""
_FIRST_PRIVATE = (SALT, "partition.json")
LISTED_CLIENTS = 5000
"""The largest number of clients that `partition.json` lists."""
PACKAGES = ("torch", "numpy", "scipy", "pydantic", "safetensors")


def create(path: Path) -> Path:
    """Make a run directory; refuses one that holds anything but what a run leaves that ends before its ledger is there."""
    if path.exists() and not (path.is_dir() and _unbegun(path)):
        there = f"; an interrupted run there goes on with --resume {path}" if _is_interrupted(path) else ""
        raise ConfigError(f"{path} exists and is not empty: a run never writes over another; choose another --out{there}")
    path.mkdir(parents=True, exist_ok=True)
    return path


def holds_no_release(path: Path) -> bool:
    """Whether a directory has just what a run leaves that ends before its first charge."""
    ledger = path / "ledger.sqlite"
    if not ledger.is_file():
        return path.is_dir() and _unbegun(path)
    try:
        with Ledger.open(ledger, read_only=True) as charged:
            return len(charged) == 0
    except LedgerError:
        return False


def _is_interrupted(path: Path) -> bool:
    there = [(path / name).exists() for name in ("config.toml", "ledger.sqlite", "summary.json", "flower.md")]
    return there == [True, True, False, False]  # the run of a Flower app is not resumed


def _says_none(ledger: Path) -> bool:
    """Whether a ledger's head is there, and of a ledger without releases."""
    try:
        return head_path(ledger).is_file() and not read_head(ledger)[0]
    except LedgerError:  # somebody else's file
        return False


def _unbegun(path: Path) -> bool:
    """Whether a run that writes _FIRST in this order left them, whole or as drafts; a user's own config.toml alone is none."""
    known = _names(path)
    ledger = path / "ledger.sqlite"
    if not ledger.exists() and _says_none(ledger):  # the ledger's head comes first
        known.discard(head_path(ledger).name)
    return known <= set(_FIRST) and (not known or _FIRST[0] in known) and _names(path / PRIVATE) <= set(_FIRST_PRIVATE)


def _names(folder: Path) -> set[str]:
    """What lies in a folder, drafts under their names to be; nothing where there is none."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    return {name.removesuffix(DRAFT) for name in names if not name.startswith(".ledger.sqlite-")}


def private_folder(path: Path) -> Path:
    """The private part of the run directory `path`, made if it is absent."""
    return owner_only_folder(path / PRIVATE)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: beside it, synced, renamed; in the private folder for its owner alone."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """As `write_text`; on failure no draft is left to fill the disk."""
    replace_whole(path, content, private=path.parent.name == PRIVATE)


def write_config(path: Path, config: Mapping[str, Any]) -> None:
    """The resolved configuration as TOML (`config.toml`), without what was left open."""
    write_text(path, tomli_w.dumps(present(config)))


def write_json(path: Path, value: Any) -> None:
    """Strict JSON: infinities and NaN become strings."""
    write_text(path, json_text(value))


def json_text(value: Any) -> str:
    return json.dumps(plain(value), indent=2, allow_nan=False) + "\n"


def write_versions(path: Path, plugins: Mapping[str, str] | None = None) -> None:
    """Versions of what decides a result (`versions.json`), and the SHA-256 of each plugin."""
    own = {f"plugin {name}": f"sha256 {digest}" for name, digest in (plugins or {}).items()}
    known = {"fedveil": __version__, **{p: _version(p) for p in PACKAGES}}
    write_json(path, {"python": sys.version.split()[0], "platform": platform.platform(), **known, **own})


_version = cache(version)  # each call parses the package's whole description


def write_partition(path: Path, partition: Partition, labels: NDArray[np.int64], classes: int) -> None:
    """Who holds how much of what (`partition.json`): a row of label counts a client, for evenly spaced ones if there are many."""
    counts, clients = partition.label_counts(labels, classes), len(partition)
    listed = np.unique(np.linspace(0, clients - 1, min(clients, LISTED_CLIENTS)).round().astype(np.int64)).tolist()
    value = {
        "kind": partition.kind,
        "clients": clients,
        "sha256": partition.fingerprint(),
        "listed": listed,
        "counts": counts[listed].tolist(),
    }
    write_text(path, json.dumps(value) + "\n")


def write_model(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The model's tensors by name (`model.safetensors`)."""
    from safetensors.torch import save

    write_bytes(path, save({name: part.detach().contiguous().clone() for name, part in tensors.items()}))


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as CSV with the columns of all of them."""
    write_text(path, table_text(rows, headers_of(rows)))


def headers_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of all rows, in the order in which they first occur."""
    return list(dict.fromkeys(key for row in rows for key in row))


def table_text(rows: Sequence[Mapping[str, Any]], headers: Sequence[str], *, header: bool = True) -> str:
    """Rows as the text of a CSV file, or without its first line."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, headers)
    if header:
        writer.writeheader()
    writer.writerows({k: _cell(v) for k, v in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Nothing as nothing; infinity as 1e999, which pandas, DuckDB and Python read as a number (DuckDB takes `inf` for a date)."""
    if value is None:
        return ""
    return value if not isinstance(value, float) or not math.isinf(value) else f"{'-' if value < 0 else ''}1e999"


def plain(value: Any) -> Any:
    """`value` with everything that strict JSON lacks spelled out."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value


def present(value: Any) -> Any:
    """`value` without what is None, for TOML."""
    if isinstance(value, dict):
        return {k: present(v) for k, v in value.items() if v is not None}
    return value
