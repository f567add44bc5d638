"""The ledger's database: schema, creation, connection, and verification on opening."""

from __future__ import annotations

import errno
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from fedveil import __version__
from fedveil.errors import LedgerError
from fedveil.ledger.entry import COLUMNS, COLUMNS_1, chained, link, sealed_rightly
from fedveil.ledger.files import head_path, head_record, read_head, sync_path

SCHEMA = 2
_APPLICATION_ID = 0x46564C47  # "FVLG"
_BUSY_SECONDS = 60.0
SELECT = {n: f"SELECT {', '.join(columns)}, digest FROM release" for n, columns in ((1, COLUMNS_1), (SCHEMA, COLUMNS))}
CLOSING = "SELECT seq, content, digest FROM closing"
INSERT = f"INSERT INTO release VALUES ({', '.join('?' * (len(COLUMNS) + 1))})"

_META = """CREATE TABLE meta (key TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL)"""
_RELEASE = """CREATE TABLE release (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  time REAL{needed},
  run TEXT NOT NULL,
  round INTEGER NOT NULL,
  client INTEGER NOT NULL,
  unit TEXT NOT NULL,
  adjacency TEXT NOT NULL,
  view TEXT NOT NULL,
  event TEXT NOT NULL,
  mu REAL,
  rate REAL,
  noise_multiplier REAL,
  count INTEGER NOT NULL,
  reason TEXT,
  clip TEXT NOT NULL,
  noise_std TEXT NOT NULL,
  coordinates INTEGER NOT NULL,
  dimension INTEGER NOT NULL,
  participants INTEGER{needed},
  reads TEXT NOT NULL,
  note TEXT NOT NULL,{more}
  digest TEXT NOT NULL
)"""
_SINCE_2 = """
  grid TEXT,
  mechanism TEXT NOT NULL,
  extras TEXT NOT NULL,
  whole_clip REAL,
  nonce TEXT,
  sealed TEXT NOT NULL,"""
_CLOSING = """CREATE TABLE closing (
  one INTEGER PRIMARY KEY CHECK (one = 1),
  seq INTEGER NOT NULL,
  content TEXT NOT NULL,
  digest TEXT NOT NULL
)"""
_TABLES = {
    1: (_META, _RELEASE.format(more="", needed=" NOT NULL")),
    SCHEMA: (_META, _RELEASE.format(more=_SINCE_2, needed=""), _CLOSING),
}
_NEVER = "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
_TRIGGERS_1 = (
    f"CREATE TRIGGER meta_no_insert BEFORE INSERT ON meta {_NEVER}",
    f"CREATE TRIGGER meta_no_update BEFORE UPDATE ON meta {_NEVER}",
    f"CREATE TRIGGER meta_no_delete BEFORE DELETE ON meta {_NEVER}",
    f"CREATE TRIGGER release_no_update BEFORE UPDATE ON release {_NEVER}",
    f"CREATE TRIGGER release_no_delete BEFORE DELETE ON release {_NEVER}",
    "CREATE TRIGGER release_only_next BEFORE INSERT ON release "
    f"WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM release) {_NEVER}",
)
_TRIGGERS = {
    1: _TRIGGERS_1,
    SCHEMA: (
        *_TRIGGERS_1,
        f"CREATE TRIGGER closing_no_update BEFORE UPDATE ON closing {_NEVER}",
        f"CREATE TRIGGER closing_no_delete BEFORE DELETE ON closing {_NEVER}",
        "CREATE TRIGGER closing_only_last BEFORE INSERT ON closing "
        f"WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) FROM release) {_NEVER}",
        f"CREATE TRIGGER release_not_closed BEFORE INSERT ON release WHEN EXISTS (SELECT 1 FROM closing) {_NEVER}",
    ),
}
_CIRCUMSTANCES = frozenset(
    getattr(sqlite3, f"SQLITE_{name}")
    for name in (
        *("PERM", "BUSY", "NOMEM", "FULL", "CANTOPEN", "READONLY", "READONLY_CANTINIT", "READONLY_DIRECTORY"),
        *("IOERR_WRITE", "IOERR_FSYNC", "IOERR_TRUNCATE", "IOERR_LOCK", "IOERR_SHMOPEN", "IOERR_SHMSIZE", "IOERR_SHMMAP"),
    )
)
"""SQLite errors caused by a file's environment, not by its content."""
_ADVICE = "Restore its files from a backup; without one, count the budget as spent and release nothing more of these data"


