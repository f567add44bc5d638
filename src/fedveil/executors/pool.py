"""Engine `pool`: one warm worker process per core, with one thread each.

Workers run the same `client_round` as the inline engine, so results are bit-identical for any number of workers. The global
model, the clients' releases and their private states are in shared memory (see `pool_messages.py`); pipes carry a few hundred
bytes per client. A row for releases becomes free as soon as no tensor refers to it, so a sum needs a few rows rather than one
per client. Stacked clients go to a worker several at a time; their bits do not depend on the grouping.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing as mp
import os
import sys
import time
import traceback
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from pickle import PicklingError
from typing import Any, Self

import numpy as np
import torch

from fedveil.errors import ConfigError, FedveilError, plugin_fault
from fedveil.executors.device import keep_freed_memory, shared, shared_zeros
from fedveil.executors.inline import MOST_ROWS, StackedClients
from fedveil.executors.interrupts import begin_worker, ends_on_interrupt, put_off
from fedveil.executors.pool_messages import (
    EMPTY,
    INTEGERS,
    Buffer,
    Handle,
    SharedArena,
    Values,
    WorkerArena,
    outcome_of,
    outcome_values,
    pack,
    read_reply,
    reply,
    task_values,
    tasks_of,
    unpack,
    with_vectors,
    without_vectors,
)
from fedveil.federation.isolated import a_fork_can_train, can_fork, end_with
from fedveil.federation.round import ClientTask, Context, Outcome, client_round, failure, planned, sealed_outcome
from fedveil.mechanism.plan import Plan, Raw, Released, Upload
from fedveil.release.sealed import ELSEWHERE, Contribution, RunningSum, SealedUpload
from fedveil.training.cores import available_cores


@dataclass(frozen=True)
class SharedMemory:
    """Memory shared by the parent and its workers.

    models: the global model, the previous one and the public update [3, d]. rows: lent to the tasks of a round [n, d].
    handle: the file that holds the buffers.
    """

    models: torch.Tensor
    rows: torch.Tensor
    handle: Handle


def work(
    context: Context,
    shared: SharedMemory,
    pipe: Connection,
    parent: int,
    ends_on_interrupt: bool,
    foreign: list[Connection],
    stacked: bool = False,
) -> None:
    """Run a worker: wait for tasks, run them, write each vector into its row, reply; end when the parent has ended.

    Args:
        parent: its process id. ends_on_interrupt: whether Ctrl-C ends the parent's work, and so this worker.
        foreign: the parent's ends of pipes, which a forked worker must close. stacked: see `ProcessPool`.
    """
    begin_worker(ends_on_interrupt)
    for connection in foreign:
        connection.close()
    end_with(parent)  # where that is not known, its next task ends it
    torch.set_num_threads(1)
    keep_freed_memory()
    run = StackedClients(context).outcomes if stacked else partial(map, partial(client_round, context))
    planned: tuple[int, Plan | Raw] | None = None
    try:
        pipe.send_bytes(reply(None))
        while _next(pipe):
            rows, slim, common, table, buffer = unpack(pipe.recv_bytes(), WorkerArena(shared.handle, None).tensor_at)
            arena = WorkerArena(shared.handle, buffer)
            released = with_vectors(slim, shared.models)
            answer: list[Values] | Exception
            try:
                if context.summed and (planned is None or planned[0] != slim.round):
                    planned = slim.round, common or context.plan(released, table[0][0])
                outcomes = run(tasks_of(table, released, planned[1] if planned is not None else None))
                answer = _share_vectors(outcomes, [shared.rows[row] for row in rows], context)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                answer = error if isinstance(error, FedveilError) else _sendable(error)
            try:
                message = reply(answer, arena)
            except Exception as error:
                message = reply(Outcome(-1, None, {}, {}, error=f"its answer cannot be sent to the main process: {error!r}"))
            pipe.send_bytes(message)
    except (EOFError, OSError):
        return


def _sendable(error: BaseException) -> Exception:
    """Return the error in a form that can be sent to the main process."""
    fault = plugin_fault(error)
    return FedveilError(fault) if fault else RuntimeError(f"in a worker: {traceback.format_exc()}")


def _next(pipe: Connection) -> bool:
    """Wait for a task; return False if the parent has ended."""
    above = parent_process()
    return pipe in wait([pipe] if above is None else [pipe, above.sentinel])


def _share_vectors(outcomes: Iterable[Outcome], rows: Sequence[torch.Tensor], context: Context) -> list[Values]:
    """Return the outcomes' values, with their vectors moved into shared memory; integer sums are added up in the first row."""
    total, answer = RunningSum(), []
    for outcome, row in zip(outcomes, rows, strict=True):
        release, stand_in = outcome.release, EMPTY
        if isinstance(release, SealedUpload):
            upload = release.upload
            vector = context.door.released_bits(upload)
            _in_row(row, vector.dtype, context).copy_(vector)
            integers = None if upload.integers is None else EMPTY
            release = replace(release, upload=replace(upload, vector=EMPTY, extras={}, integers=integers))
        elif isinstance(release, Contribution):
            target = _in_row(row, release.sealed.dtype, context)
            sealed = total.add(release.sealed, target)
            if sealed is release.sealed:  # floating-point numbers
                target.copy_(sealed)
            else:
                stand_in = INTEGERS if sealed is target else ELSEWHERE
        answer.append(outcome_values(outcome, release, stand_in))
    return answer


