"""A ledger with a budget: check the budget and charge the ledger as one act, from any process of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fedveil.accounting.types import Event
from fedveil.errors import BudgetExhausted, LedgerError
from fedveil.ledger.budget import Budgets
from fedveil.ledger.entry import Entry
from fedveil.ledger.ledger import Ledger, Row


class BudgetedLedger:
    """Charges releases to one ledger file, each only if its budget allows; usable from forked and spawned workers.

    Each process opens its own connection when it first charges, and counts what the others charged before it checks. What an
    interrupted run wrote into the same ledger counts too, so a resumed run starts from what was really spent.

    Args:
        path: of an existing ledger. budgets: the caps, or None for a run that promises nothing.
        reproducible: noise is seeded, so that a round which is done again after an interruption releases the same vectors again
            and tells nothing new: a release that the ledger holds is not charged twice. With secret noise it is.
        run: name under which releases are charged, or None for that of each entry.
        population: the ledger of a budget that other runs share, charged first, so that a crash between the two over-counts.
    """

    def __init__(
        self,
        path: Path,
        budgets: Budgets | None,
        reproducible: bool = False,
        *,
        run: str | None = None,
        population: BudgetedLedger | None = None,
    ) -> None:
        self.path, self.budgets, self.reproducible = path, budgets, reproducible
        self.run, self.population = run, population
        self._read = 0
        self._held: dict[tuple[int, int], tuple[int, Entry]] = {}
        self._ledger: Ledger | None = None
        self._pid = 0

    def charge(self, entry: Entry) -> int:
        """Write and sync one release, before it is handed over; returns its number.

        Raises:
            BudgetExhausted: it would exceed the budget; nothing was written. LedgerError: it could not be written.
        """
        entry = self._named(entry)
        held = self._held_row(entry) if self.reproducible else None
        if held is not None and held[1] == entry:
            return held[0]
        if self.population is not None:
            self._charge_population(entry, self.population.charge)
        return self._charge(entry)

    def charge_once(self, entry: Entry, *, digest: str) -> int:
        """As `charge`, for what may leave once in its round: SHA-256 tells which bits, and the same bits again cost nothing.

        Args:
            digest: of the integers; it goes into the note.

        Raises:
            LedgerError: as `charge`; or other bits left in that round.
        """
        entry = replace(self._named(entry), note=f"released sha256 {digest}")
        held = self._held_row(entry)
        if held is None:
            if self.population is not None:
                self._charge_population(entry, partial(self.population.charge_once, digest=digest))
            return self._charge(entry)
        if held[1].note != entry.note:
            raise LedgerError(
                f"round {entry.round} was released before, and the state of its noise was lost or is an older copy, so that it "
                f"would leave with other noise: start anew. What {self.path} holds was released and still counts"
            )
        return held[0]

    def admits(self, client: int, event: Event) -> bool:
        """Whether each budget has room for a release of this cost, after all that any process charged so far."""
        try:
            self._check(client, event)
            return self.population is None or self.population.admits(client, event)
        except BudgetExhausted:
            return False

    def _check(self, client: int, event: Event) -> None:
        if self.budgets is not None:
            self.budgets.check(self._own(), client, event)

    def _charge_population(self, entry: Entry, charge: Callable[[Entry], int]) -> None:
        """Charge the shared budget, but nothing that our own would refuse."""
        self._check(entry.client, entry.event)
        try:
            charge(entry)
        except BudgetExhausted as refusal:
            raise BudgetExhausted(f"privacy.budget: {refusal}") from None

    def _named(self, entry: Entry) -> Entry:
        return entry if self.run is None else replace(entry, run=self.run)

    def rows(self, since: int) -> Iterator[Row]:
        """The releases with a number above `since`, whichever process charged them."""
        return self._own().entries(since)

    def _charge(self, entry: Entry) -> int:
        ledger = self._own()
        return ledger.charge(entry) if self.budgets is None else self.budgets.charge(ledger, [entry])[0]

    def _held_row(self, entry: Entry) -> tuple[int, Entry] | None:
        """The last row of that run, round and client; older rounds are forgotten."""
        for seq, _, old in self._own().entries(since=self._read):
            self._read = seq
            if old.run == entry.run:
                self._held[old.round, old.client] = seq, old
        self._held = {key: row for key, row in self._held.items() if key[0] >= entry.round}
        return self._held.get((entry.round, entry.client))

    def close(self) -> None:
        """Close this process's connections."""
        if self.population is not None:
            self.population.close()
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
        fresh = None if self.budgets is None else self.budgets.unspent()
        return {**self.__dict__, "budgets": fresh, "_ledger": None, "_pid": 0, "_read": 0, "_held": {}}
