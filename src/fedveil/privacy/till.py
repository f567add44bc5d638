"""The till: check the budget and charge the ledger as one act, from any process of a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedveil.privacy.budget import Budgets
from fedveil.privacy.entry import Entry
from fedveil.privacy.ledger import Ledger


class Till:
    """Charges releases to one ledger file, each only if its budget allows; usable from forked and spawned workers.

    Each process opens its own connection when it first charges, and counts what the others charged before it checks. What an
    interrupted run wrote into the same ledger counts too, so a resumed run starts from what was really spent.

    Args:
        path: of an existing ledger. budgets: the caps, or None for a run that promises nothing.
    """

    def __init__(self, path: Path, budgets: Budgets | None) -> None:
        self.path, self.budgets = path, budgets
        self._ledger: Ledger | None = None
        self._pid = 0

    def charge(self, entry: Entry) -> int:
        """Write and sync one release, before it is handed over; returns its number.

        Raises:
            BudgetExhausted: it would exceed the budget; nothing was written. LedgerError: it could not be written.
        """
        ledger = self._own()
        if self.budgets is None:
            return ledger.charge(entry)
        return self.budgets.charge(ledger, [entry])[0]

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
        return {"path": self.path, "budgets": fresh, "_ledger": None, "_pid": 0}
