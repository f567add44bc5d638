"""A worker process of the pool: its life."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process

import torch

from fedveil.engines.interrupts import begin_worker
from fedveil.engines.memory import keep_freed_memory
from fedveil.engines.pool_messages import EMPTY, INTEGERS, Values, outcome_values, reply, tasks_of, unpack, with_vectors
from fedveil.engines.shared_arena import Handle, WorkerArena
from fedveil.engines.stacked import StackedClients
from fedveil.errors import FedveilError, plugin_fault
from fedveil.federation.round import Context, Outcome, client_round
from fedveil.mechanism.plan import Plan, Raw
from fedveil.release.sealed import ELSEWHERE, Contribution, RunningSum, SealedUpload

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SharedMemory:
    """What the parent and its workers share.

    models: the global model, the one before it and the public update [3, d]. rows: lent to the tasks of a round [n, d].
    handle: of the slots.
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
    """A worker's life: wait for tasks, run them, write each vector into its row, answer; end when the parent has.

    Args:
        parent: its process id. ends_on_interrupt: whether Ctrl-C ends the parent's work, and so this worker.
        foreign: the parent's ends of pipes, which a forked worker must not hold open. stacked: see `ProcessPool`.
    """
    begin_worker(ends_on_interrupt)
    for connection in foreign:
        connection.close()
    _die_with(parent)
    torch.set_num_threads(1)
    keep_freed_memory()
    run = StackedClients(context).outcomes if stacked else partial(map, partial(client_round, context))
    planned: tuple[int, Plan | Raw] | None = None
    try:
        pipe.send_bytes(reply(None))
        while _next(pipe):
            rows, slim, common, table, slot = unpack(pipe.recv_bytes(), WorkerArena(shared.handle, None).there)
            arena = WorkerArena(shared.handle, slot)
            released = with_vectors(slim, shared.models)
            answer: list[Values] | Exception
            try:
                if context.summed and (planned is None or planned[0] != slim.round):
                    planned = slim.round, common or context.plan(released, table[0][0])
                found = run(tasks_of(table, released, planned[1] if planned is not None else None))
                answer = _answered(found, [shared.rows[row] for row in rows], context)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                answer = error if isinstance(error, FedveilError) else _known(error)
            try:
                message = reply(answer, arena)
            except Exception as error:
                message = reply(Outcome(-1, None, {}, {}, error=f"its answer cannot be sent to the main process: {error!r}"))
            pipe.send_bytes(message)
    except (EOFError, OSError):
        return


def _known(error: BaseException) -> Exception:
    """The error as the main process can tell it."""
    fault = plugin_fault(error)
    return FedveilError(fault) if fault else RuntimeError(f"in a worker: {traceback.format_exc()}")


def _next(pipe: Connection) -> bool:
    """Wait for a task; False when the parent is gone."""
    above = parent_process()
    return pipe in wait([pipe] if above is None else [pipe, above.sentinel])


def _die_with(parent: int) -> None:
    """Ask the system to end this process when the parent ends, however that happens (Linux; elsewhere its next task ends it)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _answered(outcomes: Iterable[Outcome], rows: Sequence[torch.Tensor], context: Context) -> list[Values]:
    """What the outcomes hold, their vectors moved into shared memory; integers of a sum are added up in the row of the first."""
    total, answer = RunningSum(), []
    for outcome, row in zip(outcomes, rows, strict=True):
        release, stand_in = outcome.release, EMPTY
        if isinstance(release, SealedUpload):
            upload = release.upload
            leaving = context.door.leaving(upload)
            in_row(row, leaving.dtype, context).copy_(leaving)
            integers = None if upload.integers is None else EMPTY
            release = replace(release, upload=replace(upload, vector=EMPTY, extras={}, integers=integers))
        elif isinstance(release, Contribution):
            room = in_row(row, release.sealed.dtype, context)
            kept = total.add(release.sealed, room)
            if kept is release.sealed:  # floats
                room.copy_(kept)
            else:
                stand_in = INTEGERS if kept is room else ELSEWHERE
        answer.append(outcome_values(outcome, release, stand_in))
    return answer


def in_row(row: torch.Tensor, kind: torch.dtype, context: Context) -> torch.Tensor:
    """What was released, in a row [D] of int64: the integers, or the floats [D] of a release that promises nothing."""
    return row.view(kind)[: context.door.parts.dimension]
