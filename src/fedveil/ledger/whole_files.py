"""Files that are written whole or not at all: a disk that is full takes nothing of what was there before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from fedveil.ledger.owner_only import owner_only

DRAFT = ".part"
"""How the name of a file ends while it is written; what is left of a killed run may have it."""


def replace_whole(
    path: Path, content: bytes | Iterable[bytes | memoryview], *, private: bool = False, sync: Callable[[int], None] | None = None
) -> None:
    """Write beside it, sync and rename; on failure no draft is left to fill the disk.

    Args:
        content: all of it, or its parts in order. private: for its owner alone (mode 600).
        sync: waits until an open file is on the disk; left out, `os.fsync`.

    Raises:
        OSError: it cannot be written, with its name; what was there before still is.
    """
    draft = path.with_name(path.name + DRAFT)
    try:
        with open(draft, "wb", opener=owner_only if private else None) as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            (sync or os.fsync)(file.fileno())
        draft.replace(path)
    except OSError as problem:
        with suppress(OSError):
            draft.unlink()
        problem.filename = problem.filename or str(path)  # the system names none where there is no room
        raise


def reserve(path: Path, size: int) -> None:
    """Take so many bytes of the disk for a file of its owner that `replace_reserved` writes; on failure nothing is left.

    Raises:
        OSError: there is no room.
    """
    draft = path.with_name(path.name + DRAFT)
    try:
        with open(draft, "wb", opener=owner_only) as file:
            os.posix_fallocate(file.fileno(), 0, size) if hasattr(os, "posix_fallocate") else file.write(bytes(size))
            file.flush()
            os.fsync(file.fileno())
    except OSError as problem:
        with suppress(OSError):
            draft.unlink()
        problem.filename = problem.filename or str(path)
        raise


def replace_reserved(path: Path, content: Iterable[bytes | memoryview], sync: Callable[[int], None]) -> None:
    """As `replace_whole`, into the room that was reserved, if any was; the file is its owner's alone.

    Raises:
        OSError: it cannot be written, with its name.
    """
    draft = path.with_name(path.name + DRAFT)
    try:
        draft.touch(mode=0o600)
        with open(draft, "r+b") as file:
            file.writelines(content)
            file.truncate()
            file.flush()
            sync(file.fileno())
        draft.replace(path)
    except OSError as problem:
        problem.filename = problem.filename or str(path)
        raise


def write_output(path: Path, content: bytes, *, private: bool = False) -> None:
    """As `replace_whole`, to where a user wants it: links are followed, and a pipe or a device is written as it is.

    Raises:
        OSError: it cannot be written there.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        replace_whole(Path(os.path.realpath(path)), content, private=private)
