"""Engine `inline`, and engine `stacked` for small dense networks: one process.

A client's bits depend on that client alone: not on the other clients in its stack, its row, or the number of rows. Otherwise one
client's data would change the rounding of another's update, and a sum by more than the clip. `stacked_models.py` ensures this; if
it cannot, clients train one at a time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Self, cast

import torch

from fedveil.executors.device import keep_freed_memory
from fedveil.executors.stacked_models import Rows, StackedGradient, aligned, dense, filled, keeps_apart, losses_of, obstacle
from fedveil.federation.round import (
    ClientTask,
    Context,
    Failure,
    Outcome,
    Work,
    attempted,
    client_round,
    evaluated,
    planned,
    sealed_outcome,
)
from fedveil.mechanism.plan import LocalDpSgd, Plan, Raw
from fedveil.training.local import Local, follow

if TYPE_CHECKING:
    from fedveil.release.door import CompiledPlan
    from fedveil.training.params import FlatModel

    Shape = tuple[int, ...]

MOST_ROWS = 32
_AT_ONCE = 8 * MOST_ROWS
"""Number of clients searched for equal shapes; their updates stay in memory until they are sealed."""

_log = logging.getLogger(__name__)


class StackedClients:
    """Runner of a round's clients, as many as possible in stacks."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._apart: dict[int, bool] = {}
        self._forward = dense(context.model.module)
        self._obstacle = obstacle(context.model, context.spec, context.objective, context.task)
        if self._obstacle or context.followed:
            _log.warning("run.engine = 'stacked' trains clients one at a time: %s", self._obstacle or "something follows each")
            self._obstacle = self._obstacle or "-"

    def outcomes(self, tasks: Sequence[ClientTask]) -> Iterator[Outcome]:
        """Train all clients, then seal their releases in the order of the tasks."""
        start = time.perf_counter()
        plans = [planned(self.context, task) for task in tasks]
        terms = self._terms(plans)
        works: dict[int, Work | Failure] = {}
        shapes: dict[Shape, list[int]] = {}
        for i, task in enumerate(tasks):
            shapes.setdefault(self._shape(task, plans[i]), []).append(i)
        for shape, places in shapes.items():
            for first in range(0, len(places), MOST_ROWS):
                part = places[first : first + MOST_ROWS]
                chosen = [tasks[i] for i in part], [plans[i] for i in part]
                works.update(zip(part, self._works(shape, *chosen), strict=True))
        for i, task in enumerate(tasks):
            yield sealed_outcome(self.context, task, works[i], start, terms.get(id(plans[i])))

    def _terms(self, plans: Sequence[Plan | Raw]) -> dict[int, CompiledPlan]:
        """Compile each distinct plan once, and return the results by the plan's id."""
        return {
            id(plan): self.context.door.compile(plan) for plan in {id(p): p for p in plans}.values() if isinstance(plan, Plan)
        }

    def _shape(self, task: ClientTask, plan: Plan | Raw) -> Shape:
        """Return the number of steps and the padded lengths of a pass's batches; empty for a client that trains alone."""
        n, spec = self.context.clients.size(task.client), self.context.spec
        if self._obstacle or not n or (isinstance(plan, LocalDpSgd)):
            return ()
        return spec.steps_for(n), -(-n // spec.batch_size), filled(n % spec.batch_size or spec.batch_size)

    def _works(self, shape: Shape, tasks: Sequence[ClientTask], plans: Sequence[Plan | Raw]) -> list[Work | Failure]:
        lengths = {filled(self.context.spec.batch_size), *shape[2:]} if shape[1:2] != (1,) else set(shape[2:])
        rows = 1 << (len(tasks) - 1).bit_length()
        if not shape or not all(map(self._rows_independent, lengths)):
            return [attempted(self.context, task, plan) for task, plan in zip(tasks, plans, strict=True)]
        try:
            return self._trained(tasks, plans, shape[0], rows)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if len(tasks) == 1:
                return [Failure(plans[0], f"{type(error).__name__}: {error}")]
            alone = zip(tasks, plans, strict=True)
            return [self._works(shape, [task], [plan])[0] for task, plan in alone]

    def _trained(self, tasks: Sequence[ClientTask], plans: Sequence[Plan | Raw], steps: int, rows: int) -> list[Work | Failure]:
        """Train clients of one shape together; surplus rows repeat the first client."""
        context, n = self.context, len(tasks)
        counts = [evaluated(context, task) for task in tasks]
        source = StackedGradient(context, self._forward, [*tasks, *[tasks[0]] * (rows - n)])
        vectors = aligned(rows, context.model.layout.dimension)
        model = cast("FlatModel", Rows(vectors, vectors))
        released = tasks[0].released
        local = Local(model, released.model, context.spec, source, torch.default_generator, round=released.round, steps=steps)
        updates, losses = follow(local, source.batches(local, context.clients.x, context.clients.y), context.objective)
        results = zip(plans, updates, (losses / steps).tolist(), tasks, counts, strict=False)
        return [
            Work(plan, update, loss, dict(task.private), context.buffers, context.clients.size(task.client), extras=extras)
            for plan, update, loss, task, extras in results
        ]

    def _rows_independent(self, length: int) -> bool:
        """Return whether rows stay independent in batches of that length, for every number of rows that a stack can have."""
        if length not in self._apart:
            learned, clients = (self._forward, self.context.model.layout, losses_of(self.context.task)), self.context.clients
            examples, targets = clients.x.new_empty(0, *clients.x.shape[1:]), clients.y.new_empty(0, *clients.y.shape[1:])
            sizes = (1 << k for k in range(MOST_ROWS.bit_length()))
            self._apart[length] = all(keeps_apart(learned, self.context.spec, (n, length), examples, targets) for n in sizes)
        return self._apart[length]


class Inline:
    """Engine with one process and one thread, one client after the other: the engine for debugging.

    Args:
        stacked: whether to train clients in stacks, which changes the bits of the results (see `stacked_models.py`).
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
        """Run the tasks one after the other."""
        if self._stacks is None:
            yield from (client_round(self.context, task) for task in tasks)
            return
        todo = iter(tasks)
        while part := list(islice(todo, _AT_ONCE)):
            yield from self._stacks.outcomes(part)
