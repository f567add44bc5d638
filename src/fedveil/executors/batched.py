"""Engine `cuda`, and `batched` on the CPU: several clients of a round at once, their parameters stacked.

Each client runs the same training as on every engine, in a thread of its own; the gradients that the threads request are
computed together. The results equal those of `inline` up to rounding. Plans, door and states stay on the CPU.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self

import torch

from fedveil.errors import ConfigError
from fedveil.executors.device import keep_freed_memory, settings
from fedveil.executors.inline import Inline
from fedveil.executors.stacked_models import ONE_BY_ONE, ClientThread, InStep, Stack, one_by_one_because
from fedveil.federation.clients import Clients
from fedveil.federation.round import (
    ClientTask,
    Context,
    Failure,
    Outcome,
    Work,
    attempted,
    planned,
    promising,
    sealed_outcome,
)
from fedveil.training.local import BatchGradient, GradientSource

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.mechanism.plan import Plan, Raw

_log = logging.getLogger(__name__)

_ON_A_CPU = 16
"""Clients trained at once on a CPU, where more gain nothing."""


class Batched:
    """Engine that trains on the device of the context's model and copies the examples there.

    A network whose stacked gradients are not known to be the same trains as on engine `inline`, one client after the other.

    Args:
        at_once: clients trained at the same time; by default as many as fit into memory (16 on a CPU).
        deterministic: whether results repeat bit for bit on the same device.
    """

    def __init__(self, context: Context, at_once: int | None = None, deterministic: bool = False) -> None:
        if at_once is not None and at_once < 1:
            raise ConfigError(f"run.clients_at_once must be at least 1, got {at_once}")
        self.device = context.model.vector.device
        data = context.clients
        clients = Clients(data.x.to(self.device), data.y.to(self.device), data.offsets)
        self.context, self.at_once = replace(context, clients=clients), at_once
        self._stack: Stack | None = None
        self._deterministic, self._settings = deterministic, ExitStack()
        self._inline: Inline | None = None
        if why := one_by_one_because(context.model, context.task):
            _log.warning(ONE_BY_ONE, why)
            self._inline = Inline(self.context)

    def __enter__(self) -> Self:
        self._settings.enter_context(settings(self.device, self.context.spec.precision, self._deterministic))
        if self._inline is not None:
            self._settings.enter_context(self._inline)
        keep_freed_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack = None
        self._settings.close()

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Train all clients, then seal their releases in the order of the tasks."""
        if self._inline is not None:
            yield from self._inline.map(tasks)
            return
        todo = list(tasks)
        start = time.perf_counter()
        plans = [planned(self.context, task) for task in todo]
        with self._draws(todo, plans):
            works = self._train(todo, plans)
        for i, task in enumerate(todo):
            yield sealed_outcome(self.context, task, works[i], start)

    def _draws(self, todo: list[ClientTask], plans: list[Plan | Raw]) -> AbstractContextManager[object]:
        """Seed the layers' randomness: from a secret source if a plan promises anything.

        Which numbers a client draws depends on the sizes of all clients. With a public seed, one example fewer at one client
        would change the draws of others, and a sum by more than its clip.
        """
        randomness, names = self.context.randomness, [(task.released.round, task.client) for task in todo]
        if any(promising(plan, self.context.door) for plan in plans):
            return randomness.layers(self.device, names, elsewhere=True)
        return randomness.forward(self.device, names)

    def _train(self, todo: list[ClientTask], plans: list[Plan | Raw]) -> dict[int, Work | Failure]:
        """Train each task's client, longest first, and return the results by index; a free row goes to the next client."""
        if not todo:
            return {}
        stack, clients = self._stack_for(len(todo)), self.context.clients
        start = todo[0].released.model.to(self.device)
        waiting = deque(sorted(range(len(todo)), key=lambda i: -clients.size(todo[i].client)))
        free = list(range(len(stack.models)))
        running: dict[int, tuple[int, ClientThread]] = {}
        works: dict[int, Work | Failure] = {}
        try:
            while waiting or running:
                while waiting and free:
                    row, index = free.pop(), waiting.popleft()
                    client = partial(self._client, task=todo[index], plan=plans[index], start=start, row=row)
                    running[row] = index, ClientThread(client)
                for row, (index, thread) in list(running.items()):
                    if thread.result is not None:
                        del running[row]
                        free.append(row)
                        works[index] = _result(thread)
                stack.answer([thread.request for _, thread in running.values() if thread.request is not None])
                for _, thread in running.values():
                    thread.resume()
        finally:
            for _, thread in running.values():
                thread.give_up()
        return works

    def _client(self, thread: ClientThread, task: ClientTask, plan: Plan | Raw, start: Tensor, row: int) -> Work | Failure:
        def in_step(source: GradientSource) -> GradientSource:
            return InStep(source, thread, row) if isinstance(source, BatchGradient) else source

        assert self._stack is not None
        context = replace(self.context, model=self._stack.models[row], gradients=in_step, in_turns=True)
        return attempted(context, replace(task, released=replace(task.released, model=start)), plan)

    def _stack_for(self, tasks: int) -> Stack:
        """Return a stack with rows for a round of that many clients."""
        rows = min(tasks, self.at_once or self._fitting())
        if self._stack is None or len(self._stack.models) < rows:
            self._stack = None
            self._stack = Stack(self.context.model, self.context.spec, rows, self.context.task)
        return self._stack

    def _fitting(self) -> int:
        """Return how many clients fit into half of the free memory: model, gradient, update and optimiser state, twice over."""
        if self.device.type != "cuda":
            return _ON_A_CPU
        per_client = 16 * 4 * self.context.model.layout.dimension
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return max(1, free // 2 // per_client)


def _result(thread: ClientThread) -> Work | Failure:
    if isinstance(thread.result, Work | Failure):
        return thread.result
    assert thread.result is not None
    raise thread.result
