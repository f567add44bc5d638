"""What a process has once for all that it does: cores, threads of torch, random generators, the default type."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from fedveil.data.seeding import turn


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def process_state() -> Iterator[None]:
    """Use what all threads of the process share in turns with them; torch's default type is float32 meanwhile, then as before."""
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
    """One thread of torch meanwhile: how many there are changes the order of sums, and so the last bits of what is trained."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
