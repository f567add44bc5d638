"""What a replay records beside the door: the randomness that it draws from, and the ledger that it charges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from fedveil.adversary.replay_notes import Diary
from fedveil.errors import BudgetExhausted
from fedveil.release.release_row import Charger

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.accounting.types import Event
    from fedveil.ledger.budget import Budgets
    from fedveil.ledger.entry import Entry
    from fedveil.ledger.ledger import Ledger
    from fedveil.release.noise import Randomness

ROWS = "ledger rows"


class RecordedRandomness:
    """The run's randomness; `drawn` lists each draw of noise since it was last emptied: its std in grid steps, and the noise."""

    def __init__(self, own: Randomness) -> None:
        self.own = own
        self.drawn: list[tuple[NDArray[np.float64], NDArray[np.int64]]] = []

    def __getattr__(self, name: str) -> Any:
        if name == "own":
            raise AttributeError(name)
        return getattr(self.own, name)

    def integers(self, std: float | NDArray[np.float64], n: int, *name: object, threads: int | None = None) -> NDArray[np.int64]:
        noise = self.own.integers(std, n, *name, threads=threads)
        self.drawn.append((np.broadcast_to(std, n), noise.copy()))
        return noise


class RecordedLedger:
    """The run's ledger; its rows are noted as soon as they are charged."""

    def __init__(self, own: Charger, diary: Diary) -> None:
        self.own, self.diary = own, diary

    def charge_all(self, entries: Sequence[Entry]) -> None:
        self.own.charge_all(entries)
        for entry in entries:
            self.diary.note("public", ROWS, entry.round, entry.client, entry)

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        self.own.charge_once(entry, digest=digest)
        self.diary.note("public", ROWS, entry.round, entry.client, entry)

    def admits(self, client: int, event: Event) -> bool:
        return self.own.admits(client, event)


class RowsInMemory:
    """The run's budgets over rows in memory: nothing of a replay needs to survive it."""

    def __init__(self, budgets: Budgets | None) -> None:
        self.budgets = budgets
        self.rows: list[Entry] = []

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """The rows, if the budget allows them."""
        if self.budgets is None:
            self.charge_many(entries)
        else:
            self.budgets.charge(cast("Ledger", self), entries)

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """As `charge_all`: no round of a replay is done again."""
        self.charge_all([entry])

    def admits(self, client: int, event: Event) -> bool:
        try:
            if self.budgets is not None:
                self.budgets.check(cast("Ledger", self), client, event)
        except BudgetExhausted:
            return False
        return True

    def charge_many(self, entries: Sequence[Entry], admit: Callable[[], None] | None = None) -> list[int]:
        if admit is not None:
            admit()
        self.rows.extend(entries)
        return list(range(len(self.rows) - len(entries) + 1, len(self.rows) + 1))

    def entries(self, since: int = 0) -> Iterator[tuple[int, float, Entry]]:
        return ((number, 0.0, self.rows[number - 1]) for number in range(since + 1, len(self.rows) + 1))
