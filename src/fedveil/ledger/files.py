"""Files that are written whole or not at all, private files, and the head of a ledger.

The order in a charge is commit, then head, then hand over, so at any moment
    releases handed over <= head <= rows in the database
and a database with fewer rows than the head has lost some, whatever took them: a deleted log, an older copy, a cut file.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import IO, Self

from fedveil.errors import LedgerError


def owner_only(path: str, flags: int) -> int:
    """Open a file with mode 600, for `open(..., opener=owner_only)`."""
    return os.open(path, flags, 0o600)


def owner_only_folder(path: Path) -> Path:
    """Return the folder `path`, which is made with mode 700 if it is absent."""
    path.mkdir(mode=0o700, exist_ok=True)
    return path


RESTORE = "restore its newest copy"
DRAFT = ".part"
"""Suffix of a file's name while it is being written; a killed run may leave such files."""


class Drafts:
    """Files that get their names once all of them are on the disk; on failure no draft is left to fill it.

    Args:
        private: for their owner alone (mode 600).
    """

    def __init__(self, *, private: bool = False) -> None:
        self._opener = owner_only if private else None
        self._open: list[IO[bytes]] = []
        self._unnamed: dict[Path, Path] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, problem: object, trace: object) -> None:
        if isinstance(problem, OSError):  # the system names no file where there is no room
            problem.filename = problem.filename or str(next(iter(self._unnamed), ""))
        for file in self._open:
            with suppress(OSError):
                file.close()
        for draft in self._unnamed.values():
            with suppress(OSError):
                draft.unlink()

    def open(self, path: Path, mode: str = "wb", owner: str = "") -> IO[bytes]:
        """Open the draft of what shall be at `path`; `owner` tells it from the drafts of other processes."""
        draft = self._unnamed[path] = path.with_name(path.name + owner + DRAFT)
        file: IO[bytes] = open(draft, mode, opener=self._opener)  # noqa: SIM115 (closed with the drafts)
        self.sync_too(file)
        return file

    def write(self, path: Path, content: Iterable[bytes | memoryview]) -> None:
        """Write what shall be at `path`, into its draft if there is one, as after `reserve`."""
        file = self.open(path, "r+b" if path.with_name(path.name + DRAFT).exists() else "wb")
        file.writelines(content)
        file.truncate()

    def sync_too(self, file: IO[bytes]) -> None:
        """Sync an open file with the drafts, and close it with them."""
        self._open.append(file)

    def sync(self) -> None:
        """Wait until all that was written is on the disk, which takes little longer for several files at once than for one.

        Raises:
            OSError: one of them is not.
        """
        problems: list[BaseException] = []

        def synced(file: IO[bytes]) -> None:
            try:
                file.flush()
                os.fsync(file.fileno())
            except BaseException as problem:
                problems.append(problem)

        threads = [Thread(target=synced, args=(file,)) for file in self._open[1:]]
        for thread in threads:
            thread.start()
        synced(self._open[0])
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def rename(self, path: Path) -> None:
        """Give the draft its name."""
        self._unnamed[path].replace(path)
        self.keep(path)

    def keep(self, path: Path) -> None:
        """Let the file stay under the name that it has."""
        del self._unnamed[path]


def replace_whole(path: Path, content: bytes | Iterable[bytes | memoryview], *, private: bool = False) -> None:
    """Write a file whole or not at all: beside it, synced, renamed.

    Args:
        content: all of it, or its parts in order. private: for its owner alone (mode 600).

    Raises:
        OSError: it cannot be written, with its name; what was there before still is.
    """
    with Drafts(private=private) as drafts:
        drafts.write(path, [content] if isinstance(content, bytes) else content)
        drafts.sync()
        drafts.rename(path)


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder that takes the place of `target` at the end of the block; on failure nothing is left."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as around:
        draft = Path(around) / target.name
        draft.mkdir()
        yield draft
        draft.rename(target)


