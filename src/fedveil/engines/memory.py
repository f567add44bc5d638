"""Memory: settings that training profits from, and tensors that processes share."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

import torch

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory instead of returning it to the system page by page.

    The tensors of each training step are freed and asked for again at once; with the default settings that costs a third of a
    small network's step in page faults. Returns whether the settings were made (glibc only); the results do not change.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_MMAP_THRESHOLD, 2**30), (_M_TOP_PAD, 64 * 2**20))
    return all(mallopt(name, value) for name, value in settings)


def shared_zeros(*shape: int, inherited: bool, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of zeros that processes share.

    Args:
        inherited: by forked processes; else it can be sent to spawned ones. Inherited memory does not count against the size
            of /dev/shm, which containers keep small.
    """
    count = math.prod(shape)
    if not inherited or not count:
        return shared(torch.zeros(*shape, dtype=dtype))
    return torch.frombuffer(mmap.mmap(-1, dtype.itemsize * count), dtype=dtype, count=count).view(shape)


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, moved in place to memory that spawned processes share."""
    moved: torch.Tensor = tensor.share_memory_()  # type: ignore[no-untyped-call]
    return moved
