"""Engine `pool`: one warm worker process per core, one thread each, data and global model in shared memory.

Workers run the same `client_round` as the inline engine and outcomes come back in the order of the tasks, so the result is
equal to the bit for any number of workers. Big vectors travel in shared memory; a task is a few hundred bytes.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch

from fedveil.errors import FedveilError
from fedveil.federation.memory import keep_freed_memory
from fedveil.federation.round import Context, Outcome, Task, client_round
from fedveil.release.door import Contribution
from fedveil.release.plan import Plan, Raw, Released, Upload

_TRIES = 2


@dataclass
class _Worker:
    process: BaseProcess
    pipe: Connection
    index: int = -1
    since: float = 0.0


class Pool:
    """The engine; `workers` defaults to the cores this process may use.

    Args:
        context: shared by all clients; its data are moved to shared memory.
        start: `fork` or `spawn`; by default fork on Linux, else spawn.
        timeout: seconds after which a client is given up and its worker replaced, or None.
    """

    def __init__(
        self, context: Context, workers: int | None = None, start: str | None = None, timeout: float | None = None
    ) -> None:
        self.context, self.timeout = context, timeout
        self.count = workers or available_cores()
        self.mp = mp.get_context(start or ("fork" if sys.platform.startswith("linux") else "spawn"))
        self._models = shared(torch.zeros(2, context.door.layout.dimension))
        self._rows = torch.zeros(0, context.door.layout.dimension)
        self._workers: list[_Worker] = []
        shared(context.clients.x)
        shared(context.clients.y)

    def __enter__(self) -> Self:
        import torch._dynamo

        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)
        keep_freed_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            _end(worker)
        self._workers = []
        torch.set_num_threads(self._threads)

    def map(self, tasks: Iterable[Task]) -> Iterator[Outcome]:
        """Run the tasks, longest client first, and give the outcomes in the order of the tasks."""
        todo = list(tasks)
        if not todo:
            return
        self._publish(todo[0].released, len(todo))
        sizes = self.context.clients.sizes()
        waiting = deque(sorted(range(len(todo)), key=lambda i: -int(sizes[todo[i].client])))
        tries = [0] * len(todo)
        done: dict[int, Outcome] = {}
        upcoming = 0
        while upcoming < len(todo):
            self._hand_out(todo, waiting, tries)
            for index, answer in self._collect(tries):
                if answer is None:
                    waiting.appendleft(index)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    done[index] = self._completed(answer, todo[index], index)
            while upcoming in done:
                yield done.pop(upcoming)
                upcoming += 1

    # --- one round ---

    def _publish(self, released: Released, tasks: int) -> None:
        """Write the global models where the workers read them, and make room for the answers."""
        self._models[0].copy_(released.model)
        if released.previous is not None:
            self._models[1].copy_(released.previous)
        if len(self._rows) < tasks:
            for worker in self._workers:
                _end(worker)
            self._workers = []
            self._rows = shared(torch.zeros(tasks, self._models.shape[1]))
        while len(self._workers) < min(self.count, tasks):
            self._workers.append(self._hire())

    def _hire(self) -> _Worker:
        ours, theirs = self.mp.Pipe()
        process = self.mp.Process(target=_work, args=(self.context, self._models, self._rows, theirs), daemon=True)  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return _Worker(process, ours)

    def _hand_out(self, todo: list[Task], waiting: deque[int], tries: list[int]) -> None:
        for worker in self._workers:
            if worker.index < 0 and waiting:
                index = waiting.popleft()
                tries[index] += 1
                worker.index, worker.since = index, time.monotonic()
                task = todo[index]
                slim = replace(task.released, model=_EMPTY, previous=None if task.released.previous is None else _EMPTY)
                worker.pipe.send((index, replace(task, released=slim, common=None)))

    def _collect(self, tries: list[int]) -> list[tuple[int, Any]]:
        """What came back: an outcome, an error that ends the run, or None for a client that must be tried again."""
        busy = [w for w in self._workers if w.index >= 0]
        ready = set(wait([w.pipe for w in busy] + [w.process.sentinel for w in busy], timeout=self._patience(busy)))
        answers: list[tuple[int, Any]] = []
        for worker in busy:
            if worker.pipe in ready:
                try:
                    answers.append((worker.index, worker.pipe.recv()))
                    worker.index = -1
                except (EOFError, OSError):
                    answers.append(self._replace(worker, tries, "its worker process died"))
            elif worker.process.sentinel in ready:
                answers.append(self._replace(worker, tries, "its worker process died"))
            elif self.timeout is not None and time.monotonic() - worker.since > self.timeout:
                tries[worker.index] = _TRIES
                answers.append(self._replace(worker, tries, f"no answer within {self.timeout:g} seconds"))
        return answers

    def _patience(self, busy: list[_Worker]) -> float | None:
        if self.timeout is None:
            return None
        return max(0.0, min(w.since for w in busy) + self.timeout - time.monotonic()) + 0.01

    def _replace(self, worker: _Worker, tries: list[int], why: str) -> tuple[int, Any]:
        index = worker.index
        _end(worker)
        self._workers[self._workers.index(worker)] = self._hire()
        if tries[index] < _TRIES:
            return index, None
        return index, Outcome(-1, None, {}, {}, error=f"{why} (tried {tries[index]} times)" if "died" in why else why)

    def _completed(self, outcome: Outcome, task: Task, index: int) -> Outcome:
        """Put back what did not travel: the vector from its row, the common plan, the state of a client that was lost."""
        if outcome.client < 0:
            return replace(outcome, client=task.client, policy_state=task.policy_state, private=task.private)
        release = outcome.release
        if isinstance(release, Upload):
            release = replace(release, vector=self._rows[index])
        elif isinstance(release, Contribution):
            plan = task.common if isinstance(task.common, Plan) else release.plan
            release = replace(release, sealed=self._rows[index], plan=plan)
        return replace(outcome, release=release)


_EMPTY = torch.empty(0)


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, moved in place to memory that workers share."""
    moved: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved


def _end(worker: _Worker) -> None:
    worker.pipe.close()
    worker.process.terminate()
    worker.process.join(1.0)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()


def _work(context: Context, models: torch.Tensor, rows: torch.Tensor, pipe: Connection) -> None:
    """A worker's life: wait for a task, run it, write the vector into its row, answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    keep_freed_memory()
    planned: tuple[int, Plan | Raw] | None = None
    while True:
        try:
            index, task = pipe.recv()
        except (EOFError, OSError):
            return
        previous = None if task.released.previous is None else models[1]
        task = replace(task, released=replace(task.released, model=models[0], previous=previous))
        try:
            if context.summed:
                if planned is None or planned[0] != task.released.round:
                    planned = task.released.round, context.policy.plan(task.released, task.policy_state)
                task = replace(task, common=planned[1])
            outcome = client_round(context, task)
        except FedveilError as error:
            pipe.send(error)
            continue
        pipe.send(_slim(outcome, rows[index]))


def _slim(outcome: Outcome, row: torch.Tensor) -> Outcome:
    """The outcome with its vector moved into shared memory."""
    release = outcome.release
    if isinstance(release, Upload):
        row.copy_(release.vector)
        release = replace(release, vector=_EMPTY)
    elif isinstance(release, Contribution):
        row.copy_(release.sealed)
        release = replace(release, sealed=_EMPTY)
    return replace(outcome, release=release)