def sync_path(path: Path) -> None:
    """Wait until a file, or what a folder lists, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineFile:
    """Text file of ASCII lines that only grows; each line is on the disk before `append` returns.

    A line that a crash cut off is dropped: what it announced was not sent. The file is read again when another process has
    written to it, so that processes which share a folder, and lock it while they answer, see one another's lines.

    Args:
        path: of the file, made when first written.

    Raises:
        LedgerError: it is damaged, or became shorter since it was read; from all that read it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: list[str] = []
        self._whole = self._size = 0
        self._follow()

    @property
    def lines(self) -> Sequence[str]:
        """Return all lines, those of other processes included."""
        self._follow()
        return self._lines

    def append(self, line: str) -> None:
        """Write a line and sync it.

        Raises:
            LedgerError: it is not on the disk; nothing may be sent.
        """
        self._follow()
        content = f"{line}\n".encode("ascii")
        try:
            new = not self.path.exists()
            with open(self.path, "ab", opener=owner_only) as file:
                file.truncate(self._whole)
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync_path(self.path.parent)
        except OSError as problem:
            with suppress(OSError):  # a line that nobody announced
                os.truncate(self.path, self._whole)
            raise LedgerError(
                f"cannot write {self.path}: {problem.strerror}; nothing was sent: make room, then go on"
            ) from problem
        self._whole = self._size = self._whole + len(content)
        self._lines.append(line)

    def _follow(self) -> None:
        """Read what was appended since the last look."""
        size = self.path.stat().st_size if self.path.exists() else 0
        if size == self._size:
            return
        if size < self._whole:
            raise LedgerError(f"{self.path} became shorter while it was in use, and lacks what was sent: {RESTORE}")
        with open(self.path, "rb") as file:
            file.seek(self._whole)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        try:
            self._lines += content[:whole].decode("ascii").splitlines()
        except ValueError as problem:
            raise LedgerError(f"{self.path} is damaged ({problem}): {RESTORE}") from problem
        self._whole, self._size = self._whole + whole, size


def reserve(path: Path, size: int) -> None:
    """Take so many bytes of the disk for a file of its owner; on failure nothing is left.

    Raises:
        OSError: there is no room.
    """
    with Drafts(private=True) as drafts:
        file = drafts.open(path)
        os.posix_fallocate(file.fileno(), 0, size) if hasattr(os, "posix_fallocate") else file.write(bytes(size))
        drafts.sync()
        drafts.keep(path)


def write_output(path: Path, content: bytes, *, private: bool = False) -> None:
    """Write like `replace_whole`, to a path that a user gave: follow links, and write to pipes and devices directly.

    Raises:
        OSError: it cannot be written there.
    """
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        replace_whole(Path(os.path.realpath(path)), content, private=private)


_NONE = "0" * 64


def head_path(path: Path) -> Path:
    """Return the head file of the ledger at `path`."""
    return path.with_name(path.name + "-head")


def was_begun(path: Path) -> bool:
    """Return whether there is a ledger at `path`, or what is left of one that is lost.

    The head is written before the ledger, so a head without releases alone is left of a creation that was killed.
    """
    head = head_path(path)
    if path.exists() or path.with_name(f"{path.name}-wal").exists():
        return True
    try:
        return head.exists() and read_head(path)[0] > 0
    except LedgerError:  # a damaged head: opening the ledger says what to do
        return True


def require_budget(path: Path) -> None:
    """Refuse a path at which no budget is.

    Raises:
        LedgerError: there is no budget, and none was lost.
    """
    if not was_begun(path):
        raise LedgerError(f"there is no budget at {path}: create it once with fedveil budget create {path} --epsilon E --delta D")


BEFORE_FORKS = threading.RLock()
"""Held while a thread has a locked file, or a connection that no open ledger knows: a child would inherit its lock for ever."""


def head_record(seq: int, digest: str = _NONE) -> bytes:
    """Return the content of a head file, 106 bytes: the number of releases and the digest of the last one (zeros if none)."""
    return f"fedveil ledger head {seq:020d} {digest}\n".encode()


def read_head(path: Path) -> tuple[int, str]:
    """Number of releases, at least, and the digest of that one; raises LedgerError when the head file is missing or damaged."""
    with BEFORE_FORKS:
        return _read_head(head_path(path), path)


def _read_head(head: Path, path: Path) -> tuple[int, str]:
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
    with BEFORE_FORKS:
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
