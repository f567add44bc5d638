"""A ledger read by a second implementation of docs/ledger.md: chain, commitments, head and closing, row by row."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

_COLUMNS = (
    *("seq", "time", "run", "round", "client", "unit", "adjacency", "view", "event", "mu", "rate", "noise_multiplier", "count"),
    *("reason", "clip", "noise_std", "coordinates", "dimension", "participants", "reads", "note", "grid", "mechanism", "extras"),
    *("whole_clip", "nonce", "sealed", "digest"),
)
_CHAINED = [i for i, name in enumerate(_COLUMNS) if name not in ("time", "participants", "nonce", "digest")]


class NotReadable(Exception):
    """There is no ledger that can be read here."""


class Broken(Exception):
    """The ledger contradicts itself."""


class LedgerFile:
    """A ledger's file; what it says as a whole is known once `rows` has run to its end."""

    def __init__(self, path: Path) -> None:
        self.path, self.releases, self.last = path, 0, ""
        self.run, self.opening, self.closing = "", dict[str, Any](), dict[str, Any]()
        self.closing_digest, self.published = "", False

    def rows(self, on_step: Callable[[int, int], None] | None = None) -> Iterator[dict[str, Any]]:
        """Every row, checked against chain and commitment; on_step is called with (rows read, rows there).

        Raises:
            NotReadable: no ledger, or another schema. Broken: what is wrong with it.
        """
        if not self.path.is_file():
            raise NotReadable("it is not there")
        log = self.path.with_name(self.path.name + "-wal")
        mode = "mode=ro" if log.exists() and log.stat().st_size else "mode=ro&immutable=1"
        try:
            with closing(sqlite3.connect(f"file:{quote(str(self.path.absolute()))}?{mode}", uri=True)) as db:
                yield from self._read(db, on_step)
        except (sqlite3.Error, UnicodeDecodeError, ValueError) as problem:
            raise Broken(f"it cannot be read ({problem})") from problem

    def _read(self, db: sqlite3.Connection, on_step: Callable[[int, int], None] | None) -> Iterator[dict[str, Any]]:
        application, schema = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version"))
        if (application, schema) != (0x46564C47, 2):
            raise NotReadable("it is no ledger of schema 2, whose releases left as integers; nothing older can be verified")
        meta = dict(db.execute("SELECT key, value FROM meta"))
        self.run, self.opening = meta["run"], json.loads(meta["meta"])
        chain = _link("", [text for item in sorted(meta.items()) for text in item])
        (total,) = db.execute("SELECT count(*) FROM release").fetchone()
        for values in db.execute(f"SELECT {', '.join(_COLUMNS)} FROM release ORDER BY seq"):
            row = dict(zip(_COLUMNS, values, strict=True))
            self.releases += 1
            chain = _link(chain, [values[i] for i in _CHAINED])
            if row["seq"] != self.releases or row["digest"] != chain:
                raise Broken(f"row {self.releases} does not continue the hash chain")
            private = f"{row['nonce']}\n{json.dumps([row['time'], row['participants']])}"
            if (row["time"], row["participants"], row["nonce"]) == (None, None, None):
                self.published = True
            elif row["sealed"] != hashlib.sha256(private.encode()).hexdigest():
                raise Broken(f"time or participants of row {row['seq']} are not those that were recorded")
            if on_step and self.releases % 20_000 == 0:
                on_step(self.releases, total)
            yield row
        self.last = chain
        for seq, content, digest in db.execute("SELECT seq, content, digest FROM closing"):
            if seq != self.releases or digest != _link(chain, ["closing", seq, content]):
                raise Broken("the closing entry does not continue the hash chain")
            self.closing, self.closing_digest = json.loads(content), digest

    def head(self) -> tuple[int, str]:
        """Number and digest of the last release that was handed over; raises ValueError if that file is missing or damaged."""
        try:
            content = self.path.with_name(self.path.name + "-head").read_bytes()
            seq, digest = int(content.split()[3]), content.split()[4].decode()
        except (OSError, IndexError) as problem:
            raise ValueError("it is missing or damaged") from problem
        if content != f"fedveil ledger head {seq:020d} {digest}\n".encode():
            raise ValueError("it is damaged")
        return seq, digest


def _link(previous: str, values: list[Any]) -> str:
    return hashlib.sha256(f"{previous}\n{json.dumps(values)}".encode()).hexdigest()
