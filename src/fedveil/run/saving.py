"""A round is saved beside the training of the next one, and nothing of the next one is released before it is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Self

from fedveil.engines.interrupts import put_off

if TYPE_CHECKING:
    from fedveil.federation.checkpoint import Checkpoints
    from fedveil.federation.engine import Engine
    from fedveil.federation.progress import Progress
    from fedveil.federation.round import ClientTask, Outcome


class SavedRounds:
    """Saves rounds, and reports each once it is saved, in the thread of the run.

    Args:
        report: called when the last round of `progress` is saved: writes its row and tells it.
        beside: whether clients may train meanwhile; not where they release by themselves, as on other machines.
    """

    def __init__(self, checkpoints: Checkpoints, report: Callable[[], None], *, beside: bool) -> None:
        self.checkpoints, self.report, self.beside = checkpoints, report, beside
        self._unreported = False

    def save(self, progress: Progress) -> None:
        """Begin to save what the last round changed; an interruption waits until that has begun, and `finish` then finds it."""
        with put_off():
            self.checkpoints.begin(progress)
            self._unreported = True
        if not self.beside:
            self.finish()

    def look(self) -> None:
        """Report the round if it is saved by now."""
        if not self.checkpoints.writing:
            self.finish()

    def finish(self) -> None:
        """Wait until the round is saved, and report it.

        Raises:
            FedveilError: it cannot be saved.
        """
        unreported, self._unreported = self._unreported, False
        self.checkpoints.finish()
        if unreported:
            self.report()


class SavingEngine:
    """An engine that hands over the outcomes of a round when the round before is saved: only then can they be released."""

    def __init__(self, engine: Engine, saved: SavedRounds) -> None:
        self._engine, self._saved = engine, saved

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """As the engine; the last thing that happens in a round before its releases is that the round before is saved."""
        for outcome in self._engine.map(tasks):
            self._saved.look()
            yield outcome
        self._saved.finish()

    def __enter__(self) -> Self:
        self._engine.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._engine.__exit__(*exc)
