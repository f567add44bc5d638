"""State shared by a whole process: cores, torch threads, random generators and the default type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fedveil.data.seeding import turn


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def process_state() -> Iterator[None]:
    """Hold the process-wide lock and set torch's default type to float32; the earlier type is restored at the end."""
    import torch

    with turn():
        kind = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(kind)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to one thread, because the number of threads changes the order of sums and so the last bits of a model."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
