"""The head file of a ledger: a lower bound on the number of its releases, kept outside the database to notice lost rows.

The order in a charge is commit, then head, then hand over, so at any moment
    releases handed over <= head <= rows in the database
and a database with fewer rows than the head has lost some, whatever took them: a deleted log, an older copy, a cut file.
"""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from fedveil.errors import LedgerError

_NONE = "0" * 64


def head_path(path: Path) -> Path:
    """The head file of the ledger at `path`."""
    return path.with_name(path.name + "-head")


def head_record(seq: int, digest: str = _NONE) -> bytes:
    """The content of the head file, always 106 bytes: the number of releases and the digest of the last one (zeros if none)."""
    return f"fedveil ledger head {seq:020d} {digest}\n".encode()


def read_head(path: Path) -> tuple[int, str]:
    """Number of releases, at least, and the digest of that one; raises LedgerError when the head file is missing or damaged."""
    head = head_path(path)
    try:
        descriptor = os.open(head, os.O_RDONLY | os.O_NONBLOCK)  # a pipe would wait for a writer
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
    """Lift the head to `seq` and sync it, unless another process has already lifted it as far."""
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
