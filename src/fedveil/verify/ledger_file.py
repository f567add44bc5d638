"""A second implementation of docs/ledger.md that reads a ledger: chain, commitments, head and closing, row by row."""

import csv
import hashlib
import io
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

_TABLES = "3f09ce983971ed161ca8dba7180375f7e767e6dfb926992de418ebaa84ca2757"  # and triggers


class LedgerFile:
    """A ledger file; its attributes about the whole file are set when `rows` is exhausted."""

    def __init__(self, path: Path) -> None:
        self.path, self.releases, self.last, self.closing_digest, self.published = path, 0, "", "", False
        self.run, self.opening, self.closing = "", dict[str, Any](), dict[str, Any]()

    def rows(self, on_step: Callable[[int, int], None] | None = None) -> Iterator[dict[str, Any]]:
        """Yield every row after its checks; raise OSError if there is no ledger, ValueError or sqlite3.Error if it is wrong."""
        log = self.path.with_name(self.path.name + "-wal")
        if not self.path.is_file() or (log.exists() and log.stat().st_size):
            raise OSError(f"{self.path.name} is not there, or it is open still: a run that has ended leaves an empty -wal")
        names = [self.path.name + end for end in ("", "-head", "-wal", "-shm", "-journal")]  # no finished run has the last
        if odd := [f.name for f in self.path.parent.iterdir() if f.name.casefold() in names and f.name not in names[:-1]]:
            raise ValueError(f"{odd[0]} lies beside it, which no run leaves: SQLite reads other rows with it, here or elsewhere")
        with closing(sqlite3.connect(f"file:{quote(bytes(self.path.absolute()))}?mode=ro&immutable=1", uri=True)) as db:
            total = self._start(db)
            db.row_factory = sqlite3.Row
            for row in map(dict, db.execute("SELECT * FROM release ORDER BY seq")):
                self.releases += 1
                self.last = _link(self.last, [v for n, v in row.items() if n not in ("time", "participants", "nonce", "digest")])
                if row["seq"] != self.releases or row["digest"] != self.last:
                    raise ValueError(f"row {self.releases} does not continue the hash chain")
                private = f"{row['nonce']}\n{json.dumps([row['time'], row['participants']])}"
                if (row["time"], row["participants"], row["nonce"]) == (None, None, None):
                    self.published = True
                elif row["sealed"] != hashlib.sha256(private.encode()).hexdigest():
                    raise ValueError(f"time or participants of row {row['seq']} are not those that were recorded")
                if on_step and self.releases % 20_000 == 0:
                    on_step(self.releases, total)
                yield row
            for seq, content, digest in db.execute("SELECT seq, content, digest FROM closing"):
                if self.closing or seq != self.releases or digest != _link(self.last, ["closing", seq, content]):
                    raise ValueError("the closing entry does not continue the hash chain")
                self.closing, self.closing_digest = read_json(content), digest

    def _start(self, db: sqlite3.Connection) -> int:
        """Check schema and size, read the opening entry, and return the number of releases."""
        names = ("application_id", "user_version", "page_count", "page_size")
        application, schema, pages, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        if (application, schema) != (0x46564C47, 2):
            raise OSError("it is no ledger of schema 2, whose releases left as integers; nothing older can be verified")
        tables = _link("", db.execute("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall())
        if tables != _TABLES or pages * size != self.path.stat().st_size:
            raise ValueError("its tables or its size are not those of a ledger")
        meta = dict(db.execute("SELECT key, value FROM meta"))
        self.run, self.opening = meta["run"], read_json(meta["meta"])
        self.last = _link("", [text for item in sorted(meta.items()) for text in item])
        return int(db.execute("SELECT count(*) FROM release").fetchone()[0])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):  # readers differ in which of two equal keys they use
        raise ValueError(f"a key stands twice among {', '.join(found)[:80]}")
    return found


read_json = partial(json.loads, object_pairs_hook=_once)
csv.field_size_limit(1 << 30)  # one cell has the reasons of all failures of a round


def read_table(text: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file; raise ValueError for two columns of one name and for rows of another length."""
    names, *rows = csv.reader(io.StringIO(text, newline=""))
    seen = {"".join(filter(str.isprintable, name.casefold())).replace(" ", "") for name in names}
    if len(seen) < len(names) or any(len(row) != len(names) for row in rows):
        raise ValueError("a table has a column twice, or rows of another length")
    return [dict(zip(names, row, strict=True)) for row in rows]


def _link(previous: str, values: list[Any]) -> str:
    return hashlib.sha256(f"{previous}\n{json.dumps(values)}".encode()).hexdigest()
