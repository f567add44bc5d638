"""Engine `inline`: one process, one client after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

import torch

from fedveil.engines.memory import keep_freed_memory
from fedveil.federation.round import ClientTask, Context, Outcome, client_round


class Inline:
    """One process, one client after the other, one thread: the engine to debug with."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def __enter__(self) -> Self:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        torch.set_num_threads(self._threads)

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Run each task in turn."""
        for task in tasks:
            yield client_round(self.context, task)
