"""Atomic writes, private files, and the head of a ledger.

A charge commits to the database, raises the head, and then releases, so that at any moment
    releases made <= head <= rows in the database
A database with fewer rows than the head has lost rows, for instance by a deleted log, an older copy or a truncated file.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from fedveil.errors import LedgerError


def owner_only(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=owner_only)`; a new file gets mode 600."""
    return os.open(path, flags, 0o600)


def owner_only_folder(path: Path) -> Path:
    """Return the folder `path`, created with mode 700 if it is absent."""
    path.mkdir(mode=0o700, exist_ok=True)
    return path


DRAFT = ".part"
"""Suffix of a file name while the file is being written; a killed run may leave such files."""


def replace_whole(
    path: Path, content: bytes | Iterable[bytes | memoryview], *, private: bool = False, sync: Callable[[int], None] | None = None
) -> None:
    """Replace a file atomically: write a draft next to it, sync and rename; a failed draft is deleted.

    Args:
        content: the bytes, or their parts in order. private: readable by its owner only (mode 600).
        sync: waits until an open file is on the disk; by default `os.fsync`.

    Raises:
        OSError: the file cannot be written; it names the file, whose earlier content remains.
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
        problem.filename = problem.filename or str(path)  # the system names no file when the disk is full
        raise


def reserve(path: Path, size: int) -> None:
    """Reserve `size` bytes on the disk for a private file that `replace_reserved` will write; on failure no draft remains.

    Raises:
        OSError: the disk is full.
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
    """Replace a private file like `replace_whole`, using the space that `reserve` took, if any.

    Raises:
        OSError: the file cannot be written; it names the file.
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
    """Write to a path given by the user: like `replace_whole`, but following links, and writing pipes and devices directly.

    Raises:
        OSError: the path cannot be written.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        replace_whole(Path(os.path.realpath(path)), content, private=private)


_NONE = "0" * 64


def head_path(path: Path) -> Path:
    """Return the path of the head file of the ledger at `path`."""
    return path.with_name(path.name + "-head")


def head_record(seq: int, digest: str = _NONE) -> bytes:
    """Return the content of the head file, always 106 bytes: number of releases and digest of the last one (zeros if none)."""
    return f"fedveil ledger head {seq:020d} {digest}\n".encode()


def read_head(path: Path) -> tuple[int, str]:
    """Return a lower bound on the number of releases and that release's digest; raise LedgerError for an unreadable head."""
    head = head_path(path)
    try:
        descriptor = os.open(head, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe would block until there is a writer
    except OSError as problem:
        raise LedgerError(
            f"{head} cannot be read ({problem.strerror}), so lost releases could not be noticed: copy it together with "
            f"{path.name} (and {path.name}-wal if there is one); if it is gone for good, count the budget as spent"
        ) from problem
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        return _parse(descriptor, head)
    finally:
        os.close(descriptor)


def raise_head(path: Path, seq: int, digest: str) -> None:
    """Raise the head to `seq` and sync it, unless another process has already raised it as far."""
    descriptor = os.open(head_path(path), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _parse(descriptor, head_path(path))[0] < seq:
            os.pwrite(descriptor, head_record(seq, digest), 0)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _parse(descriptor: int, head: Path) -> tuple[int, str]:
    content = os.pread(descriptor, 4096, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    words = content.decode("ascii", "replace").split()
    if len(words) == 5 and words[3].isascii() and words[3].isdecimal():
        seq, digest = int(words[3]), words[4]
        if content == head_record(seq, digest) and (seq == 0) == (digest == _NONE):
            return seq, digest
    raise LedgerError(
        f"{head} is damaged, so lost releases could not be noticed: restore the ledger's files from a backup; "
        f"without one, count the budget as spent"
    )
