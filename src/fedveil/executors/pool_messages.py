"""Messages between the pool's main process and its workers, and the shared memory that they refer to.

All slots lie in one file in memory, which has no name, so that it is gone with the last process, however that ends. The tensors
that the main process has of a client lie in the slot that its worker wrote; a slot is free again when the last of them is gone. A
client's new state goes into another slot than its old one, so a client that fails half-way changes nothing.
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
There = Callable[[int, str, tuple[int, ...]], torch.Tensor]
"""(offset in the file, dtype, shape) -> the tensor that lies there."""

LEAST = 4096
"""Tensors of fewer bytes go through the pipe."""

_ALIGNMENT = 64
_FIRST = 8


@dataclass(frozen=True)
class Slot:
    """A stretch of the file that one worker may write: `offset` and `size` in bytes, whole pages."""

    offset: int
    size: int


class Handle:
    """The file, as an argument of a process that is started by forking or spawning."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Callable[[Any], Handle], tuple[Any]]:
        return _received, (reduction.DupFd(self.descriptor),)


def _received(duplicate: Any) -> Handle:
    return Handle(duplicate.detach())


class SharedArena:
    """The main process's side: lends slots to workers and knows which of its tensors lie in one."""

    def __init__(self) -> None:
        self.handle = Handle(_file_in_memory())
        self._size = self._end = 0
        self._free: list[Slot] = []
        self._chunks: list[tuple[int, int, mmap.mmap]] = []

    def close(self) -> None:
        """No more slots; tensors that lie in some stay."""
        os.close(self.handle.descriptor)

    def need(self, size: int) -> None:
        """A worker had so many bytes to keep."""
        if size > self._size:
            self._size = _pages(max(size, self._size * 5 // 4))

    def lend(self) -> Slot | None:
        """A free slot that holds what workers were seen to keep; None while none kept anything."""
        if not self._size:
            return None
        while self._free:
            slot = self._free.pop()
            if slot.size >= self._size:
                return slot
        self._grow()
        return self._free.pop()

    def give_back(self, slot: Slot | None) -> None:
        """Its worker has ended."""
        if slot is not None:
            self._free.append(slot)

    def filled(self, slot: Slot | None) -> There:
        """How to find what a worker wrote into the slot, which is free again when all that was found is gone."""
        if slot is None:
            return _nothing
        start, _, chunk = next(c for c in self._chunks if c[0] <= slot.offset < c[1])
        memory = (ctypes.c_char * slot.size).from_buffer(chunk, slot.offset - start)
        weakref.finalize(memory, self._free.append, slot).atexit = False

        def there(offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
            array = np.frombuffer(memoryview(memory), dtype, math.prod(shape), offset - slot.offset)
            return torch.from_numpy(array.reshape(shape))

        return there

    def place(self, array: Array) -> int | None:
        """The offset at which the array lies already, if it does."""
        address = array.ctypes.data
        for start, end, chunk in self._chunks:
            first = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
            if first <= address and address + array.nbytes <= first + end - start and array.flags.c_contiguous:
                return start + address - first
        return None

    def _grow(self) -> None:
        """Twice the slots; memory is taken only when one is written."""
        count = max(_FIRST, self._end // self._size)
        start, self._end = self._end, self._end + count * self._size
        os.ftruncate(self.handle.descriptor, self._end)
        chunk = mmap.mmap(self.handle.descriptor, self._end - start, offset=start)
        self._chunks.append((start, self._end, chunk))
        self._free += [Slot(start + i * self._size, self._size) for i in reversed(range(count))]


class WorkerArena:
    """A worker's side during one task: reads where the main process's tensors lie, writes into its slot."""

    def __init__(self, handle: Handle, slot: Slot | None) -> None:
        self._file, self._slot = handle.descriptor, slot
        self._memory: mmap.mmap | None = None
        self.needed = 0

    def there(self, offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor that lies there; what is done to it stays in this process."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        skipped = offset % mmap.ALLOCATIONGRANULARITY
        memory = mmap.mmap(self._file, size + skipped, access=mmap.ACCESS_COPY, offset=offset - skipped)
        return torch.from_numpy(np.frombuffer(memory, dtype, math.prod(shape), skipped).reshape(shape))

    def place(self, array: Array) -> int | None:
        """Write the array into the slot and return its offset in the file; None if there is no room."""
        begin, self.needed = self.needed, self.needed + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._slot is None or self.needed > self._slot.size:
            return None
        if self._memory is None:
            self._memory = mmap.mmap(self._file, self._slot.size, offset=self._slot.offset)
        np.frombuffer(self._memory, array.dtype, array.size, begin).reshape(array.shape)[...] = array
        return self._slot.offset + begin


def _nothing(offset: int, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    raise LookupError("a worker without a slot has written into one")


def _pages(size: int) -> int:
    return -(-size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def _file_in_memory() -> int:
    if hasattr(os, "memfd_create"):  # does not count against the size of /dev/shm, which containers keep small
        return os.memfd_create("fedveil")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


EMPTY = torch.empty(0)
"""Stands in for a vector that lies in shared memory."""
INTEGERS = torch.empty(0, dtype=torch.int64)
"""The same for a contribution of integers."""
_STAND_INS = {"floats": EMPTY, "integers": INTEGERS, "elsewhere": ELSEWHERE}
_NAMES = {id(tensor): name for name, tensor in _STAND_INS.items()}

Values = tuple[Any, ...]
"""What the fields of an object hold, in their order: it takes a tenth of the time to pickle."""

_of_task = attrgetter("client", "weight", "private", "buffers")
_of_outcome = attrgetter(*(field.name for field in fields(Outcome)))
_of_contribution = attrgetter(*(field.name for field in fields(Contribution)))


def task_values(task: ClientTask, state: State) -> Values:
    """A client's part in a round, without what it shares with the others. state: of its policy."""
    return state, *_of_task(task)


def tasks_of(table: Sequence[Values], released: Released, plan: Plan | Raw | None) -> list[ClientTask]:
    """The tasks, with what they share. plan: of the round, where its uploads are summed; else each client plans for itself."""
    return [
        ClientTask(client, released, weight, plan, state if plan is None else {}, *more) for state, client, weight, *more in table
    ]


def without_vectors(released: Released) -> Released:
    """What was released, with a stand-in for each vector [d], which workers read in shared memory."""
    previous, update = (None if vector is None else EMPTY for vector in (released.previous, released.public_update))
    return replace(released, model=EMPTY, previous=previous, public_update=update)


def with_vectors(slim: Released, vectors: torch.Tensor) -> Released:
    """What was released, its vectors the rows [3, d] of shared memory."""
    previous = None if slim.previous is None else vectors[1]
    return replace(slim, model=vectors[0], previous=previous, public_update=None if slim.public_update is None else vectors[2])


def outcome_values(outcome: Outcome, release: SealedUpload | Contribution | None, sealed: torch.Tensor) -> Values:
    """An outcome with that release; a contribution is given by its values, too, `sealed` in place of its vector."""
    client, _, *more = _of_outcome(outcome)
    if isinstance(release, Contribution):
        return client, tuple(sealed if part is release.sealed else part for part in _of_contribution(release)), *more
    return client, release, *more


def outcome_of(values: Values) -> Outcome:
    """The outcome."""
    client, release, *more = values
    return Outcome(client, Contribution(*release) if isinstance(release, tuple) else release, *more)


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


def reply(answer: list[Values] | Outcome | Exception | None, arena: WorkerArena | None = None) -> bytes:
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
