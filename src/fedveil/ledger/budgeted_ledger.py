"""The till: check the budget and charge the ledger as one act, from any process of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedveil.ledger.budget import Budgets
from fedveil.ledger.entry import Entry
from fedveil.ledger.ledger import Ledger


class Till:
    """Charges releases to one ledger file, each only if its budget allows; usable from forked and spawned workers.

    Each process opens its own connection when it first charges, and counts what the others charged before it checks. What an
    interrupted run wrote into the same ledger counts too, so a resumed run starts from what was really spent.

    Args:
        path: of an existing ledger. budgets: the caps, or None for a run that promises nothing.
        reproducible: noise is seeded, so that a round which is done again after an interruption releases the same vectors again
            and tells nothing new: a release that the ledger holds is not charged twice. With secret noise it is.
    """

    def __init__(self, path: Path, budgets: Budgets | None, reproducible: bool = False) -> None:
        self.path, self.budgets, self.reproducible = path, budgets, reproducible
        self._read = 0
        self._held: dict[tuple[int, int], tuple[int, Entry]] = {}
        self._ledger: Ledger | None = None
        self._pid = 0

    def charge(self, entry: Entry) -> int:
        """Write and sync one release, before it is handed over; returns its number.

        Raises:
            BudgetExhausted: it would exceed the budget; nothing was written. LedgerError: it could not be written.
        """
        ledger = self._own()
        if self.reproducible:
            held = self._holds(ledger, entry)
            if held is not None:
                return held
        if self.budgets is None:
            return ledger.charge(entry)
        return self.budgets.charge(ledger, [entry])[0]

    def _holds(self, ledger: Ledger, entry: Entry) -> int | None:
        for seq, _, old in ledger.entries(since=self._read):
            self._read = seq
            self._held[old.round, old.client] = seq, old
        self._held = {key: row for key, row in self._held.items() if key[0] >= entry.round}
        held = self._held.get((entry.round, entry.client))
        return held[0] if held is not None and held[1] == entry else None

    def close(self) -> None:
        """Close this process's connection."""
        if self._ledger is not None and self._is_ours():
            self._ledger.close()
        self._ledger = None

    def _own(self) -> Ledger:
        if self._ledger is None or not self._is_ours():
            self._ledger, self._pid = Ledger.open(self.path), os.getpid()
        return self._ledger

    def _is_ours(self) -> bool:
        return self._pid == os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        fresh = None if self.budgets is None else Budgets(self.budgets.filter, self.budgets.scope, self.budgets.others)
        return {**self.__dict__, "budgets": fresh, "_ledger": None, "_pid": 0, "_read": 0, "_held": {}}
