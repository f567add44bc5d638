"""Engine `inline`: one process, one client after the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Self

import torch

from fedveil.engines.memory import keep_freed_memory
from fedveil.engines.stacked import AT_ONCE, StackedClients
from fedveil.federation.round import ClientTask, Context, Outcome, client_round


class Inline:
    """One process, one client after the other, one thread: the engine to debug with.

    Args:
        stacked: train clients in stacks, whose bits are other ones (see `stacked.py`).
    """

    def __init__(self, context: Context, *, stacked: bool = False) -> None:
        self.context = context
        self._stacks = StackedClients(context) if stacked else None

    def __enter__(self) -> Self:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        torch.set_num_threads(self._threads)

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Run each task in turn."""
        if self._stacks is None:
            yield from (client_round(self.context, task) for task in tasks)
            return
        todo = iter(tasks)
        while part := list(islice(todo, AT_ONCE)):
            yield from self._stacks.outcomes(part)
