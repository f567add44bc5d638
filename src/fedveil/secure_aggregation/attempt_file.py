"""Attempts of a run on the disk: those that a client has answered, and those that the server has named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedveil.errors import LedgerError
from fedveil.ledger.files import RESTORE, LineFile

Row = dict[str, Any]


class AttemptFile:
    """Rows of JSON that only grow; each is on the disk before `write` returns (see `LineFile`).

    Args:
        path: of the file, made when first written; None stores the rows in memory, for simulations.

    Raises:
        LedgerError: the file is damaged, or became shorter since it was read; from all that read it.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._file = None if path is None else LineFile(path)
        self._rows: list[Row] = []
        self._newest = 0
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
        if self._file is not None:
            self._file.append(json.dumps(row))
        self._count(row)

    def _follow(self) -> None:
        try:
            for line in () if self._file is None else self._file.lines[len(self._rows) :]:
                self._count(json.loads(line))
        except (ValueError, TypeError, AttributeError) as problem:
            raise LedgerError(f"{self.path} is damaged, so attempts could be answered twice: {RESTORE}") from problem

    def _count(self, row: Row) -> None:
        self._newest = max(self._newest, int(row.get("attempt", 0)))
        self._rows.append(row)
