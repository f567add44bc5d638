"""A forger's tools: the ledger of a run as plain values, and written again with or without digests that fit."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HIDDEN = ("time", "participants", "nonce")


@dataclass
class ForgedLedger:
    """Opening, rows and closing of a ledger, to be changed and written."""

    path: Path
    meta: dict[str, str]
    rows: list[dict[str, Any]]
    closing: dict[str, Any] | None

    @classmethod
    def read(cls, run: Path) -> ForgedLedger:
        """The ledger of a run directory."""
        path = run / "ledger.sqlite"
        with closing(sqlite3.connect(path)) as db:
            db.row_factory = sqlite3.Row
            rows = [dict(row) for row in db.execute("SELECT * FROM release ORDER BY seq")]
            end = db.execute("SELECT * FROM closing").fetchone()
            return cls(path, dict(tuple(r) for r in db.execute("SELECT key, value FROM meta")), rows, end and dict(end))

    def write(self, *, coherent: bool) -> None:
        """Put it in the place of the one that was read; coherent: with numbers, seals, chain, head and closing that fit."""
        if coherent:
            self._fit()
        with closing(sqlite3.connect(self.path, isolation_level=None)) as old:
            schema = old.execute("SELECT type, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY rowid").fetchall()
            pragmas = {name: old.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")}
        self.path.unlink()
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = OFF")
            for name, value in pragmas.items():
                db.execute(f"PRAGMA {name} = {value}")
            db.execute("BEGIN")
            for sql in (sql for kind, sql in schema if kind == "table"):
                db.execute(sql)
            for table, rows in (("meta", self._meta_rows()), ("release", self.rows), ("closing", [self.closing])):
                for row in filter(None, rows):
                    places = ", ".join("?" * len(row))
                    db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({places})", list(row.values()))
            for sql in (sql for kind, sql in schema if kind != "table"):
                db.execute(sql)
            db.execute("COMMIT")

    def bind(self, run: Path) -> None:
        """Put the digests of the files that lie there into opening and closing."""
        if (own := run / "private" / "digests.json").exists():
            own.write_text(json.dumps(_digests(run, json.loads(own.read_text())), indent=2) + "\n")
        opening = json.loads(self.meta["meta"])
        opening["files"] = _digests(run, opening["files"])
        self.meta["meta"] = json.dumps(opening, sort_keys=True)
        if self.closing is not None:
            content = json.loads(self.closing["content"])
            content["files"] = _digests(run, content["files"])
            self.closing["content"] = json.dumps(content, sort_keys=True)

    def _meta_rows(self) -> list[dict[str, str]]:
        return [{"key": key, "value": value} for key, value in self.meta.items()]

    def _fit(self) -> None:
        chain = link("", [text for item in sorted(self.meta.items()) for text in item])
        for i, row in enumerate(self.rows):
            row["seq"] = i + 1
            if row["nonce"] is not None:
                secret = f"{row['nonce']}\n{json.dumps([row['time'], row['participants']])}"
                row["sealed"] = hashlib.sha256(secret.encode()).hexdigest()
            chain = link(chain, [value for name, value in row.items() if name not in (*_HIDDEN, "digest")])
            row["digest"] = chain
        last = chain if self.rows else "0" * 64
        self.path.with_name("ledger.sqlite-head").write_text(f"fedveil ledger head {len(self.rows):020d} {last}\n")
        if self.closing is not None:
            self.closing["seq"] = len(self.rows)
            self.closing["digest"] = link(chain, ["closing", len(self.rows), self.closing["content"]])


def link(previous: str, values: list[Any]) -> str:
    """One step of the chain."""
    return hashlib.sha256(f"{previous}\n{json.dumps(values)}".encode()).hexdigest()


def content(run: Path) -> list[str]:
    """Everything that a ledger holds, whatever the bytes of its file."""
    with closing(sqlite3.connect(f"file:{run / 'ledger.sqlite'}?mode=ro&immutable=1", uri=True)) as db:
        return list(db.iterdump())


def _digests(run: Path, files: dict[str, str]) -> dict[str, str]:
    """As fedveil.experiment.verification makes them: the salt goes before what is private."""
    secret = run / "private" / "salt"
    salt = secret.read_bytes() if secret.exists() else b""
    there = {name: run / name for name in files if (run / name).exists()}
    return {
        name: hashlib.sha256((salt if name.startswith("private/") else b"") + file.read_bytes()).hexdigest()
        for name, file in there.items()
    }
