"""Reservations on a shared budget: what each run has planned and not yet spent, until it ends.

They are in a file next to the budget, PATH-reserved, which is read and written under the ledger's write lock. They only decide
whether a release fits. What was released is in the ledger alone, so losing this file never loses a release.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from fedveil.accounting.types import Scope
from fedveil.errors import LedgerError
from fedveil.ledger.budget import Budgets, Filter
from fedveil.ledger.files import replace_whole
from fedveil.ledger.ledger import Row


@dataclass(frozen=True)
class Reservation:
    """The planned cost of a run for each client in [first, stop)."""

    first: int
    stop: int
    cost: Fraction

    def __contains__(self, client: int) -> bool:
        return self.first <= client < self.stop


def intervals(clients: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield the clients as intervals [first, stop)."""
    if isinstance(clients, range) and clients.step == 1:
        yield clients.start, clients.stop
        return
    first = stop = None
    for client in sorted(clients):
        if client != stop:
            if first is not None and stop is not None:
                yield first, stop
            first = client
        stop = client + 1
    if first is not None and stop is not None:
        yield first, stop


def reserved_path(path: Path) -> Path:
    """Return the file with the reservations of the budget at `path`."""
    return path.with_name(path.name + "-reserved")


def read_reservations(path: Path) -> dict[str, tuple[Reservation, ...]]:
    """Return the reservations of the budget at `path`, by run.

    Raises:
        LedgerError: the file is damaged.
    """
    file = reserved_path(path)
    try:
        content: dict[str, list[Any]] = json.loads(file.read_text(encoding="utf-8"))
        return {
            run: tuple(Reservation(int(first), int(stop), Fraction(cost)) for first, stop, cost in rows)
            for run, rows in content.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, ZeroDivisionError) as problem:
        raise LedgerError(
            f"{file} cannot be read ({problem}): it only holds what runs have reserved, and no release; remove it when none of "
            f"the budget's runs is in progress"
        ) from None


def write_reservations(path: Path, reservations: Mapping[str, Iterable[Reservation]]) -> None:
    """Replace the reservations of the budget at `path`; call it under the ledger's write lock."""
    content = {run: [[one.first, one.stop, str(one.cost)] for one in rows] for run, rows in reservations.items()}
    replace_whole(reserved_path(path), json.dumps(content).encode(), private=True)


class Fit(NamedTuple):
    """Whether a run fits: what is free of the budget, what the run still asks, and what others hold.

    client: None for one of whom nothing was released yet.
    """

    client: int | None
    free: Fraction
    asked: Fraction
    held: Fraction


class SharedBudgets(Budgets):
    """Budgets of a ledger that runs share: a release of one run leaves room for what the others have reserved.

    Args:
        path: of the ledger. run: the run that is charged.
    """

    def __init__(self, path: Path, filter: Filter, scope: Scope, run: str) -> None:
        super().__init__(filter, scope)
        self.path, self.run = path, run
        self._reserved: dict[str, tuple[Reservation, ...]] = {}
        self._file: tuple[int, ...] | None = None
        self._by_run: dict[str, dict[int, Fraction]] = {}

    def unspent(self) -> SharedBudgets:
        return SharedBudgets(self.path, self.filter, self.scope, self.run)

    def replay(self, rows: Iterable[Row]) -> None:
        for row in rows:
            seq, _, entry = row
            if seq <= self.seen:
                continue
            before = self.of(entry.client).spent
            super().replay([row])
            of_run = self._by_run.setdefault(entry.run, {})
            of_run[entry.client] = of_run.get(entry.client, Fraction(0)) + self.of(entry.client).spent - before

    def spent_by(self, run: str, client: int) -> Fraction:
        """Return the cost of a run's releases for a client, as far as they were replayed."""
        return self._by_run.get(run, {}).get(client, Fraction(0))

    def held(self, client: int) -> Fraction:
        """Return what other runs have reserved for a client and not yet spent."""
        return sum((self.outstanding(run, client) for run in self.reserved if run != self.run), Fraction(0))

    def outstanding(self, run: str, client: int) -> Fraction:
        """Return what a run has reserved for a client and not yet spent."""
        cost = sum((one.cost for one in self.reserved.get(run, ()) if client in one), Fraction(0))
        return max(cost - self.spent_by(run, client), Fraction(0))

    def shares(self) -> dict[str, Fraction]:
        """Return, by run, the largest unspent reservation that it has for any client."""
        return {run: max((self._most(run, one) for one in rows), default=Fraction(0)) for run, rows in self.reserved.items()}

    def _most(self, run: str, one: Reservation) -> Fraction:
        spent = [cost for client, cost in self._by_run.get(run, {}).items() if client in one]
        least = min(spent) if len(spent) == one.stop - one.first else Fraction(0)
        return max(one.cost - least, Fraction(0))

    @property
    def reserved(self) -> dict[str, tuple[Reservation, ...]]:
        """Return the reservations by run, reading the file if it has changed."""
        try:
            status = os.stat(reserved_path(self.path))
            file: tuple[int, ...] | None = (status.st_ino, status.st_mtime_ns, status.st_size)
        except FileNotFoundError:
            file = None
        if file != self._file:
            self._reserved, self._file = read_reservations(self.path), file
        return self._reserved

    def tightest(self, cost: Fraction, clients: Collection[int]) -> Fit:
        """Return the fit of the client with the least to spare; `cost` is that of the whole run, what it has spent included."""
        fits = [Fit(None, self.filter.limit, cost, Fraction(0))]
        for client in [known for known in self.clients if known in clients]:
            budget, held = self.of(client), self.held(client)
            free = Fraction(0) if budget.blocked else self.filter.limit - budget.spent - held
            fits.append(Fit(client, free, max(cost - self.spent_by(self.run, client), Fraction(0)), held))
        starts = {one.first for rows in self.reserved.values() for one in rows} | {first for first, _ in intervals(clients)}
        for start in [client for client in starts if client in clients]:  # as for a client of whom nothing was released yet
            planned = [one.cost for run, rows in self.reserved.items() if run != self.run for one in rows if start in one]
            held = sum(planned, Fraction(0))
            fits.append(Fit(None, self.filter.limit - held, cost, held))
        return min(fits, key=lambda fit: fit.free - fit.asked)