def schema_of(path: Path) -> int:
    """Return the schema number in the header of a ledger, unverified; 0 if the file is not a ledger."""
    application, schema = _header(path)
    return schema if application == _APPLICATION_ID else 0


def wal_path(path: Path) -> Path:
    """Return the path of SQLite's write-ahead log of the ledger at `path`."""
    return path.with_name(path.name + "-wal")


def genesis(meta: Mapping[str, str]) -> str:
    """Return the digest before the first release, that of the table `meta`, which makes the table part of the chain."""
    return link("", [text for item in sorted(meta.items()) for text in item])


# --- creation ---------------------------------------------------------------------------------------------------------


def create(path: Path, run: str, meta: Mapping[str, Any], created: float | None = None) -> None:
    """Write an empty ledger atomically; raise LedgerError if a ledger, or a remaining file of one, exists."""
    _refuse_leftovers(path)
    try:
        text = json.dumps(dict(meta), allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as problem:
        raise LedgerError(
            f"the argument `meta` of the new ledger {path} cannot be written as JSON ({problem}): give only text, finite "
            f"numbers, lists and mappings"
        ) from problem
    now = time.time() if created is None else created
    rows = {"run": run, "created": repr(now), "schema": str(SCHEMA), "fedveil": __version__, "meta": text}
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as folder:
            draft, head = Path(folder, "ledger"), Path(folder, "head")
            write_empty(draft, rows)
            if not head_path(path).exists():
                head.write_bytes(head_record(0))
                head.chmod(0o600)
                sync_path(head)
                os.link(head, head_path(path))
            os.link(draft, path)
        sync_path(path.parent)
    except FileExistsError as problem:
        raise LedgerError(f"another process is creating the ledger {path} right now: open it instead") from problem
    except (OSError, ValueError, sqlite3.Error) as problem:
        raise LedgerError(f"cannot create the ledger {path} ({problem}): it needs a writable folder on a local disk") from problem


def _refuse_leftovers(path: Path) -> None:
    if path.exists():
        raise LedgerError(f"{path} exists and is never overwritten: open it to resume, or choose another path for a new run")
    if wal_path(path).exists():
        raise LedgerError(f"{wal_path(path)} may hold releases, but {path.name} is gone: restore it, or choose another path")
    if head_path(path).exists() and (seq := read_head(path)[0]):
        raise LedgerError(f"{head_path(path)} says that {path.name} held {seq} releases: restore it, or choose another path")


def write_empty(draft: Path, rows: Mapping[str, str]) -> None:
    """Write a ledger without releases; `rows` are those of the table `meta`."""
    with closing(sqlite3.connect(draft, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("BEGIN")
        for statement in _TABLES[SCHEMA]:
            connection.execute(statement)
        connection.executemany("INSERT INTO meta VALUES (?, ?)", rows.items())
        for statement in _TRIGGERS[SCHEMA]:
            connection.execute(statement)
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL")
    draft.chmod(0o600)
    sync_path(draft)


# --- opening ----------------------------------------------------------------------------------------------------------


def reading_mode(path: Path) -> str:
    """Return the mode for reading the ledger: "immutable", which writes nothing, if its log is empty, else "ro"."""
    return "ro" if unwritten(path)[1] else "immutable"


def unwritten(path: Path) -> tuple[int, ...]:
    """Return numbers that stay the same while nobody writes the ledger: inodes, sizes and times of database, log and head."""
    stats = [file.stat() if file.exists() else None for file in (path, wal_path(path), head_path(path))]
    database, log, head = ((0, 0, 0) if s is None else (s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)
    return database[0], log[1], head[0], *database[1:]


def connect(path: Path, mode: str = "rw") -> sqlite3.Connection:
    """Return a connection that syncs every commit and waits up to a minute for other writers.

    Args:
        mode: "rw", "ro", or "immutable" for a file that nobody writes, which takes no locks and needs no writable folder.
    """
    uri = f"file:{quote(bytes(path.absolute()))}?mode={'ro&immutable=1' if mode == 'immutable' else mode}"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)
    for pragma in ("synchronous = FULL", "fullfsync = ON", "checkpoint_fullfsync = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def verify(
    path: Path, mode: str = "ro", progress: Callable[[int, int], None] | None = None, verified: str = ""
) -> dict[str, str]:
    """Verify a ledger without changing database or log, and return the table `meta`.

    Check header, size, schema, SQLite's integrity, hash chain and head file. Raises LedgerError with advice.

    Args:
        mode: "ro" or "immutable", as in `connect`. progress: called with the number of checked rows and of all rows.
        verified: a closing digest whose chain and head have just been verified: rows that close with it are not read again.
    """
    schema = _verify_header(path)
    head, digest = read_head(path)
    try:
        with closing(connect(path, mode)) as connection:
            connection.execute("BEGIN")
            _verify_structure(connection, schema, mode)
            meta = dict(connection.execute("SELECT key, value FROM meta"))
            if meta.get("schema") != str(schema):
                raise _Damage(f"its header says schema {schema}, its content {meta.get('schema')}")
            if verified and schema == SCHEMA and (end := connection.execute(CLOSING).fetchone()) and end[2] == verified:
                return meta
            rows: Iterable[tuple[Any, ...]] = connection.execute(f"{SELECT[schema]} ORDER BY seq")
            if progress is not None:
                rows = _reported(rows, connection.execute("SELECT count(*) FROM release").fetchone()[0], progress)
            seq, chain = _verify_chain(genesis(meta), rows, head, digest)
            if schema == SCHEMA:
                _verify_closing(connection.execute(CLOSING).fetchone(), seq, chain)
            counted = connection.execute("SELECT coalesce(max(seq), 0) FROM sqlite_sequence").fetchone()[0]
    except (sqlite3.Error, UnicodeDecodeError, TypeError, ValueError, _Damage) as problem:
        if getattr(problem, "sqlite_errorcode", None) in _CIRCUMSTANCES:
            if unwritten(path)[1] and not os.access(path.parent, os.W_OK):
                raise LedgerError(
                    f"cannot read the ledger {path} ({problem}): {path.name}-wal holds releases that are not in {path.name} yet, "
                    f"and SQLite cannot read it where the folder is not writable: copy {path.name}, {path.name}-wal and "
                    f"{path.name}-head to a folder of your own and read them there"
                ) from problem
            raise LedgerError(
                f"cannot open the ledger {path} ({problem}): check free space, and the permissions of the file and its folder, "
                f"then try again; nothing is wrong with its content as far as it was read"
            ) from problem
        raise LedgerError(f"the ledger {path} is damaged: {problem}. {_ADVICE}") from problem
    if not head <= seq == counted:
        raise LedgerError(
            f"the ledger {path} lost releases: it holds {seq}, but {max(head, counted)} were charged (was {path.name}-wal "
            f"deleted, or an old copy put in place?). {_ADVICE}"
        )
    return meta


def _reported(rows: Iterable[tuple[Any, ...]], total: int, progress: Callable[[int, int], None]) -> Iterator[tuple[Any, ...]]:
    """Yield the rows, calling `progress(done, total)` every 10,000 rows and at the end."""
    for done, row in enumerate(rows):
        if done % 10_000 == 0:
            progress(done, total)
        yield row
    progress(total, total)


class _Damage(Exception):
    """Damage in the content of a database that SQLite can read."""


def _verify_header(path: Path) -> int:
    """Return the ledger's schema after checking that the file is a ledger, without opening it for SQL.

    If SQL were run on a file that is no ledger, SQLite could first write a leftover `-wal` file into it. The header is read
    through SQLite as well: closing an ordinary file handle would drop all locks that this process holds on the file.

    Raises:
        LedgerError: the file is missing, unreadable, truncated or not a ledger, or has a schema that this version does not know.
    """
    try:
        size = _size(path)
    except FileNotFoundError:
        lost = head_path(path).exists() or wal_path(path).exists()
        what_to_do = "but other files of it are, so it is lost: restore a backup" if lost else "create one for a new run"
        raise LedgerError(f"there is no ledger at {path}; {what_to_do}") from None
    except OSError as problem:
        raise LedgerError(
            f"cannot read the ledger {path} ({problem}): give the path of the file and check its permissions"
        ) from problem
    if size < 100 and head_path(path).exists():
        raise LedgerError(f"the ledger {path} is damaged: only {size} bytes of it are left. {_ADVICE}")
    application, version = _header(path)
    if application != _APPLICATION_ID:
        raise LedgerError(f"{path} is not a fedveil ledger, or its header is damaged: give the path of one, or restore a backup")
    if version not in _TABLES:
        raise LedgerError(
            f"the ledger {path} has schema {version} and fedveil {__version__} reads schemas up to {SCHEMA}: use the fedveil "
            f"that wrote it, or a newer one"
        )
    return version


def _size(path: Path) -> int:
    """Return the size of a readable file in bytes; raise OSError for anything else."""
    size = path.stat().st_size
    for wrong, code in ((path.is_dir(), errno.EISDIR), (not os.access(path, os.R_OK), errno.EACCES)):
        if wrong:
            raise OSError(code, os.strerror(code))
    return size


def _header(path: Path) -> tuple[int, int]:
    """Return the application and schema numbers in the header, ignoring a log; zeros if the file is not a database.

    The header is read without locks, so another process may be moving its log into the file, and the header may count pages
    not yet written. `writable_schema` makes SQLite accept such a header; the connection cannot write anything.
    """
    uri = f"file:{quote(bytes(path.absolute()))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.execute("PRAGMA writable_schema = ON")
            application, schema = (
                connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
            )
    except sqlite3.DatabaseError:
        return 0, 0
    return application, schema


def _verify_structure(connection: sqlite3.Connection, schema: int, mode: str) -> None:
    journal = connection.execute("PRAGMA journal_mode").fetchone()[0]
    if journal != "wal" and mode != "immutable":  # an immutable file has no journal
        raise _Damage(f"its journal mode was changed from wal to {journal}")
    statements = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE name NOT LIKE 'sqlite%'")}
    if statements != {*_TABLES[schema], *_TRIGGERS[schema]}:
        raise _Damage("its tables, or the triggers that keep it append-only, were changed")
    report = connection.execute("PRAGMA integrity_check(1)").fetchone()[0]
    if report != "ok":
        raise _Damage(f"SQLite's integrity check says {report}")


def _verify_chain(chain: str, rows: Iterable[tuple[Any, ...]], head: int, digest: str) -> tuple[int, str]:
    """Recompute the digest of every row, starting from `chain`; return the number of rows and the last digest."""
    seq = 0
    for *values, stored in rows:
        seq += 1
        chain = link(chain, chained(values))
        if values[0] != seq or stored != chain:
            raise _Damage(f"release {seq} does not continue the hash chain")
        if not sealed_rightly(values):
            raise _Damage(f"time and participants of release {seq} are not those that were recorded")
        if seq == head and chain != digest:
            raise _Damage(f"release {seq} is not the one that was charged (the head file holds another digest)")
    return seq, chain


def closing_digest(chain: str, seq: int, content: str) -> str:
    """Return the closing digest of a ledger, which binds the last release's digest and the closing record."""
    return link(chain, ["closing", seq, content])


def _verify_closing(row: tuple[int, str, str] | None, seq: int, chain: str) -> None:
    if row is not None and (row[0] != seq or row[2] != closing_digest(chain, seq, row[1])):
        raise _Damage("its closing entry does not continue the hash chain")
