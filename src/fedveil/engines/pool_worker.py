"""A worker process of the pool: its life, and how messages to and from it are packed."""

from __future__ import annotations

import ctypes
import io
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process
from typing import Any

import torch

from fedveil.engines.interrupts import begin_worker
from fedveil.engines.memory import keep_freed_memory
from fedveil.engines.shared_arena import LEAST, Array, Handle, There, WorkerArena
from fedveil.engines.stacked import StackedClients
from fedveil.errors import FedveilError, plugin_fault
from fedveil.federation.round import Context, Outcome, client_round, summed
from fedveil.release.plan import Plan, Raw
from fedveil.release.sealed import ELSEWHERE, Contribution, RunningSum, SealedUpload

EMPTY = torch.empty(0)
"""Stands in for a vector that lies in shared memory."""
INTEGERS = torch.empty(0, dtype=torch.int64)
"""The same for a contribution of integers."""
_STAND_INS = {"floats": EMPTY, "integers": INTEGERS, "elsewhere": ELSEWHERE}
_NAMES = {id(tensor): name for name, tensor in _STAND_INS.items()}

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SharedMemory:
    """What the parent and its workers share.

    models: the global model and the one before it [2, d]. rows: lent to the tasks of a round [n, d]. handle: of the slots.
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
            rows, tasks, slot = unpack(pipe.recv_bytes(), WorkerArena(shared.handle, None).there)
            arena = WorkerArena(shared.handle, slot)
            slim = tasks[0].released
            released = replace(slim, model=shared.models[0], previous=None if slim.previous is None else shared.models[1])
            answer: list[Outcome] | Exception
            try:
                if context.summed and (planned is None or planned[0] != slim.round):
                    planned = slim.round, tasks[0].common or context.plan(released, tasks[0].policy_state)
                changes: dict[str, Any] = {"common": planned[1], "policy_state": {}} if planned is not None else {}
                found = run([replace(task, released=released, **changes) for task in tasks])
                total = RunningSum()
                added = [summed(outcome, total) for outcome in found]  # the first one has the sum when all are there
                answer = [_slim(one, shared.rows[row], context) for row, one in zip(rows, added, strict=True)]
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


def _slim(outcome: Outcome, row: torch.Tensor, context: Context) -> Outcome:
    """The outcome with its vector moved into shared memory."""
    release = outcome.release
    if isinstance(release, SealedUpload):
        upload = release.upload
        leaving = context.door.leaving(upload)
        in_row(row, leaving.dtype, context).copy_(leaving)
        integers = None if upload.integers is None else EMPTY
        release = replace(release, upload=replace(upload, vector=EMPTY, extras={}, integers=integers))
    elif isinstance(release, Contribution) and release.sealed is not ELSEWHERE:
        in_row(row, release.sealed.dtype, context).copy_(release.sealed)
        release = replace(release, sealed=INTEGERS if release.sealed.dtype == torch.int64 else EMPTY)
    return outcome if release is outcome.release else replace(outcome, release=release)


def in_row(row: torch.Tensor, kind: torch.dtype, context: Context) -> torch.Tensor:
    """What was released, in a row [D] of int64: the integers, or the floats [D] of a release that promises nothing."""
    return row.view(kind)[: context.door.parts.dimension]


# --- messages ---------------------------------------------------------------------------------------------------------


def pack(value: Any, place: Callable[[Array], int | None] | None = None) -> bytes:
    """Pickle for a pipe between our own processes.

    Tensors go by value (torch's own way keeps a file open for each), or, if they are large and `place` tells an offset in the
    slots, as a note of where they lie.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, place).dump(value)
    return buffer.getvalue()


def unpack(message: bytes, there: There) -> Any:
    """What was packed; `there` finds the tensors that lie in slots."""
    return _Unpickler(message, there).load()


def reply(answer: list[Outcome] | Outcome | Exception | None, arena: WorkerArena | None = None) -> bytes:
    """A worker's message: the size of what it has, or would have, put into its slot [8 bytes], and the answer."""
    packed = pack(answer, arena.place if arena is not None else None)
    return (arena.needed if arena is not None else 0).to_bytes(8, "little") + packed


def read_reply(message: bytes, there: There) -> tuple[int, Any]:
    """(size, answer) of a worker's message."""
    return int.from_bytes(message[:8], "little"), unpack(message[8:], there)


class _Pickler(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, place: Callable[[Array], int | None] | None) -> None:
        super().__init__(buffer, protocol=5)
        self._place = place

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        if id(value) in _NAMES:
            return _stand_in, (_NAMES[id(value)],)
        array = value.detach().cpu().numpy()
        offset = self._place(array) if self._place is not None and array.nbytes >= LEAST else None
        if offset is None:
            return torch.from_numpy, (array,)
        return _there, (offset, array.dtype.str, array.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: bytes, there: There) -> None:
        super().__init__(io.BytesIO(message))
        self._found = there

    def find_class(self, module: str, name: str) -> Any:
        return self._found if (module, name) == (__name__, _there.__name__) else _class(module, name)


@cache
def _class(module: str, name: str) -> Any:
    return pickle.Unpickler(io.BytesIO()).find_class(module, name)


def _stand_in(name: str) -> torch.Tensor:
    return _STAND_INS[name]


def _there(offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raise LookupError("stands for the `there` of `unpack`")
