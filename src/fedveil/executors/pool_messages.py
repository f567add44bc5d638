"""Messages between the pool's main process and its workers, and the shared buffers that they refer to.

All buffers are parts of one unnamed file in memory, which disappears with the last process. A client's tensors that the main
process holds are in the buffer that its worker wrote; the buffer becomes free when the last of them is gone. A client's new state
goes into another buffer than its old one, so a client that fails half-way changes nothing.
"""

from __future__ import annotations

import ctypes
import io
import math
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from multiprocessing import reduction
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.federation.round import ClientTask, Outcome
from fedveil.release.sealed import ELSEWHERE, Contribution, SealedUpload

if TYPE_CHECKING:
    from fedveil.mechanism.plan import Plan, Raw, Released
    from fedveil.training.local import State


Array = np.ndarray[Any, Any]
TensorAt = Callable[[int, str, tuple[int, ...]], torch.Tensor]
"""Function that maps (offset in the file, dtype, shape) to the tensor stored there."""

LEAST = 4096
"""Size in bytes below which tensors go through the pipe."""

_ALIGNMENT = 64
_FIRST = 8


@dataclass(frozen=True)
class Buffer:
    """Part of the file that one worker may write: `offset` and `size` in bytes, whole pages."""

    offset: int
    size: int


class Handle:
    """File descriptor that can be passed to a forked or spawned process."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], Handle], tuple[Any]]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(duplicate: Any) -> Handle:
    return Handle(duplicate.detach())


class SharedArena:
    """The main process's side: lends buffers to workers and tracks which of its tensors are in one."""

    def __init__(self) -> None:
        self.handle = Handle(_file_in_memory())
        self._size = self._end = 0
        self._free: list[Buffer] = []
        self._chunks: list[tuple[int, int, mmap.mmap]] = []

    def close(self) -> None:
        """Close the file; tensors in existing buffers stay valid."""
        os.close(self.handle.descriptor)

    def need(self, size: int) -> None:
        """Record that a worker had so many bytes to store."""
        if size > self._size:
            self._size = _pages(max(size, self._size * 5 // 4))

    def lend(self) -> Buffer | None:
        """Return a free buffer that fits the largest state so far, or None if no worker has stored any."""
        if not self._size:
            return None
        while self._free:
            buffer = self._free.pop()
            if buffer.size >= self._size:
                return buffer
        self._grow()
        return self._free.pop()

    def give_back(self, buffer: Buffer | None) -> None:
        """Return the buffer of a worker that has ended."""
        if buffer is not None:
            self._free.append(buffer)

    def filled(self, buffer: Buffer | None) -> TensorAt:
        """Return a function that finds a worker's tensors in the buffer; the buffer is freed when all of them are gone."""
        if buffer is None:
            return _nothing
        start, _, chunk = next(c for c in self._chunks if c[0] <= buffer.offset < c[1])
        memory = (ctypes.c_char * buffer.size).from_buffer(chunk, buffer.offset - start)
        weakref.finalize(memory, self._free.append, buffer).atexit = False

        def tensor_at(offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
            array = np.frombuffer(memoryview(memory), dtype, math.prod(shape), offset - buffer.offset)
            return torch.from_numpy(array.reshape(shape))

        return tensor_at

    def place(self, array: Array) -> int | None:
        """Return the offset in the file at which the array is already stored, or None."""
        address = array.ctypes.data
        for start, end, chunk in self._chunks:
            first = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            if first <= address and address + array.nbytes <= first + end - start and array.flags.c_contiguous:
                return start + address - first
        return None

    def _grow(self) -> None:
        """Double the number of buffers; memory is used only once a buffer is written."""
        count = max(_FIRST, self._end // self._size)
        start, self._end = self._end, self._end + count * self._size
        os.ftruncate(self.handle.descriptor, self._end)
        chunk = mmap.mmap(self.handle.descriptor, self._end - start, offset=start)
        self._chunks.append((start, self._end, chunk))
        self._free += [Buffer(start + i * self._size, self._size) for i in reversed(range(count))]


class WorkerArena:
    """A worker's side during one task: reads the main process's tensors, and writes into its own buffer."""

    def __init__(self, handle: Handle, buffer: Buffer | None) -> None:
        self._file, self._buffer = handle.descriptor, buffer
        self._memory: mmap.mmap | None = None
        self.needed = 0

    def tensor_at(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the tensor stored at an offset; changes to it stay in this process."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(self._file, size + skipped, access=mmap.ACCESS_COPY, offset=offset - skipped)
        return torch.from_numpy(np.frombuffer(memory, dtype, math.prod(shape), skipped).reshape(shape))

    def place(self, array: Array) -> int | None:
        """Write the array into the buffer and return its offset in the file, or None if it does not fit."""
        begin, self.needed = self.needed, self.needed + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._buffer is None or self.needed > self._buffer.size:
            return None
        if self._memory is None:
            self._memory = mmap.mmap(self._file, self._buffer.size, offset=self._buffer.offset)
        np.frombuffer(self._memory, array.dtype, array.size, begin).reshape(array.shape)[...] = array
        return self._buffer.offset + begin


def _nothing(offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raise LookupError("a worker without a buffer has written into one")


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _file_in_memory() -> int:
    if hasattr(os, "memfd_create"):  # does not count against the size of /dev/shm, which containers limit
        return os.memfd_create("fedveil")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


EMPTY = torch.empty(0)
"""Placeholder for a vector in shared memory."""
INTEGERS = torch.empty(0, dtype=torch.int64)
"""Placeholder for a contribution of integers in shared memory."""
_STAND_INS = {"floats": EMPTY, "integers": INTEGERS, "elsewhere": ELSEWHERE}
_NAMES = {id(tensor): name for name, tensor in _STAND_INS.items()}

Values = tuple[Any, ...]
"""Field values of an object, in order; pickling them takes a tenth of the time."""

_of_task = attrgetter("client", "weight", "private", "buffers")
_of_outcome = attrgetter(*(field.name for field in fields(Outcome)))
_of_contribution = attrgetter(*(field.name for field in fields(Contribution)))


def task_values(task: ClientTask, state: State) -> Values:
    """Return the values of a client's task without the parts that all share. state: of its policy."""
    return state, *_of_task(task)


def tasks_of(table: Sequence[Values], released: Released, plan: Plan | Raw | None) -> list[ClientTask]:
    """Return the tasks, given the parts that all share. plan: of the round if uploads are summed; else each client plans."""
    return [
        ClientTask(client, released, weight, plan, state if plan is None else {}, *more) for state, client, weight, *more in table
    ]


def without_vectors(released: Released) -> Released:
    """Return the releases with a placeholder for each vector [d], which workers read from shared memory."""
    previous, update = (None if vector is None else EMPTY for vector in (released.previous, released.public_update))
    return replace(released, model=EMPTY, previous=previous, public_update=update)


def with_vectors(slim: Released, vectors: torch.Tensor) -> Released:
    """Return the releases with the rows [3, d] of shared memory as vectors."""
    previous = None if slim.previous is None else vectors[1]
    return replace(slim, model=vectors[0], previous=previous, public_update=None if slim.public_update is None else vectors[2])


def outcome_values(outcome: Outcome, release: SealedUpload | Contribution | None, sealed: torch.Tensor) -> Values:
    """Return an outcome's values with that release; a contribution becomes its values, `sealed` replacing its vector."""
    client, _, *more = _of_outcome(outcome)
    if isinstance(release, Contribution):
        return client, tuple(sealed if part is release.sealed else part for part in _of_contribution(release)), *more
    return client, release, *more


def outcome_of(values: Values) -> Outcome:
    """Return the outcome with these values."""
    client, release, *more = values
    return Outcome(client, Contribution(*release) if isinstance(release, tuple) else release, *more)


def pack(value: Any, place: Callable[[Array], int | None] | None = None) -> bytes:
    """Pickle a message for a pipe between our own processes.

    Tensors are sent by value, since torch's own way keeps a file open for each. If `place` returns an offset in the shared
    buffers for a large tensor, only its location is sent.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, place).dump(value)
    return buffer.getvalue()


def unpack(message: bytes, tensor_at: TensorAt) -> Any:
    """Return the packed value; `tensor_at` finds tensors in shared buffers."""
    return _Unpickler(message, tensor_at).load()


def reply(answer: list[Values] | Outcome | Exception | None, arena: WorkerArena | None = None) -> bytes:
    """Return a worker's message: the size of what it put, or needed to put, into its buffer [8 bytes], and the answer."""
    packed = pack(answer, arena.place if arena is not None else None)
    return (arena.needed if arena is not None else 0).to_bytes(8, "little") + packed


def read_reply(message: bytes, tensor_at: TensorAt) -> tuple[int, Any]:
    """Return (size, answer) of a worker's message."""
    return int.from_bytes(message[:8], "little"), unpack(message[8:], tensor_at)


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
        return _tensor_at, (offset, array.dtype.str, array.shape)


class _Unpickler(pickle.Unpickler):
    def __init__(self, message: bytes, tensor_at: TensorAt) -> None:
        super().__init__(io.BytesIO(message))
        self._find = tensor_at

    def find_class(self, module: str, name: str) -> Any:
        return self._find if (module, name) == (__name__, _tensor_at.__name__) else _class(module, name)


@cache
def _class(module: str, name: str) -> Any:
    return pickle.Unpickler(io.BytesIO()).find_class(module, name)


def _stand_in(name: str) -> torch.Tensor:
    return _STAND_INS[name]


def _tensor_at(offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raise LookupError("stands for the `tensor_at` of `unpack`")