def _in_row(row: torch.Tensor, kind: torch.dtype, context: Context) -> torch.Tensor:
    """Return a row [D] of int64 viewed as `kind`: integers, or the floats of a release that promises nothing."""
    return row.view(kind)[: context.door.parts.dimension]


_TRIES = 2
_END = 1.0
"""Seconds that workers get to end before they are killed."""
_START = 60.0
"""Extra seconds that a new worker gets beyond a client's time-out: a spawned one imports everything first."""
_DIED = "its worker process died"
_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass
class _Worker:
    """Worker process. `tasks`: indices of its current tasks. `since`: start time. `planned`: last round whose common plan it has.

    `ready`: whether it has reported that it is up; a client's time counts from then. `buffer`: for its client's private state.
    """

    process: BaseProcess
    pipe: Connection
    tasks: Sequence[int] = ()
    since: float = 0.0
    planned: int = -1
    ready: bool = False
    buffer: Buffer | None = None


def start_method(context: Context) -> str:
    """Return `fork` on Linux if a forked process can train, even after the parent trained on public data; else `spawn`."""
    trains_here = hasattr(context.policy.part, "public_steps") and torch.cuda.is_available()
    return "fork" if sys.platform.startswith("linux") and not trains_here and a_fork_can_train() else "spawn"


