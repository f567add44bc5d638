"""A ledger that may be shown: without the columns that tell more than the plan, with the same chain and the same digests."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from fedveil.errors import LedgerError
from fedveil.ledger import ledger_store as store
from fedveil.ledger.entry import COLUMNS, PRIVATE
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.ledger_head import head_path, head_record

_PUBLIC = ", ".join("NULL" if name in PRIVATE else name for name in COLUMNS)


def publish_ledger(source: Path, target: Path) -> None:
    """Copy a concluded ledger to `target`, without times and numbers of participants; their SHA-256 stays.

    Who is handed a time or a count together with its nonce can check it against the copy. The copy verifies as the source does.

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
                for made, name in ((draft, target), (head, head_path(target))):
                    made.chmod(0o644)
                    os.link(made, name)
        except (OSError, sqlite3.Error) as problem:
            raise LedgerError(
                f"cannot write the ledger {target} ({problem}): it needs a writable folder on a local disk"
            ) from problem


def _copy(source: Path, draft: Path) -> None:
    """The tables of `source`, with nothing in the private columns."""
    with closing(store.connect(source, store.reading_mode(source))) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
        store.write_empty(draft, meta)
        with closing(sqlite3.connect(draft, isolation_level=None)) as copy:
            copy.execute("BEGIN")
            copy.executemany(store.INSERT, connection.execute(f"SELECT {_PUBLIC}, digest FROM release ORDER BY seq"))
            copy.executemany("INSERT INTO closing VALUES (1, ?, ?, ?)", connection.execute(store.CLOSING))
            copy.execute("COMMIT")
            copy.execute("PRAGMA wal_checkpoint(TRUNCATE)")
