"""The ledger: an append-only list of releases on disk, and the publication of a copy.

A process killed at any moment leaves a ledger in which no release is missing; a few recorded releases may never have been made.
Schema, guarantees and failure modes: docs/ledger.md.
"""

from __future__ import annotations

import json
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from fedveil.errors import LedgerError
from fedveil.ledger import ledger_store as store
from fedveil.ledger.entry import AGGREGATE, COLUMNS, PRIVATE, Entry, chained, from_row, link, to_row
from fedveil.ledger.files import BEFORE_FORKS, head_path, head_record, raise_head, read_head

__all__ = ["AGGREGATE", "Entry", "Ledger", "Row"]

Row = tuple[int, float | None, Entry]
"""Sequence number (from 1), Unix time in seconds (None in a published ledger), and the entry of a release."""

_PAGE = 1000


class Ledger:
    """Open ledger, from `Ledger.create` or `Ledger.open`.

    Any number of processes, also forked ones, may write to a ledger, each through its own object; threads may share an object.
    """

    def __init__(self, path: Path, meta: Mapping[str, str], mode: str = "rw") -> None:
        self.path, self._mode = path, mode
        self.run = meta["run"]
        self.schema = int(meta["schema"])
        self.meta: dict[str, Any] = json.loads(meta["meta"])
        self._genesis = store.genesis(meta)
        self._lock = threading.RLock()
        self._owner: int | None = os.getpid()
        self._connect()
        self._home = (self._files[0], self._files[2])
        _OPEN.add(self)

    @classmethod
    def create(cls, path: str | Path, run: str, meta: Mapping[str, Any] | None = None, *, created: float | None = None) -> Self:
        """Start an empty ledger at `path` for `run`, with public configuration `meta` (plain JSON values).

        Args:
            created: the Unix time recorded as the time of creation; by default now.

        Raises LedgerError if a ledger, or a remaining file of one, exists at `path`.
        """
        with BEFORE_FORKS:
            store.create(Path(path), run, meta or {}, created)
            return cls.open(path)

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        read_only: bool = False,
        progress: Callable[[int, int], None] | None = None,
        verified: str = "",
    ) -> Self:
        """Open an existing ledger after verifying all of it, in time linear in its rows (measured in docs/ledger.md).

        A ledger of schema 1 is opened read-only: its releases were floats, and no further release may be added.

        Args:
            read_only: open without write access to the file or its folder; no file is created next to it.
            progress: called with the number of verified rows and the number of all rows.
            verified: the closing digest, if chain and head have just been verified: the rows are then not verified again.

        Raises LedgerError, with advice, if the file is missing, damaged, not a ledger, of a later schema, or has fewer rows than
        were charged. Nothing is repaired, and a refused file is not changed.
        """
        with BEFORE_FORKS:
            return cls._opened(Path(path), read_only, progress, verified)

    @classmethod
    def _opened(cls, path: Path, read_only: bool, progress: Callable[[int, int], None] | None, verified: str) -> Self:
        reading = read_only or store.schema_of(path) != store.SCHEMA
        mode, before = store.reading_mode(path) if reading else "rw", store.unwritten(path)
        try:
            meta = store.verify(path, mode if reading else "ro", progress, verified if reading else "")
        except LedgerError:
            if mode != "immutable" or store.unwritten(path) == before:
                raise
            mode = "ro"  # another process began to write the ledger
            meta = store.verify(path, mode, progress)
        try:
            return cls(path, meta, mode)
        except (sqlite3.Error, OSError, KeyError, ValueError) as problem:
            raise LedgerError(
                f"cannot open the ledger {path} for {'reading' if reading else 'writing'}: {problem}. Check the permissions of "
                f"the file and its folder"
            ) from problem

    def charge(self, entry: Entry) -> int:
        """Record one release and return its sequence number once it is committed and synced; release the vector only afterwards.

        Raises LedgerError if that is not certain: release nothing (the ledger may then hold this release, an over-count).
        """
        return self.charge_many([entry])[0]

    def charge_many(self, entries: Iterable[Entry], admit: Callable[[], None] | None = None) -> list[int]:
        """Record several releases, all or none, in one transaction.

        admit: called under the ledger's write lock, after every other writer's commits and before this one; an exception from it
        cancels the charge. A budget shared by several processes is checked here (`Budgets.charge`).
        Raises LedgerError as `charge` does.
        """
        entries = list(entries)
        with self._lock:
            self._check_usable()
            if self.schema != store.SCHEMA:
                raise LedgerError(
                    f"the ledger {self.path} is of schema {self.schema}: its releases were floating-point, and such a ledger "
                    "can be shown but not continued: start a new run with a new ledger"
                )
            if self._mode != "rw":
                raise LedgerError(f"the ledger {self.path} was opened for reading: open it without read_only to charge releases")
            if not entries:
                return []
            try:
                last, chain = self._append(entries, admit)
                raise_head(self.path, last, chain)
            except (sqlite3.Error, OSError) as problem:
                raise LedgerError(
                    f"cannot record a release in {self.path} ({problem}), so nothing may be released: check free space, "
                    f"permissions and other users of the file, then resume the run"
                ) from problem
            self._check_usable()
        return list(range(last - len(entries) + 1, last + 1))

    def exclusively(self, do: Callable[[], None]) -> None:
        """Call a function under the ledger's write lock, after every other writer's commits; it writes no release.

        Raises:
            LedgerError: the lock cannot be taken.
        """
        with self._lock:
            self._check_usable()
            try:
                self._connection.execute("BEGIN IMMEDIATE")
            except sqlite3.Error as problem:
                raise LedgerError(
                    f"cannot lock the ledger {self.path} ({problem}): check permissions and other users of the file"
                ) from problem
            try:
                do()
            finally:
                self._connection.execute("ROLLBACK")

    def _append(self, entries: list[Entry], admit: Callable[[], None] | None) -> tuple[int, str]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            if admit is not None:
                admit()
            seq, chain = self._last()
            now, rows = time.time(), []
            for entry in entries:
                seq += 1
                values = to_row(seq, now, entry)
                chain = link(chain, chained(values))
                rows.append((*values, chain))
            self._connection.executemany(store.INSERT, rows)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise
        return seq, chain

    def conclude(self, content: Mapping[str, Any]) -> str:
        """Conclude the ledger, so that nothing can be charged afterwards, and return the closing digest (64 hex digits).

        Args:
            content: closing record of the run (plain JSON values), such as the digests of its files.

        Raises:
            LedgerError: the ledger is already concluded, or cannot be written.
        """
        text = json.dumps(dict(content), allow_nan=False, sort_keys=True)
        with self._lock:
            self._check_usable()
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                seq, chain = self._last()
                digest = store.closing_digest(chain, seq, text)
                self._connection.execute("INSERT INTO closing VALUES (1, ?, ?, ?)", (seq, text, digest))
                self._connection.execute("COMMIT")
            except sqlite3.Error as problem:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise LedgerError(
                    f"cannot conclude the ledger {self.path} ({problem}): it must be open and writable"
                ) from problem
        return digest

    @property
    def closing(self) -> tuple[dict[str, Any], str] | None:
        """Return the closing record of the run and the closing digest; None while the ledger accepts releases."""
        if self.schema != store.SCHEMA:
            return None
        with self._lock:
            self._check_usable()
            row = self._connection.execute(store.CLOSING).fetchone()
        return None if row is None else (json.loads(row[1]), row[2])

    def entries(self, since: int = 0) -> Iterator[Row]:
        """Yield the releases with a sequence number above `since`, in order, including rows added meanwhile."""
        while True:
            with self._lock:
                self._check_usable()
                page = self._connection.execute(
                    f"{store.SELECT[self.schema]} WHERE seq > ? ORDER BY seq LIMIT {_PAGE}", (since,)
                ).fetchall()
            for *values, _ in page:
                yield from_row(values)
            if len(page) < _PAGE:
                return
            since = page[-1][0]

    def select(self, sql: str, parameters: Sequence[object] = ()) -> Iterator[tuple[Any, ...]]:
        """Yield the rows of a query in plain SQL (docs/ledger.md), reading one page at a time to save memory."""
        with self._lock:
            self._check_usable()
            cursor = self._connection.execute(sql, parameters)
        while page := cursor.fetchmany(_PAGE):
            yield from page

    def copy_to(self, draft: Path) -> tuple[int, str]:
        """Copy the database to a new file, and return the number of releases in it and the digest of the last one."""
        with self._lock, BEFORE_FORKS, closing(sqlite3.connect(draft, isolation_level=None)) as copy:
            self._check_usable()
            self._connection.backup(copy)
            row = copy.execute("SELECT seq, digest FROM release ORDER BY seq DESC LIMIT 1").fetchone()
            copy.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return row or (0, self._genesis)

    @property
    def last_digest(self) -> str:
        """Return the digest of the last release, or of the table `meta` before the first release."""
        with self._lock:
            self._check_usable()
            return self._last()[1]

    def __len__(self) -> int:
        with self._lock:
            self._check_usable()
            return self._last()[0]

    def holds(self, seq: int, digest: str) -> bool:
        """Return whether release `seq` is in the ledger with this digest, which also fixes all earlier ones; True for seq = 0."""
        with self._lock:
            self._check_usable()
            row = self._connection.execute("SELECT digest FROM release WHERE seq = ?", (seq,)).fetchone()
        return seq == 0 or row == (digest,)

    @property
    def position(self) -> tuple[int, str]:
        """Return the number of releases, and the digest of the last one, or of the table `meta` before the first release."""
        with self._lock:
            self._check_usable()
            return self._last()

    def continues(self, position: tuple[int, str]) -> bool:
        """Return whether this ledger had that position before: it is the same ledger, and has lost no release since."""
        seq, digest = position
        return self.holds(seq, digest) and (seq > 0 or digest == self._genesis)

    def close(self) -> None:
        """Close the connection; the last one to close moves the log into the main file. Closing twice is fine."""
        with self._lock:
            if self._owner == os.getpid():
                self._connection.close()
            self._owner = None
            _OPEN.discard(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _connect(self) -> None:
        self._connection = store.connect(self.path, self._mode)
        self._connection.execute("SELECT count(*) FROM meta").fetchone()
        self._files = self._identity()
        self._suspended = False

    def _suspend(self) -> None:
        """Close the connection until the ledger is next used."""
        if self._owner == os.getpid() and not self._suspended:
            self._connection.close()
            self._suspended = True

    def _resume(self) -> None:
        """Connect again; leave the ledger unusable if its files were replaced or lack releases."""
        self._connect()
        files, self._files = self._files, ()
        head = read_head(self.path)[0]
        if (files[0], files[2]) == self._home and self._last()[0] >= head:
            self._files = files

    def _last(self) -> tuple[int, str]:
        """Return the sequence number and digest of the last release."""
        row = self._connection.execute("SELECT seq, digest FROM release ORDER BY seq DESC LIMIT 1").fetchone()
        return row or (0, self._genesis)

    def _identity(self) -> tuple[int, ...]:
        if self._mode == "immutable":
            return store.unwritten(self.path)
        return tuple(os.stat(file).st_ino for file in (self.path, store.wal_path(self.path), head_path(self.path)))

    def _check_usable(self) -> None:
        """Raise LedgerError unless this process opened the connection and it still writes to the files at the ledger's path."""
        if self._owner is None:
            raise LedgerError(f"the ledger {self.path} is closed; open it again")
        if self._owner != os.getpid():
            raise LedgerError(
                f"the ledger {self.path} was opened by another process; each process opens its own with Ledger.open"
            )
        try:
            if self._suspended:
                self._resume()
            same = self._identity() == self._files
        except (OSError, sqlite3.Error):
            same = False
        if not same and self._mode == "immutable":
            raise LedgerError(f"the ledger {self.path} was written or replaced while it was read: read it again")
        if not same:
            raise LedgerError(
                f"a file of the ledger {self.path} was removed or replaced while in use, so releases may be lost: hand nothing "
                f"over, stop the run and restore {self.path.name}, its -wal and its -head from a backup"
            )


# --- forks ------------------------------------------------------------------------------------------------------------

_OPEN: WeakSet[Ledger] = WeakSet()
"""Open ledgers of this process. SQLite's locks do not survive a fork, but a child that inherits a connection believes that it
holds them. Every connection is therefore closed before a fork and reopened in the parent on its next use."""
_locked: list[Ledger] = []


def _before_fork() -> None:
    """Close all connections; waits for no ledger's lock while it holds `BEFORE_FORKS`, since their holders may wait for that."""
    while True:
        for ledger in set(_OPEN) - set(_locked):
            ledger._lock.acquire()
            _locked.append(ledger)
        BEFORE_FORKS.acquire()
        if set(_OPEN) <= set(_locked):
            break
        BEFORE_FORKS.release()
    for ledger in _locked:
        ledger._suspend()


def _after_fork() -> None:
    BEFORE_FORKS.release()
    while _locked:
        _locked.pop()._lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


_PUBLIC = ", ".join("NULL" if name in PRIVATE else name for name in COLUMNS)


def publish_ledger(source: Path, target: Path) -> None:
    """Copy a concluded ledger to `target`, replacing times and numbers of participants by their SHA-256.

    A time or a count that is disclosed with its nonce can be checked against the copy. The copy verifies like the source.

    Raises:
        LedgerError: the source is damaged, of an earlier schema or not concluded, or the target exists or cannot be written.
    """
    with Ledger.open(source, read_only=True) as ledger:
        if ledger.closing is None:
            raise LedgerError(
                f"the ledger {source} is not concluded, so its run may still release: publish it when the run has ended"
            )
        digest = ledger.last_digest
        releases = len(ledger)
        if target.exists() or head_path(target).exists():
            raise LedgerError(f"{target} exists and is never overwritten: publish to another folder")
        try:
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as folder:
                draft, head = Path(folder, "ledger"), Path(folder, "head")
                _copy(source, draft)
                head.write_bytes(head_record(releases, digest) if releases else head_record(0))
                for written, name in ((draft, target), (head, head_path(target))):
                    written.chmod(0o644)
                    os.link(written, name)
        except (OSError, sqlite3.Error) as problem:
            raise LedgerError(
                f"cannot write the ledger {target} ({problem}): it needs a writable folder on a local disk"
            ) from problem


def _copy(source: Path, draft: Path) -> None:
    """Copy the tables of `source` without the private columns."""
    with BEFORE_FORKS, closing(store.connect(source, store.reading_mode(source))) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        store.write_empty(draft, meta)
        with closing(sqlite3.connect(draft, isolation_level=None)) as copy:
            copy.execute("BEGIN")
            copy.executemany(store.INSERT, connection.execute(f"SELECT {_PUBLIC}, digest FROM release ORDER BY seq"))
            copy.executemany("INSERT INTO closing VALUES (1, ?, ?, ?)", connection.execute(store.CLOSING))
            copy.execute("COMMIT")
            copy.execute("PRAGMA wal_checkpoint(TRUNCATE)")
