"""The record of one run of a replay (a world): values, randomness and charges, and the comparison of two values."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch

from fedveil.errors import BudgetExhausted
from fedveil.executors.pool_messages import pack
from fedveil.release.release_layout import Charger

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.accounting.types import Event
    from fedveil.ledger.budget import Budgets
    from fedveil.ledger.entry import Entry
    from fedveil.ledger.ledger import Ledger
    from fedveil.release.noise import Randomness


Kind = Literal["public", "verdict", "private", "release"]


@dataclass(frozen=True)
class Note:
    """One recorded value of a world.

    Args:
        kind: `public` values must be equal in both worlds; a `verdict` is the text of a problem in this world, or empty;
            `private` values are measured for a check; a `release` is to be replayed.
        check: the check that uses the note. round, client: where it was taken; client -1 stands for the whole round.
        value: a copy of the value at that time.
    """

    kind: Kind
    check: str
    round: int
    client: int
    value: Any

    @property
    def place(self) -> str:
        return f"round {self.round}" + (f", client {self.client}" if self.client >= 0 else "")


class Diary:
    """The notes of one world. Each process appends to its own file, so that a recorded value cannot change later."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._owner, self._file = 0, -1

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_owner": 0}

    def note(self, kind: Kind, check: str, round: int, client: int, value: Any) -> None:
        if self._owner != os.getpid():  # a new file also after a fork
            path = self.folder / f"{os.getpid()}.notes"
            self._owner, self._file = os.getpid(), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        message = pack(Note(kind, check, round, client, value))
        while message:
            message = message[os.write(self._file, message) :]

    def close(self) -> None:
        """Close the file of this process."""
        if self._owner == os.getpid():
            os.close(self._file)
            self._owner = 0

    def verdict(self, check: str, round: int, client: int, problem: str) -> None:
        """Record the result of a check of this world: a problem, or an empty string."""
        self.note("verdict", check, round, client, problem)

    def read(self) -> list[Note]:
        """Return all notes, process by process in their order."""
        notes: list[Note] = []
        for path in sorted(self.folder.glob("*.notes")):
            with path.open("rb") as file:
                end = path.stat().st_size
                while file.tell() < end:
                    notes.append(pickle.load(file))
        return notes


def difference(a: Any, b: Any, path: str = "") -> str:
    """Return where two plain values first differ, with both values; an empty string if they are equal (numbers exactly)."""
    named = f"{path}: " if path else ""
    if type(a) is not type(b):
        return f"{named}{_brief(a)} against {_brief(b)}"
    if isinstance(a, torch.Tensor):
        return _arrays(a.detach().numpy(), b.detach().numpy(), named)
    if isinstance(a, np.ndarray):
        return _arrays(a, b, named)
    if isinstance(a, Mapping):
        return _entries(dict(a), dict(b), path)
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{named}{len(a)} ({_brief(a)}) against {len(b)} ({_brief(b)})"
        return _entries(dict(enumerate(a)), dict(enumerate(b)), path)
    if is_dataclass(a) and not isinstance(a, type):
        one, two = ({f.name: getattr(value, f.name) for f in fields(value)} for value in (a, b))
        return _entries(one, two, path)
    same = a == b or pickle.dumps(a) == pickle.dumps(b)  # for NaN, and for objects without __eq__
    return "" if same else f"{named}{_brief(a)} against {_brief(b)}"


def _entries(a: dict[Any, Any], b: dict[Any, Any], path: str) -> str:
    named = f"{path}: " if path else ""
    if a.keys() != b.keys():
        return f"{named}{_brief(sorted(map(str, a)))} against {_brief(sorted(map(str, b)))}"
    return next(filter(None, (difference(a[key], b[key], f"{path}.{key}" if path else str(key)) for key in a)), "")


def _arrays(a: np.ndarray, b: np.ndarray, named: str) -> str:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{named}{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}"
    same = (a == b) | ((a != a) & (b != b))
    if same.all():
        return ""
    flat = int(np.flatnonzero(~same.reshape(-1))[0])
    first, second = (array.reshape(-1)[flat].item() for array in (a, b))
    return f"{named}{int((~same).sum())} of {a.size} numbers, at {flat} {first:g} against {second:g}"


def _brief(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {list(value.shape)}"
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


ROWS = "ledger rows"


class RecordedRandomness:
    """The run's randomness; `drawn` lists (std in grid steps, noise) of each draw since the list was last cleared."""

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
    """The run's ledger; each row is recorded as soon as it is charged."""

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
    """The run's budgets with rows in memory, since a replay need not be durable."""

    def __init__(self, budgets: Budgets | None) -> None:
        self.budgets = budgets
        self.rows: list[Entry] = []

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """Add the rows if the budget allows them."""
        if self.budgets is None:
            self.charge_many(entries)
        else:
            self.budgets.charge(cast("Ledger", self), entries)

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """Add one row as `charge_all` does, since a replay never repeats a round."""
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
