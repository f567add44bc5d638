"""Signals that end a run: an interruption from the terminal, a termination request, a terminal that hangs up."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_ENDING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))


_received: list[int] = []


@contextmanager
def end_alike() -> Iterator[list[int]]:
    """Let each of these signals interrupt the program, unless it is ignored (nohup), and yield the list of received signals."""
    _received.clear()
    if threading.current_thread() is not threading.main_thread():
        yield _received
        return
    handled = [number for number in _ENDING if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL]
    for number in handled:
        signal.signal(number, _end)
    try:
        yield _received
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)


def _end(number: int, frame: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt


@contextmanager
def put_off() -> Iterator[None]:
    """Defer these signals until the block has ended; processes started in it begin with them blocked.

    This has no effect outside the main thread, which is the only one that Python interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: late.append(number)) for number in _ENDING if _handled(number)}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, before)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in late[:1]:
            signal.raise_signal(number)


def _handled(number: int) -> bool:
    """Return whether a signal is deferred: an interruption always, the others if the program handles them."""
    return number == signal.SIGINT or signal.getsignal(number) is _end


def ends_on_interrupt() -> bool:
    """Return whether an interruption ends this process's work, because nothing handles or ignores it."""
    return signal.getsignal(signal.SIGINT) in (signal.default_int_handler, signal.SIG_DFL)


def begin_worker(ends: bool) -> None:
    """Set a worker's signals: an interruption from the terminal, which reaches all processes, ends it at once or not at all."""
    signal.signal(signal.SIGINT, signal.SIG_DFL if ends else signal.SIG_IGN)
    for number in _ENDING:
        if number == signal.SIGTERM or signal.getsignal(number) is _end:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
