"""A round on its way to the disk: what it changed, and the thread that writes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class UnsavedRound:
    """What one round changed, as it was when the round was over; nothing of it changes while the next round's clients train.

    Args:
        took_part: clients, with the rounds that each took part in. states: of clients; current: the round that last
            changed each client's.
        parts: of the common file; previous: the file of the model before, where it is not among them.
        line: of the journal. spent: clients whose caps were spent. position: of the ledger.
    """

    number: int
    took_part: dict[int, int]
    states: dict[str, Any]
    current: dict[int, int]
    parts: dict[str, Any]
    previous: str | None
    line: bytes
    spent: list[int]
    position: tuple[int, str] | None


@dataclass(frozen=True)
class SavedModel:
    """A model that lies in a file, and how often it had been changed in place when it was written."""

    file: str
    model: Tensor
    version: int

    @classmethod
    def of(cls, file: str, model: Tensor) -> SavedModel:
        """The model as it is now."""
        return cls(file, model, model._version)

    def holds(self, model: Tensor) -> bool:
        """Whether the file holds this model."""
        return model is self.model and model._version == self.version


class RoundWriter(threading.Thread):
    """Writes a round beside the main thread and keeps what went wrong."""

    def __init__(self, round: int, write: Callable[[], None]) -> None:
        super().__init__(name="fedveil checkpoint")
        self.round = round
        self.problem: BaseException | None = None
        self._write = write

    def run(self) -> None:
        """Write it."""
        try:
            self._write()
        except BaseException as problem:
            self.problem = problem
