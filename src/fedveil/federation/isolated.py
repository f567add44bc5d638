"""Isolation of user-defined code: each client's data is processed in a child forked for that client alone.

Only plain values come back, through an unnamed file: numbers, strings, lists, dictionaries and tensors. A child that is
killed, hangs, exits or returns anything else counts as a failed client. The child has one thread, since library threads do not
survive a fork; its own standard streams, since the thread of a progress bar may hold the lock of the parent's; and its own
process group, which is killed with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from fedveil.errors import FedveilError
from fedveil.federation.plain_state import read_tree, tree_parts

LONGEST = 3600.0
"""Seconds after which a child counts as hanging."""
_POLL = 0.2
_PR_SET_PDEATHSIG = 1


class ChildFailed(FedveilError):
    """Child process that returned no result; the message is the reason."""


def can_fork() -> bool:
    """Return whether a forked child can train: not on Windows or macOS, and with a GPU only before any backward pass."""
    return sys.platform.startswith("linux") and a_fork_can_train()


def a_fork_can_train() -> bool:
    """Return whether a forked process can run a backward pass: with a GPU, only if its parent has not run one."""
    if not torch.cuda.is_available():
        return True
    child = os.fork()
    if not child:
        try:
            torch.ones(1, requires_grad=True).sum().backward()  # type: ignore[no-untyped-call]
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


class TookTooLong(Exception):
    """Raised for training that takes longer than the client allows."""


@contextmanager
def ended_after(seconds: float | None) -> Iterator[None]:
    """Raise TookTooLong in the block after that many seconds, or never; Python interrupts only the main thread (not on Windows).

    An operation of PyTorch is not interrupted in its middle.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: object) -> None:
        raise TookTooLong(f"training took longer than the {seconds:g} seconds that this client allows")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def forked(act: Callable[[], dict[str, Any]], longest: float = LONGEST) -> dict[str, Any]:
    """Return the plain values that `act` returns, after running it in a child process.

    Raises:
            ChildFailed: the child was killed, exited, hung, failed or returned other values.
    """
    with tempfile.TemporaryFile() if not hasattr(os, "memfd_create") else os.fdopen(os.memfd_create("client"), "r+b") as answer:
        ended, alive = os.pipe()
        parent = os.getpid()
        child = started(lambda: in_this_child(lambda: _write(answer.fileno(), act), parent))
        os.close(alive)
        try:
            _wait(child, ended, longest)
            return _answer(answer.fileno())
        finally:
            os.close(ended)
            end(child)


def started(run: Callable[[], NoReturn]) -> int:
    """Fork a child that calls `run` in a process group of its own, and return its process id."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()  # else the child would write the buffered text, too
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about live threads: the child uses none
        child = os.fork()
    if not child:
        run()
    with suppress(OSError):
        os.setpgid(child, child)
    return child


def end(child: int) -> None:
    """Kill a child and all processes that it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)


def in_this_child(act: Callable[[], None], parent: int) -> NoReturn:
    """Do `act` in a process that was just forked, and exit: with one thread, and with streams and signals of its own.

    A thread of its parent may have held the locks of the streams.
    """
    code = 1
    try:
        os.setpgid(0, 0)
        end_with(parent)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        gc.disable()  # a collection would copy the parent's pages
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        torch.set_num_threads(1)
        act()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        code = 0
    finally:
        os._exit(code)


def _write(answer: int, act: Callable[[], dict[str, Any]]) -> None:
    """Write the tree that `act` returns, or its error message."""
    try:
        parts = list(tree_parts({"value": act()}))
    except BaseException as error:
        parts = list(tree_parts({"error": f"{type(error).__name__}: {error}"}))
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(answer, left) :]


def end_with(parent: int) -> None:
    """Ask the system to end this process when its parent ends, however that happens (Linux)."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _wait(child: int, ended: int, longest: float) -> None:
    """Wait until the child exits normally; the pipe's other end is open in the child and perhaps in processes it started."""
    until, poll = time.monotonic() + longest, select.poll()  # poll, unlike select, takes descriptors of any number
    poll.register(ended, select.POLLIN)
    while True:
        poll.poll(1000 * min(_POLL, max(until - time.monotonic(), 0.0)))
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() >= until:
            raise ChildFailed(f"its process took longer than {longest:g} s")
    if status:
        raise ChildFailed(f"its process {ending(status)}")


def ending(status: int) -> str:
    """Say how a process ended, from what `os.waitpid` returned."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        hint = ", as where memory runs out" if number == signal.SIGKILL else ""
        return f"was ended by {signal.Signals(number).name}{hint}"
    return f"ended with exit code {os.WEXITSTATUS(status)}"


def _answer(file: int) -> dict[str, Any]:
    try:
        tree = read_tree(Path(f"/dev/fd/{file}"))
    except Exception as error:  # an empty file, if the child exited by itself
        raise ChildFailed(f"its process ended without an answer ({type(error).__name__})") from None
    if "error" in tree:
        raise ChildFailed(str(tree["error"]))
    value: dict[str, Any] = tree["value"]
    return value


def seed_generators(seed: int, *parts: object) -> None:
    """Seed the numpy, Python and torch generators attached to these objects; otherwise every child would draw the same.

    Args:
        parts: modules are searched recursively, other objects by attribute; lists and dictionaries one level deep.
    """
    for number, generator in enumerate(_generators(parts)):
        derived = (seed + number) % 2**63
        if isinstance(generator, torch.Generator):
            generator.manual_seed(derived)
        elif isinstance(generator, random.Random):
            generator.seed(derived)
        elif isinstance(generator, np.random.RandomState):
            generator.seed([derived & 0xFFFFFFFF, derived >> 32])
        else:
            bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
            bits.state = type(bits)(derived).state


def _generators(parts: tuple[object, ...]) -> Iterator[Any]:
    kinds = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)
    yielded = set[int]()
    for part in parts:
        for owner in part.modules() if isinstance(part, torch.nn.Module) else [part]:
            for value in list(getattr(owner, "__dict__", {}).values()):
                nested = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
                for one in (value, *nested):
                    if isinstance(one, kinds) and id(one) not in yielded:
                        yielded.add(id(one))
                        yield one
