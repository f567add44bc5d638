"""Attempts of a run on the disk: those that a client has answered, and those that the server has named."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedveil.errors import LedgerError
from fedveil.ledger.files import owner_only, sync_path

Row = dict[str, Any]
_RESTORE = "restore its newest copy"


class AttemptFile:
    """Rows of JSON that only grow; each is on the disk before `write` returns.

    A row that a crash cut off is dropped: what it announced was not sent. The file is read again when another process has written
    to it, so that processes which share a folder, and lock it while they answer, count one another's attempts.

    Args:
        path: of the file, made when first written; None stores the rows in memory, for simulations.

    Raises:
        LedgerError: the file is damaged; from all that read it, also if it became shorter since.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._rows: list[Row] = []
        self._whole = self._size = self._newest = 0
        self._follow()

    @property
    def rows(self) -> Sequence[Row]:
        """Return all rows, those of other processes included."""
        self._follow()
        return self._rows

    @property
    def newest(self) -> int:
        """Return the newest attempt, or 0."""
        self._follow()
        return self._newest

    def write(self, **row: Any) -> None:
        """Append a row and sync it.

        Raises:
            LedgerError: it is not on the disk; nothing may be sent.
        """
        self._follow()
        if self.path is not None:
            self._append(self.path, json.dumps(row).encode() + b"\n")
        self._count(row)

    def _follow(self) -> None:
        """Read what was appended since the last look."""
        size = self.path.stat().st_size if self.path is not None and self.path.exists() else 0
        if self.path is None or size == self._size:
            return
        if size < self._whole:
            raise LedgerError(f"{self.path} became shorter while it was in use, so attempts could be answered twice: {_RESTORE}")
        with open(self.path, "rb") as file:
            file.seek(self._whole)
            content = file.read()
        whole = content.rfind(b"\n") + 1
        try:
            for line in content[:whole].splitlines():
                self._count(json.loads(line))
        except (ValueError, TypeError, AttributeError) as problem:
            raise LedgerError(f"{self.path} is damaged, so attempts could be answered twice: {_RESTORE}") from problem
        self._whole, self._size = self._whole + whole, size

    def _count(self, row: Row) -> None:
        self._newest = max(self._newest, int(row.get("attempt", 0)))
        self._rows.append(row)

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
            with suppress(OSError):  # a row that nobody announced
                os.truncate(path, self._whole)
            raise LedgerError(f"cannot write {path}: {problem.strerror}; nothing was sent: make room, then go on") from problem
        self._whole = self._size = self._whole + len(line)
