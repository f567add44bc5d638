"""Random generators that depend on a seed and a purpose, and on nothing else; and draws by owner.

A split that is drawn over the examples of all clients together depends on how many each has: one example less at one client, and
the others train on other examples. The clip of one client bounds none of that. `draws` gives an owner's examples numbers that
depend on its own lot and on their places among its examples alone.

The global generators of torch, numpy and Python belong to all threads of a process. What seeds them, draws and puts them back
does so within its `turn`.
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
    """Wait until no other thread trains or reads data with fedveil, and keep them waiting meanwhile; turns may nest."""
    lock = _lock
    if not lock.acquire(blocking=False):
        _log.info("another thread trains or reads data with fedveil; this one waits, since both use the global generators")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _renew() -> None:
    """A forked process has one thread: what the others of its parent hold is never given back there."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def generator(seed: int, purpose: str) -> np.random.Generator:
    """A generator of its own for each (seed, purpose); seed: a non-negative integer. ConfigError otherwise."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise ConfigError(f"seed is {seed!r}; give a non-negative integer")
    return np.random.default_rng(np.random.SeedSequence(int(seed), spawn_key=tuple(purpose.encode())))


def lots(names: Iterable[str]) -> NDArray[np.uint64]:
    """A number for each name that depends on nothing else: a hash."""
    each = (hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return np.frombuffer(b"".join(each), dtype="<u8").astype(np.uint64)


def draws(lots: NDArray[np.uint64], owners: NDArray[np.int64]) -> NDArray[np.uint64]:
    """A number for each example from its owner's lot and its place among that owner's examples (SplitMix64).

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
    """The place of each example among its owner's, from 0: in the order of the rows, or by `by`."""
    order = np.lexsort((owners,) if by is None else (by, owners))
    sizes = np.bincount(owners)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return place
