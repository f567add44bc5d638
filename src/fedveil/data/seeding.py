"""Random generators that depend only on a seed and a purpose; and draws by owner.

A split over the examples of all clients together depends on how many each has: with one example less at one client, the others
would train on different examples, which no clip bounds. `draws` gives an owner's examples numbers that depend only on the owner's
lot and on their positions among its examples.

All threads of a process share the global generators of torch, numpy and Python. Code that seeds, uses and restores them takes a
`turn`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.errors import ConfigError

_log = logging.getLogger(__name__)
_lock = threading.RLock()


@contextmanager
def turn() -> Iterator[None]:
    """Wait until no other thread trains or reads data with fedveil, and make the others wait meanwhile; turns may nest."""
    lock = _lock
    if not lock.acquire(blocking=False):
        _log.info("another thread trains or reads data with fedveil; this one waits, since both use the global generators")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _renew() -> None:
    """Reset the lock in a forked process, where threads of the parent that held it no longer exist."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """Return a separate generator for each (seed, purpose); seed: a non-negative integer. ConfigError otherwise."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ConfigError(f"seed is {seed!r}; give a non-negative integer")
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=tuple(purpose.encode())))


def lots(names: Iterable[str]) -> NDArray[np.uint64]:
    """Return a hash of each name as a number."""
    each = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(each), dtype="<u8").astype(np.uint64)


def draws(lots: NDArray[np.uint64], owners: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return a number for each example from its owner's lot and its position among that owner's examples (SplitMix64).

    Args:
        lots: of the owners, by code. owners: code of each example's owner, from 0.
    """
    place = places(owners).astype(np.uint64)
    with np.errstate(over="ignore"):
        z = lots[owners] + (place + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(z ^ (z >> np.uint64(31)), dtype=np.uint64)


def places(owners: NDArray[np.int64], by: NDArray[Any] | None = None) -> NDArray[np.int64]:
    """Return the position of each example among its owner's, from 0: in the order of the rows, or by `by`."""
    order = np.lexsort((owners,) if by is None else (by, owners))
    sizes = np.bincount(owners)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place