def forks(engine: str) -> bool:
    """Return whether each client can run in a process of its own: forked from this one, or from freshly started workers."""
    return can_fork() or (engine == "pool" and sys.platform.startswith("linux"))


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Hide the GPU from processes started in the block: children of a process that used a GPU could not train."""
    before = os.environ.get(_DEVICES)
    os.environ[_DEVICES] = ""
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DEVICES]
        else:
            os.environ[_DEVICES] = before


class ProcessPool:
    """Engine with a pool of worker processes; `workers` defaults to the cores that this process may use.

    Args:
        context: shared by all clients; forked workers inherit its data, and spawned ones share it.
        start: `fork` or `spawn`; by default fork on Linux if a forked process can train, else spawn.
        timeout: seconds after which a client is abandoned and its worker replaced, or None.
        stacked: whether to train clients in stacks, which changes the bits of the results (see `stacked_models.py`).
    """

    def __init__(
        self,
        context: Context,
        workers: int | None = None,
        start: str | None = None,
        timeout: float | None = None,
        *,
        stacked: bool = False,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise ConfigError(f"training.client_timeout must be > 0 seconds, got {timeout}")
        self.context, self.timeout, self.stacked = context, timeout, stacked
        self.count = workers or available_cores()
        start = start or start_method(context)
        self.mp = mp.get_context(start)
        self._forks = start == "fork"
        self._models = shared_zeros(3, context.door.layout.dimension, inherited=self._forks)
        self._rows = torch.zeros(0, context.door.parts.dimension, dtype=torch.int64)
        self._free_rows: list[int] = []
        self._row_of: dict[int, int] = {}
        self._workers: list[_Worker] = []
        self._came_up = False
        if not self._forks:
            shared(context.clients.x)
            shared(context.clients.y)

    def __enter__(self) -> Self:
        self._arena = SharedArena()
        self._threads = torch.get_num_threads()
        self._ends_on_interrupt = ends_on_interrupt()
        torch.set_num_threads(1)
        keep_freed_memory()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end_all()
        self._arena.close()
        torch.set_num_threads(self._threads)

    def map(self, tasks: Iterable[ClientTask]) -> Iterator[Outcome]:
        """Run the tasks, longest client first, and yield each outcome as it arrives.

        A worker that dies is replaced and its client retried once; a client that exceeds the time-out is abandoned.
        """
        todo = list(tasks)
        if not todo:
            return
        finished = False
        try:
            self._publish(todo[0].released, len(todo))
            yield from self._run(todo)
            finished = True
        finally:
            if not finished:
                self._end_all()

    # --- one round ---

    def _run(self, todo: list[ClientTask]) -> Iterator[Outcome]:
        clients = self.context.clients
        waiting = deque(sorted(range(len(todo)), key=lambda i: -clients.size(todo[i].client)))
        tries = [0] * len(todo)
        self._free_rows, self._row_of = list(reversed(range(len(self._rows)))), {}
        left = len(todo)
        while left:
            self._assign(todo, waiting, tries)
            done: list[Outcome] = []
            for index, answer in self._collect(tries):
                if answer is None:
                    waiting.appendleft(index)
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    done.append(self._completed(answer, todo[index], index))
            left -= len(done)
            self._assign(todo, waiting, tries)  # so that no worker waits while the caller processes an outcome
            while done:
                yield done.pop()

    def _publish(self, released: Released, tasks: int) -> None:
        """Write the global models to shared memory, and make sure that rows and workers for the round exist."""
        self._models[0].copy_(released.model)
        for row, vector in ((1, released.previous), (2, released.public_update)):
            if vector is not None:
                self._models[row].copy_(vector)
        if len(self._rows) < tasks:
            self._end_all()
            self._rows = shared_zeros(tasks + tasks // 4, self._rows.shape[1], inherited=self._forks, dtype=torch.int64)
        while len(self._workers) < min(self.count, tasks):
            with put_off():
                self._workers.append(self._start_worker())

    def _start_worker(self) -> _Worker:
        ours, theirs = self.mp.Pipe()
        foreign = [ours, *(w.pipe for w in self._workers)] if self._forks else []
        parent = os.getpid(), self._ends_on_interrupt, foreign
        arguments = (self.context, SharedMemory(self._models, self._rows, self._arena.handle), theirs, *parent, self.stacked)
        process = self.mp.Process(target=work, args=arguments, daemon=True)  # type: ignore[attr-defined]
        try:
            with _without_gpu() if self.context.in_children and not self._forks else nullcontext():
                process.start()
        except (AttributeError, RuntimeError, TypeError, PicklingError) as error:
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise FedveilError(f"the run cannot be sent to worker processes ({why}): set run.engine = 'inline'") from error
        theirs.close()
        return _Worker(process, ours)

    def _assign(self, todo: list[ClientTask], waiting: deque[int], tries: list[int]) -> None:
        for place, worker in enumerate(self._workers):
            if worker.tasks or not waiting:
                continue
            numbers = [waiting.popleft() for _ in range(self._at_once(waiting, tries))]
            try:
                worker.pipe.send_bytes(self._message(worker, numbers, todo))
            except OSError:
                worker = self._renewed(place)
                with suppress(OSError):  # dead again: `_collect` handles it
                    worker.pipe.send_bytes(self._message(worker, numbers, todo))
            worker.planned = todo[numbers[0]].released.round if self.context.summed else -1
            worker.tasks, worker.since = numbers, time.monotonic()
            for number in numbers:
                tries[number] += 1

    def _at_once(self, waiting: deque[int], tries: list[int]) -> int:
        """Return how many waiting tasks a worker gets: one, or with stacks a full stack, and near the end a fair share."""
        if not self.stacked or tries[waiting[0]]:
            return 1
        share = min(MOST_ROWS, -(-len(waiting) // len(self._workers)))
        return next((n for n, number in enumerate(islice(waiting, share)) if tries[number]), share)

    def _message(self, worker: _Worker, numbers: list[int], todo: list[ClientTask]) -> bytes:
        """Return a worker's message: its tasks without the models, which it reads from shared memory, and shared parts once."""
        first = todo[numbers[0]]
        slim = without_vectors(first.released)
        common = first.common if isinstance(first.common, Plan) and worker.planned != slim.round else None
        planned = self.context.summed and (common is not None or worker.planned == slim.round)
        table = [task_values(todo[number], {} if planned else todo[number].policy_state) for number in numbers]
        for number in numbers:
            if number not in self._row_of:
                self._row_of[number] = self._free_rows.pop()
        worker.buffer = self._arena.lend()
        return pack(([self._row_of[number] for number in numbers], slim, common, table, worker.buffer), self._arena.place)

    def _collect(self, tries: list[int]) -> list[tuple[int, Any]]:
        """Return what has arrived per task: an outcome, an error that ends the run, or None for a client to retry."""
        busy = [w for w in self._workers if w.tasks]
        ready = set(wait([w.pipe for w in busy] + [w.process.sentinel for w in busy], timeout=self._wait_limit(busy)))
        answers: list[tuple[int, Any]] = []
        for worker in busy:
            if worker.pipe in ready:
                try:
                    message = worker.pipe.recv_bytes()
                except (EOFError, OSError):
                    answers += self._replace(worker, tries, _DIED)
                    continue
                answer = self._read_answer(worker, message)
                if answer is None:
                    worker.ready = self._came_up = True
                    worker.since = time.monotonic()
                else:
                    each = map(outcome_of, answer) if isinstance(answer, list) else [answer] * len(worker.tasks)
                    answers += zip(worker.tasks, each, strict=True)
                    worker.tasks = ()
            elif worker.process.sentinel in ready:
                answers += self._replace(worker, tries, _DIED)
            elif time.monotonic() > self._deadline(worker):
                tries[worker.tasks[0]] = _TRIES
                answers += self._replace(worker, tries, f"no answer within {self.timeout:g} seconds")
        return answers

    def _read_answer(self, worker: _Worker, message: bytes) -> Any:
        """Return the reply; its large tensors stay in the worker's buffer."""
        if not worker.ready:  # the ready message; the buffer stays reserved for the client
            return read_reply(message, self._arena.filled(None))[1]
        buffer, worker.buffer = worker.buffer, None
        needed, answer = read_reply(message, self._arena.filled(buffer))
        self._arena.need(needed)
        return answer

    def _wait_limit(self, busy: list[_Worker]) -> float | None:
        if self.timeout is None:
            return None
        return max(0.0, min(map(self._deadline, busy)) - time.monotonic()) + 0.01

    def _deadline(self, worker: _Worker) -> float:
        """Return when the worker's current client is abandoned."""
        return math.inf if self.timeout is None else worker.since + self.timeout + (0.0 if worker.ready else _START)

    def _replace(self, worker: _Worker, tries: list[int], why: str) -> list[tuple[int, Any]]:
        if tries[worker.tasks[0]] == _TRIES and not self._came_up:
            raise FedveilError(
                "worker processes do not come up (see above): a script must start its run under "
                "`if __name__ == '__main__':`, classes defined in a notebook or in `python -c` must be put in a module, "
                "and there must be memory for the workers; or set run.engine = 'inline'"
            )
        self._renewed(self._workers.index(worker))
        if tries[worker.tasks[0]] < _TRIES:
            return [(number, None) for number in worker.tasks]
        lost = Outcome(-1, None, {}, {}, error=f"{why} (tried {_TRIES} times)" if why == _DIED else why)
        return [(number, lost) for number in worker.tasks]

    def _renewed(self, place: int) -> _Worker:
        """Replace a worker that is no longer usable, and return the new one."""
        with put_off():
            _end([self._workers[place]])
            self._arena.give_back(self._workers[place].buffer)
            self._workers[place] = self._start_worker()
        return self._workers[place]

    def _completed(self, outcome: Outcome, task: ClientTask, index: int) -> Outcome:
        """Restore what was not sent: the vector from its row, the common state, a lost client's states.

        An abandoned client releases zero with noise from here, as if its training had failed (under DP-SGD the noise of all its
        steps, which this process draws); a client whose process died is absent.
        """
        if outcome.client < 0:
            lost = replace(outcome, client=task.client, policy_state=task.policy_state, private=task.private)
            if outcome.error.startswith(_DIED):
                return lost
            start, plan = time.perf_counter(), planned(self.context, task)
            return sealed_outcome(self.context, task, failure(self.context, task, plan, outcome.error), start)
        release, state = outcome.release, task.policy_state if self.context.summed else outcome.policy_state
        if isinstance(release, Contribution) and release.sealed is ELSEWHERE:
            self._free_rows.append(self._row_of[index])
            return outcome
        if release is None:
            self._free_rows.append(self._row_of[index])
        elif isinstance(release, SealedUpload):
            release = replace(release, upload=self._opened_upload(release.upload, self._filled(self._row_of[index])))
        else:
            release = replace(release, sealed=_in_row(self._filled(self._row_of[index]), release.sealed.dtype, self.context))
        return replace(outcome, release=release, policy_state=state)

    def _filled(self, row: int) -> torch.Tensor:
        """Return a row [D] that a worker has written; it is reused once this tensor and all its views are gone."""
        lent = self._rows[row].numpy().data
        memory = (ctypes.c_char * lent.nbytes).from_buffer(lent)
        weakref.finalize(memory, self._free_rows.append, row).atexit = False
        return torch.from_numpy(np.frombuffer(memoryview(memory), np.int64))

    def _opened_upload(self, upload: Upload, row: torch.Tensor) -> Upload:
        if upload.integers is None:
            update, extras = self.context.door.parts.parted(_in_row(row, torch.float32, self.context))
            return replace(upload, vector=update, extras=extras)
        return self.context.door.decoded(upload, row, upload.plan)

    def _end_all(self) -> None:
        with put_off():
            workers, self._workers = self._workers, []
            _end(workers)
            for worker in workers:
                self._arena.give_back(worker.buffer)


def _end(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.pipe.close()
        worker.process.terminate()
    deadline = time.monotonic() + _END
    for worker in workers:
        worker.process.join(max(0.0, deadline - time.monotonic()))
        if worker.process.is_alive():
            worker.process.kill()
            worker.process.join()
        worker.process.close()
