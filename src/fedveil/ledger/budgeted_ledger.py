"""A ledger with a budget: check and charge in one step, and totals of a ledger."""

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
    """Totals of one client (or the aggregate, -1) under one scope.

    releases: their number, with multiplicity. sum_mu_squared: over the Gaussian ones (0 if none), in floating point, for display;
    a budget adds up exactly. sampled: number of releases credited with a secret sample. unbounded: a reason why no cost can be
    proven, or None.
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
    """Return the totals per client and scope of all releases in the ledger; only the first `most` of them if given."""
    rows = ledger.select(_SUMMARY, (most,))
    return [Total(row[0], Unit(row[1]), Adjacency(row[2]), View(row[3]), *row[4:]) for row in rows]


def count_totals(ledger: Ledger) -> int:
    """Return the number of all totals of `summary`."""
    ((count,),) = ledger.select(f"SELECT count(*) FROM (SELECT 1 {_GROUPS})")
    return int(count)


@dataclass(frozen=True)
class RoundOfReleases:
    """The releases of a round in words, and their cost. releases: rows of the ledger."""

    round: int
    releases: int
    released: str
    cost: str


def released_by_round(ledger: Ledger) -> list[RoundOfReleases]:
    """Return what was released in each round, in the order of the rounds."""
    columns = (
        "round, count(*), min(client), max(participants), max(coordinates), min(event), max(mu), max(rate), min(noise_multiplier)"
    )
    rows = ledger.select(f"SELECT {columns} FROM release GROUP BY round ORDER BY round")
    return [_round_of(*row) for row in rows]


def _round_of(
    t: int, n: int, client: int, participants: int | None, size: int, event: str, *cost: float | None
) -> RoundOfReleases:
    mu, rate, noise = cost
    numbers = f"{size:,} numbers"
    if client < 0:
        what = f"sum of {'the' if participants is None else f'{participants:,}'} updates, {numbers}"
    else:
        what = f"{n:,} {'update' if n == 1 else 'updates'}, {numbers} each"
    if event == "unbounded":
        return RoundOfReleases(t, n, what, "unbounded")
    if noise is None:
        return RoundOfReleases(t, n, what, "" if mu is None else f"mu {mu:.4g}")
    return RoundOfReleases(t, n, what, f"noise multiplier {noise:.4g}" + ("" if rate is None else f", sampled at {rate:.4g}"))


_EVENT = "event, mu, rate, noise_multiplier"
_OF_SCOPE = "FROM release WHERE unit = ? AND adjacency = ? AND view = ?"


def charged(ledger: Ledger, scope: Scope) -> Iterator[tuple[int, int, Event]]:
    """Yield (round, client, event) of each release under a scope, in the order of the ledger.

    Raises:
        LedgerError: a row is not a valid release.
    """
    rows = ledger.select(f"SELECT round, client, {_EVENT}, count, reason {_OF_SCOPE} ORDER BY seq", _names(scope))
    for t, client, *event in rows:
        yield t, client, _event(*event)


def charged_since(ledger: Ledger, since: int) -> Iterator[tuple[int, int, Event]]:
    """Yield (number, client, event) of each release with a number above `since`, under any scope, in the order of the ledger.

    Raises:
        LedgerError: a row is not a valid release.
    """
    rows = ledger.select(f"SELECT seq, client, {_EVENT}, count, reason FROM release WHERE seq > ? ORDER BY seq", (since,))
    for seq, client, *event in rows:
        yield seq, client, _event(*event)


def charged_to(ledger: Ledger, scope: Scope, client: int, last_round: int) -> list[Event]:
    """Return the events of a client under a scope up to and including a round, merging equal events into one with their count.

    Raises:
        LedgerError: a row is not a valid release.
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
        raise LedgerError(f"the ledger has a row that is not a release ({problem}): it is damaged; restore a backup") from problem


_WORDS = "released sha256 "


def naming_bits(entry: Entry, digest: str) -> Entry:
    """Add the SHA-256 digest (hex) of the released integers to the note of an entry."""
    return replace(entry, note="; ".join(filter(None, (entry.note, _WORDS + digest))))


def named_bits(entry: Entry) -> str:
    """Return the digest in the note of an entry, or an empty string."""
    return entry.note.partition(_WORDS)[2]


