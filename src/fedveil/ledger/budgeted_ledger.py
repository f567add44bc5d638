"""A ledger with a budget: the check and the charge as one act, and the ledger's totals."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedveil.accounting.types import Adjacency, Event, Scope, Unit, View
from fedveil.errors import BudgetExhausted, LedgerError
from fedveil.ledger.budget import Budgets
from fedveil.ledger.entry import Entry, event_from
from fedveil.ledger.ledger import Ledger


@dataclass(frozen=True)
class Total:
    """What one client (or the aggregate, -1) released under one scope.

    releases: how many, with multiplicity. sum_mu_squared: over the Gaussian ones (0 if none), in floating point, for display; a
    budget adds up exactly. sampled: how many were credited with a secret sample. unbounded: a reason why nothing can be proven,
    or None.
    """

    client: int
    unit: Unit
    adjacency: Adjacency
    view: View
    releases: int
    sum_mu_squared: float
    sampled: int
    first_round: int
    last_round: int
    unbounded: str | None


_GROUPS = "FROM release GROUP BY client, unit, adjacency, view"
_SUMMARY = f"""
SELECT client, unit, adjacency, view, sum(count), total(count * mu * mu),
       sum(CASE WHEN event IN ('gaussian', 'unbounded') THEN 0 ELSE count END), min(round), max(round), min(reason)
{_GROUPS} ORDER BY view, client, unit, adjacency LIMIT ?
"""


def summary(ledger: Ledger, most: int = -1) -> list[Total]:
    """Totals per client and scope of everything in the ledger; the first `most` of them, or all."""
    rows = ledger.select(_SUMMARY, (most,))
    return [Total(row[0], Unit(row[1]), Adjacency(row[2]), View(row[3]), *row[4:]) for row in rows]


def count_totals(ledger: Ledger) -> int:
    """How many totals `summary` has in all."""
    ((count,),) = ledger.select(f"SELECT count(*) FROM (SELECT 1 {_GROUPS})")
    return int(count)


_EVENT = "event, mu, rate, noise_multiplier"
_OF_SCOPE = "FROM release WHERE unit = ? AND adjacency = ? AND view = ?"


def charged(ledger: Ledger, scope: Scope) -> Iterator[tuple[int, int, Event]]:
    """(round, client, event) of each release under a scope, in the order of the ledger.

    Raises:
        LedgerError: a row is no release.
    """
    rows = ledger.select(f"SELECT round, client, {_EVENT}, count, reason {_OF_SCOPE} ORDER BY seq", _names(scope))
    for t, client, *event in rows:
        yield t, client, _event(*event)


def charged_since(ledger: Ledger, since: int) -> Iterator[tuple[int, int, Event]]:
    """(number, client, event) of each release with a number above `since`, under whichever scope, in the order of the ledger.

    Raises:
        LedgerError: a row is no release.
    """
    rows = ledger.select(f"SELECT seq, client, {_EVENT}, count, reason FROM release WHERE seq > ? ORDER BY seq", (since,))
    for seq, client, *event in rows:
        yield seq, client, _event(*event)


def charged_to(ledger: Ledger, scope: Scope, client: int, last_round: int) -> list[Event]:
    """What a client released under a scope until a round, equal events as one with their count.

    Raises:
        LedgerError: a row is no release.
    """
    which = f"{_OF_SCOPE} AND client = ? AND round <= ? GROUP BY {_EVENT}, reason"
    rows = ledger.select(f"SELECT {_EVENT}, sum(count), reason {which}", (*_names(scope), client, last_round))
    return [_event(*event) for event in rows]


def _names(scope: Scope) -> tuple[str, str, str]:
    return str(scope.unit), str(scope.adjacency), str(scope.view)


@lru_cache(maxsize=4096)
def _event(
    kind: str, mu: float | None, rate: float | None, noise_multiplier: float | None, count: int, reason: str | None
) -> Event:
    try:
        return event_from(kind, mu, rate, noise_multiplier, count, reason)
    except (TypeError, ValueError, IndexError) as problem:
        raise LedgerError(f"the ledger holds a row that is no release ({problem}): it is damaged; restore a backup") from problem


_WORDS = "released sha256 "


def naming_bits(entry: Entry, digest: str) -> Entry:
    """The row of a release with the SHA-256 digest (hex) of what left, in its note."""
    return replace(entry, note="; ".join(filter(None, (entry.note, _WORDS + digest))))


def named_bits(entry: Entry) -> str:
    """The digest that a row names, or an empty string."""
    return entry.note.partition(_WORDS)[2]


class BudgetedLedger:
    """Charges releases to one ledger file, each only if its budget allows; usable from forked and spawned workers.

    Each process opens its own connection when it first charges, and counts what the others charged before it checks. What an
    interrupted run wrote into the same ledger counts too, so a resumed run starts from what was really spent.

    Args:
        path: of an existing ledger. budgets: the caps, or None for a run that promises nothing.
        reproducible: noise is seeded, so that a round which is done again after an interruption releases the same vectors again
            and tells nothing new: a release that the ledger holds is not charged twice. With secret noise it is, unless its row
            names its bits (`named_bits`) and they are the same.
        run, client: name and number under which releases are charged, or None for those of each entry.
        population: the ledger of a budget that other runs share, charged first, so that a crash between the two over-counts.
    """

    def __init__(
        self,
        path: Path,
        budgets: Budgets | None,
        reproducible: bool = False,
        *,
        run: str | None = None,
        client: int | None = None,
        population: BudgetedLedger | None = None,
    ) -> None:
        self.path, self.budgets, self.reproducible = path, budgets, reproducible
        self.run, self.client, self.population = run, client, population
        self._read = 0
        self._held: dict[tuple[int, int], Entry] = {}
        self._ledger: Ledger | None = None
        self._pid = 0

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """Write and sync releases in one transaction, before any of them is handed over.

        Raises:
            BudgetExhausted: one would exceed its budget; nothing was written. LedgerError: they could not be written.
        """
        entries = [self._named(entry) for entry in entries]
        again = [entry for entry in entries if self.reproducible or named_bits(entry)]
        if again:
            held = self._held_rows(again[0].run, min(entry.round for entry in again))
            same = {(entry.round, entry.client) for entry in again if held.get((entry.round, entry.client)) == entry}
            entries = [entry for entry in entries if (entry.round, entry.client) not in same]
        if self.population is not None and entries:
            self._charge_population(entries, self.population.charge_all)
        self._charge(entries)

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """As `charge_all`, for what may leave once in its round: SHA-256 tells which bits, and the same bits again cost nothing.

        Args:
            digest: of the integers; it goes into the note.

        Raises:
            LedgerError: as `charge_all`; or other bits left in that round.
        """
        entry = naming_bits(self._named(entry), digest)
        held = self._held_rows(entry.run, entry.round).get((entry.round, entry.client))
        if held is None:
            if (population := self.population) is not None:
                self._charge_population([entry], lambda _: population.charge_once(entry, digest=digest))
            self._charge([entry])
        elif held.note != entry.note:
            raise LedgerError(
                f"round {entry.round} was released before, and the state of its noise was lost or is an older copy, so that it "
                f"would leave with other noise: start anew. What {self.path} holds was released and still counts"
            )

    def admits(self, client: int, event: Event) -> bool:
        """Whether each budget has room for a release of this cost, after all that any process charged so far."""
        try:
            self._check(client if self.client is None else self.client, event)
            return self.population is None or self.population.admits(client, event)
        except BudgetExhausted:
            return False

    def _check(self, client: int, event: Event) -> None:
        if self.budgets is not None:
            self.budgets.check(self._own(), client, event)

    def _charge_population(self, entries: Sequence[Entry], charge: Callable[[Sequence[Entry]], None]) -> None:
        """Charge the shared budget, but nothing that our own would refuse."""
        for entry in entries:
            self._check(entry.client, entry.event)
        try:
            charge(entries)
        except BudgetExhausted as refusal:
            raise BudgetExhausted(f"privacy.budget: {refusal}") from None

    def _named(self, entry: Entry) -> Entry:
        named = entry if self.run is None else replace(entry, run=self.run)
        return named if self.client is None else replace(named, client=self.client)

    def charged_since(self, since: int) -> Iterator[tuple[int, int, Event]]:
        """(number, client, event) of the releases with a number above `since`, whichever process charged them."""
        return charged_since(self._own(), since)

    def _charge(self, entries: Sequence[Entry]) -> None:
        if self.budgets is None:
            self._own().charge_many(entries)
        else:
            self.budgets.charge(self._own(), entries)

    def _held_rows(self, run: str, first: int) -> dict[tuple[int, int], Entry]:
        """The last row of each round and client of that run, from the round `first` on; older rounds are forgotten."""
        for seq, _, old in self._own().entries(since=self._read):
            self._read = seq
            if old.run == run:
                self._held[old.round, old.client] = old
        self._held = {key: row for key, row in self._held.items() if key[0] >= first}
        return self._held

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
