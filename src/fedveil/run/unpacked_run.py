"""A run directory out of a zip that a stranger made: once, into a folder of its own, and never more than a limit."""

from __future__ import annotations

import stat
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from fedveil.errors import ConfigError

MOST_BYTES, MOST_FILES = 4 << 30, 10_000
"""What is unpacked at most; a zip of a few kilobytes can hold petabytes."""
_BROKEN = (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, RuntimeError, EOFError)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The run directory in a zip, for as long as it is needed.

    Raises:
        ConfigError: no zip, a broken one, one over the limits or with doubtful names, or not one run in it.
    """
    with tempfile.TemporaryDirectory(prefix="fedveil-run-") as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                _check(path, archive.infolist())
                archive.extractall(folder)
        except _BROKEN as problem:
            raise ConfigError(f"{path} is neither a run directory nor a zip of one ({problem})") from None
        ledgers = list(Path(folder).rglob("ledger.sqlite"))
        if len(ledgers) != 1:
            raise ConfigError(f"{path} holds {len(ledgers)} ledgers (ledger.sqlite): a zip of one run directory has one")
        yield ledgers[0].parent


def _check(path: Path, entries: list[zipfile.ZipInfo]) -> None:
    """Refuse, before anything is written, what is too large, or what is not the same files to everybody who unpacks it."""
    size = sum(entry.file_size for entry in entries)
    if size > MOST_BYTES or len(entries) > MOST_FILES:
        raise ConfigError(
            f"{path} would unpack to {size:,} bytes in {len(entries):,} files, and at most {MOST_BYTES:,} bytes in "
            f"{MOST_FILES:,} files are unpacked: unpack it yourself and give the directory"
        )
    seen = set[str]()
    for entry in entries:
        name = PurePosixPath(entry.filename.replace("\\", "/"))
        if name.is_absolute() or ".." in name.parts or ":" in entry.filename or stat.S_ISLNK(entry.external_attr >> 16):
            raise ConfigError(f"{path} holds {entry.filename!r}, a link or a path out of its folder: nothing was unpacked")
        if (folded := str(name).casefold()) in seen:
            raise ConfigError(
                f"{path} holds {entry.filename!r} twice: nothing was unpacked, since programs differ in which they take"
            )
        seen.add(folded)
