"""Engines run the clients of a round. They differ in speed only: the same seed gives the same model on each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, Self

from fedveil.federation.round import ClientTask, Outcome


class Engine(Protocol):
    """Runs client rounds; a context manager, because workers must end with the run."""

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """One outcome of each task, in any order."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...
