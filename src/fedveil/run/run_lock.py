"""One process at a time works in a run directory."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedveil.errors import ConfigError

_held: set[int] = set()


@contextmanager
def claimed(path: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the directory `path` for this run; the claim lies in the kernel and ends with the process, however it ends.

    Args:
        wait: until whoever holds it has let go.

    Raises:
        ConfigError: another run holds it, or its file system knows no locks.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise ConfigError(
                f"another run is at work in {path}: wait until it has ended, or stop it; choose another --out for a run beside it"
            ) from None
        except OSError as problem:
            raise ConfigError(
                f"cannot lock {path} against a second run ({problem.strerror}): choose an --out on a local disk"
            ) from problem
        _held.add(descriptor)
        yield
    finally:
        _held.discard(descriptor)
        os.close(descriptor)


def _let_go() -> None:
    """A forked child shares its parent's claim, and would keep it alive: only the run itself holds it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
