"""Shared memory for what clients keep: a worker writes it once, and no process copies it until the client's next round is over.

All slots lie in one file in memory, which has no name, so that it is gone with the last process, however that ends. The tensors
that the main process has of a client lie in the slot that its worker wrote; a slot is free again when the last of them is gone. A
client's new state goes into another slot than its old one, so a client that fails half-way changes nothing.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import reduction
from typing import Any

import numpy as np
import torch

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
