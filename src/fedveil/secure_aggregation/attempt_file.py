"""Attempts of a run on the disk: those that a client has answered, and those that the server has named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fedveil.errors import LedgerError
from fedveil.ledger.files import owner_only, sync_path

Row = dict[str, Any]


class AttemptFile:
    """Rows of JSON that only grow; each is on the disk before `write` returns.

    A row that a crash cut off is dropped: what it announced was not sent.

    Args:
        path: of the file, made when first written; None stores the rows in memory, for simulations.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        content = path.read_bytes() if path is not None and path.exists() else b""
        self._whole = content.rfind(b"\n") + 1
        try:
            self.rows: list[Row] = [json.loads(line) for line in content[: self._whole].splitlines()]
            self._newest = max((int(row.get("attempt", 0)) for row in self.rows), default=0)
        except (ValueError, TypeError, AttributeError) as problem:
            raise LedgerError(f"{path} is damaged, so attempts could be answered twice: restore it from a backup") from problem

    @property
    def newest(self) -> int:
        """Return the newest attempt, or 0."""
        return self._newest

    def write(self, **row: Any) -> None:
        """Append a row and sync it.

        Raises:
            LedgerError: it is not on the disk; nothing may be sent.
        """
        if self.path is not None:
            self._append(self.path, json.dumps(row).encode() + b"\n")
        self.rows.append(row)
        self._newest = max(self._newest, int(row.get("attempt", 0)))

    def _append(self, path: Path, line: bytes) -> None:
        try:
            new = not path.exists()
            with open(path, "ab", opener=owner_only) as file:
                file.truncate(self._whole)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            if new:
                sync_path(path.parent)
        except OSError as problem:
            raise LedgerError(f"cannot write {path}: {problem.strerror}; nothing was sent: make room, then go on") from problem
        self._whole += len(line)