class BudgetedLedger:
    """Ledger file that is charged only within its budget; usable from forked and spawned workers.

    Each process opens its own connection on its first charge, and counts the others' charges before it checks. Charges of an
    interrupted run in the same ledger count too, so a resumed run starts from the true spent cost.

    Args:
        path: of an existing ledger. budgets: the caps, or None for a run without a budget.
        reproducible: noise is seeded, so a round that is repeated after an interruption releases the same vectors and reveals
            nothing new: a release that the ledger holds is not charged twice. With secret noise it is charged again, unless its
            row contains the digest of the same integers (`named_bits`).
        run, client: name and number under which releases are charged, or None for those of each entry.
        population: ledger of a budget shared with other runs, charged first, so that a crash between the two over-counts.
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
        self._recorded: dict[tuple[int, int], Entry] = {}
        self._ledger: Ledger | None = None
        self._pid = 0

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """Write and sync releases in one transaction; call it before any of them is made.

        Raises:
            BudgetExhausted: a release would exceed its budget; nothing was written. LedgerError: writing failed.
        """
        entries = [self._named(entry) for entry in entries]
        again = [entry for entry in entries if self.reproducible or named_bits(entry)]
        if again:
            recorded = self._recorded_rows(again[0].run, min(entry.round for entry in again))
            repeated = {(entry.round, entry.client) for entry in again if recorded.get((entry.round, entry.client)) == entry}
            entries = [entry for entry in entries if (entry.round, entry.client) not in repeated]
        if self.population is not None and entries:
            self._charge_population(entries, self.population.charge_all)
        self._charge(entries)

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """Charge a release that may be made only once in its round; repeating it with the same SHA-256 costs nothing.

        Args:
            digest: of the released integers; it is added to the note.

        Raises:
            LedgerError: as `charge_all`, or if other integers were released in that round.
        """
        entry = naming_bits(self._named(entry), digest)
        recorded = self._recorded_rows(entry.run, entry.round).get((entry.round, entry.client))
        if recorded is None:
            if (population := self.population) is not None:
                self._charge_population([entry], lambda _: population.charge_once(entry, digest=digest))
            self._charge([entry])
        elif recorded.note != entry.note:
            raise LedgerError(
                f"round {entry.round} was released before, and the state of its noise was lost or is an older copy, so a "
                f"repeated release would have other noise: start a new run. The releases in {self.path} still count"
            )

    def admits(self, client: int, event: Event) -> bool:
        """Return whether a release of this cost fits into each budget, after all charges of any process so far."""
        try:
            self._check(client if self.client is None else self.client, event)
            return self.population is None or self.population.admits(client, event)
        except BudgetExhausted:
            return False

    def _check(self, client: int, event: Event) -> None:
        if self.budgets is not None:
            self.budgets.check(self._open_ledger(), client, event)

    def _charge_population(self, entries: Sequence[Entry], charge: Callable[[Sequence[Entry]], None]) -> None:
        """Charge the shared budget, but only releases that this ledger's budget admits."""
        for entry in entries:
            self._check(entry.client, entry.event)
        try:
            charge(entries)
        except BudgetExhausted as refusal:
            raise BudgetExhausted(f"privacy.budget: {refusal}") from None

    def _named(self, entry: Entry) -> Entry:
        named = entry if self.run is None else replace(entry, run=self.run)
        return named if self.client is None else replace(named, client=self.client)

    def check_continues(self, position: tuple[int, str]) -> None:
        """Refuse a ledger that has been replaced, or set back, since it had that position.

        Raises:
            LedgerError: it is another ledger, or lacks releases.
        """
        if not self._open_ledger().continues(position):
            raise LedgerError(
                f"{self.path} was replaced, or set back to an older copy, while it was in use: {position[0]} releases were "
                f"charged to it, which still count. Nothing was released: put it back together with its -head"
            )

    @property
    def position(self) -> tuple[int, str]:
        """Return the number of releases of all runs, and the digest of the last one."""
        return self._open_ledger().position

    @property
    def runs(self) -> frozenset[str]:
        """Return the names of all runs that have charged this ledger."""
        return frozenset(name for (name,) in self._open_ledger().select("SELECT DISTINCT run FROM release"))

    def charged_since(self, since: int) -> Iterator[tuple[int, int, Event]]:
        """Yield (number, client, event) of the releases with a number above `since`, by any process."""
        return charged_since(self._open_ledger(), since)

    def _charge(self, entries: Sequence[Entry]) -> None:
        if self.budgets is None:
            self._open_ledger().charge_many(entries)
        else:
            self.budgets.charge(self._open_ledger(), entries)

    def _recorded_rows(self, run: str, first: int) -> dict[tuple[int, int], Entry]:
        """Return the last row of each round and client of that run, from round `first` on, dropping older rounds."""
        for seq, _, old in self._open_ledger().entries(since=self._read):
            self._read = seq
            if old.run == run:
                self._recorded[old.round, old.client] = old
        self._recorded = {key: row for key, row in self._recorded.items() if key[0] >= first}
        return self._recorded

    def close(self) -> None:
        """Close this process's connections."""
        if self.population is not None:
            self.population.close()
        if self._ledger is not None and self._is_ours():
            self._ledger.close()
        self._ledger = None

    def _open_ledger(self) -> Ledger:
        if self._ledger is None or not self._is_ours():
            self._ledger, self._pid = Ledger.open(self.path), os.getpid()
        return self._ledger

    def _is_ours(self) -> bool:
        return self._pid == os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        fresh = None if self.budgets is None else self.budgets.unspent()
        return {**self.__dict__, "budgets": fresh, "_ledger": None, "_pid": 0, "_read": 0, "_recorded": {}}
