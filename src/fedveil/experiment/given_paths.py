"""Paths that a user gives: a configuration file, a run directory, a directory to write.

These checks import next to nothing, so that a wrong path is named at once.
"""

from __future__ import annotations

import os
from pathlib import Path

from fedveil.errors import ConfigError, LedgerError
from fedveil.ledger.files import DRAFT, head_path, read_head

PRIVATE = "private"
"""Subfolder for data computed from private data without noise: mode 700, its files 600."""
SALT = "salt"
"""File with 32 random bytes in the private folder, with which published digests are keyed."""
_FIRST = ("versions.json", "config.toml", "statement.json", "statement.md", PRIVATE, "data.json")
"""Files that a run writes before its ledger, from which it can be resumed."""
_FIRST_PRIVATE = (SALT, "partition.json")

_LEFT_BY_RUNS = ("versions.json", "statement.json", "ledger.sqlite")


def is_run(folder: Path) -> bool:
    """Return whether a folder holds a run's files, so that its configuration may be a stranger's."""
    return any((folder / name).exists() for name in _LEFT_BY_RUNS)


def require_configuration(path: Path) -> None:
    """Refuse a path at which no configuration file can be.

    Raises:
        ConfigError: nothing is there, or a folder is.
    """
    if path.is_dir():
        inside = path / "config.toml"
        hint = f"give {inside}" if inside.is_file() else "give a TOML file"
        raise ConfigError(f"{path} is a folder, and a configuration is wanted here: {hint}")
    require_exists(path, "cannot read the configuration {}")


def require_exists(path: Path, what: str) -> None:
    """Refuse a path at which nothing is; `what` is the message, with {} for the path."""
    try:
        path.stat()
    except OSError as error:
        raise ConfigError(f"{what.format(path)}: {error.strerror}") from None


def require_run(path: Path) -> None:
    """Refuse a path that is not a run directory.

    Raises:
        ConfigError: nothing is there, or something else.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist, so it is not a run directory: give one that `fedveil run` left")
    if not (path / "config.toml").is_file() or not is_run(path):
        raise ConfigError(f"{path} is not a run directory: give one that `fedveil run` left")


def require_one_run(path: Path) -> None:
    """Refuse a path that is not the directory of one run, or of twins.

    Raises:
        ConfigError: nothing is there, something else, or a grid of runs.
    """
    if (path / "grid.json").is_file():
        pages = [str(path / name) for name in ("compare.html", "runs.html") if (path / name).is_file()]
        where = f"its pages are {' and '.join(pages)}; its" if pages else "its"
        raise ConfigError(f"{path} holds a grid of runs; give one run: {where} run directories lie under {path / 'cells'}")
    if not path.exists():
        raise ConfigError(f"{path} does not exist, so it is not a run directory: give one that `fedveil run` left")
    if not (path / "config.toml").is_file():
        raise ConfigError(f"{path} is not a run directory (it has no config.toml): give one that `fedveil run` left")


def require_begun(path: Path) -> None:
    """Refuse a directory that holds no interrupted run.

    Raises:
        ConfigError: there is no run, or the run has ended.
    """
    ledger = path / "ledger.sqlite"
    if not (path / "config.toml").is_file() or not (ledger.exists() or head_path(ledger).exists()):
        raise ConfigError(f"{path} holds no run: there is nothing to resume; start one with `fedveil run` and another --out")
    if (path / "summary.json").exists():
        raise ConfigError(f"the run in {path} has ended (see summary.json): nothing to resume")


def require_output(path: Path) -> None:
    """Refuse a path that cannot be written, because the nearest folder above it that exists is a file or is protected.

    Raises:
        ConfigError: nothing can be written there.
    """
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        reason = "is protected" if above.is_dir() else "is a file"
        raise ConfigError(f"cannot write {path}: {above} {reason}; choose another path")


def require_output_folder(path: Path) -> None:
    """Refuse a folder that cannot be written.

    Raises:
        ConfigError: a file is there, or nothing can be written there.
    """
    if path.exists() and not path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a file, and a folder is wanted here; choose another path")
    require_output(path)


def require_grid(path: Path) -> None:
    """Refuse a folder in which no grid of runs can begin or continue.

    Raises:
        ConfigError: the folder cannot be written, or holds files but no grid.
    """
    require_output_folder(path)
    if path.is_dir() and not (path / "grid.json").exists() and any(not p.name.startswith("grid.") for p in path.iterdir()):
        raise ConfigError(f"{path} is not empty and holds no grid: choose another --out")


def require_new(path: Path) -> None:
    """Refuse a directory with files, except those of a run that ended before its ledger was created.

    Raises:
        ConfigError: something else is there.
    """
    if path.exists() and not (path.is_dir() and unbegun(path)):
        hint = f"; resume an interrupted run with --resume {path}" if _is_interrupted(path) else ""
        raise ConfigError(f"{path} exists and is not empty: a run never writes over another; choose another --out{hint}")


def _is_interrupted(path: Path) -> bool:
    exists = [(path / name).exists() for name in ("config.toml", "ledger.sqlite", "summary.json", "flower.md", "nvflare.md")]
    return exists == [True, True, False, False, False]  # the run of a Flower app cannot be resumed


def _says_none(ledger: Path) -> bool:
    """Return whether a ledger's head exists and states that there are no releases."""
    try:
        return head_path(ledger).is_file() and not read_head(ledger)[0]
    except LedgerError:  # a foreign file
        return False


def unbegun(path: Path) -> bool:
    """Return whether all files were left by an early end, in the order of _FIRST; a user's own config.toml does not count."""
    names = _names(path)
    ledger = path / "ledger.sqlite"
    if not ledger.exists() and _says_none(ledger):  # the ledger's head is written before it
        names.discard(head_path(ledger).name)
    return names <= set(_FIRST) and (not names or _FIRST[0] in names) and _names(path / PRIVATE) <= set(_FIRST_PRIVATE)


def _names(folder: Path) -> set[str]:
    """Return the file names in a folder, drafts under their final names; empty if it does not exist."""
    names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    return {name.removesuffix(DRAFT) for name in names if not name.startswith(".ledger.sqlite-")}
