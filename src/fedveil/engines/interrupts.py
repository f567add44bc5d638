"""Ctrl-C at moments at which it would leave a process behind."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def put_off() -> Iterator[None]:
    """Hold back an interruption until the block has ended; processes started in it begin with interruptions blocked.

    Without effect outside the main thread, which is the only one that Python interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *arguments: held.append(arguments))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if held:
            signal.raise_signal(signal.SIGINT)


def ends_on_interrupt() -> bool:
    """Whether an interruption ends what this process does, because nobody handles or ignores it."""
    return signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL)


def begin_worker(ends: bool) -> None:
    """Set a worker's signals: an interruption from the terminal, which reaches all processes, ends it at once or not at all."""
    signal.signal(signal.SIGINT, signal.SIG_DFL if ends else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
