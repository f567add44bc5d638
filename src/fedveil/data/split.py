"""Further splits: a public part of the training set, a test set for each client, users on both sides."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.dataset import Dataset, strata
from fedveil.data.partition import ClientIndices, Partition
from fedveil.data.seeding import draws, generator, lots, places
from fedveil.errors import ConfigError, DataError

Ints = NDArray[np.int64]


def public_split(
    total: int, *, seed: int, fraction: float | None = None, size: int | None = None, users: NDArray[Any] | None = None
) -> tuple[Ints, Ints]:
    """Take a random public part out of `total` training examples, before they are partitioned among clients.

    fraction: between 0 and 1, rounded down; or size: number of examples; exactly one of them.
    users: the owner of each example [total], if users are the clients; only with fraction. That share of each user's examples is
    public, rounded up or down at random, and at most all but one; it does not depend on other users. Returns the ascending
    indices (private, public), neither of them empty; hand the first to `partition` as `among`.
    """
    if (fraction is None) == (size is None):
        raise ConfigError("a public split needs either public_fraction or public_size, and not both")
    if fraction is not None:
        _between("public_fraction", fraction)
        if users is not None:
            return _public_of_each(users, fraction, seed)
        size = int(total * fraction)
    if size is None or isinstance(size, bool) or not 0 < size < total:
        raise ConfigError(f"a public split of {size} from {total} training examples; give 1 to {total - 1}")
    shuffled = generator(seed, "public split").permutation(total).astype(np.int64)
    return np.sort(shuffled[size:]), np.sort(shuffled[:size])


def _public_of_each(users: NDArray[Any], fraction: float, seed: int) -> tuple[Ints, Ints]:
    """Return the public split of each user's examples, from a separate stream for each user."""
    ids, who = np.unique(users, return_inverse=True)
    sizes, rounding = np.bincount(who), lots(f"public split, rounding\n{seed}\n{one}" for one in ids) / 2.0**64
    shown = _part(who, np.minimum(np.floor(fraction * sizes + rounding), sizes - 1), "public split", seed, ids)
    if not shown.any():
        raise ConfigError(
            f"a public split of 0 from {len(who)} training examples of {len(ids)} users: take a larger public_fraction than "
            f"{fraction:g}"
        )
    return np.flatnonzero(~shown), np.flatnonzero(shown)


def _part(owners: Ints, counts: NDArray[Any], purpose: str, seed: int, names: Iterable[Any]) -> NDArray[np.bool_]:
    """Choose `counts` random examples of each owner, independently of the others.

    names: of the owners; the stream of each depends on its name, the seed and the purpose.
    """
    own = draws(lots(f"{purpose}\n{seed}\n{name}" for name in names), owners)
    return np.asarray(places(owners, own) < counts[owners], dtype=np.bool_)


def client_test_split(partition: Partition, fraction: float, *, seed: int) -> tuple[Partition, ClientIndices]:
    """Keep a random part of each client's examples for testing.

    fraction: between 0 and 1; client i with n examples keeps round(fraction * n) for testing, but at most n - 1, so a client
    that has data still trains. Which ones depends on the seed, its number i and n alone, so that one client's data change
    nobody else's split. Returns the partition of the rest, and the test examples by client (indices into the
    training set, possibly none for small clients).
    """
    _between("client_test_fraction", fraction)
    sizes = partition.sizes
    held = held_for_tests(sizes, fraction).astype(np.int64)
    order, clients = partition.clients.order, np.arange(len(sizes))
    test = _part(np.repeat(clients, sizes), held, "client test split", seed, clients)
    train = ClientIndices(order[~test], _offsets(sizes - held))
    return dataclasses.replace(partition, clients=train), ClientIndices(order[test], _offsets(held))


def held_for_tests(sizes: NDArray[Any] | float, fraction: float) -> NDArray[Any]:
    """Return the number of test examples of each client, from the clients' numbers of examples."""
    return np.asarray(np.clip(np.floor(fraction * np.asarray(sizes) + 0.5), 0, np.maximum(np.asarray(sizes) - 1, 0)))


def split_within_users(dataset: Dataset, test_fraction: float) -> Dataset:
    """Split the same examples so that every natural user is on both sides.

    Needed if the official split separates the users (UCI HAR has 21 users in training, 9 others in test) and every user is
    to be a client. For each user and label the last `test_fraction` of the examples in file order, rounded down, become test
    examples: neighbouring windows of a signal overlap, and this way only those at the cut do.
    test_fraction: between 0 and 1. DataError if the data set has no users; ConfigError if no test example remains.
    """
    _between("test_fraction", test_fraction)
    if dataset.users_train is None or dataset.users_test is None:
        raise DataError(f"{dataset.info.name} has no natural users to split within")
    x = np.concatenate([dataset.x_train, dataset.x_test])
    y = np.concatenate([dataset.y_train, dataset.y_test])
    users = np.concatenate([dataset.users_train, dataset.users_test])
    group = np.unique(users * max(dataset.info.classes, 1) + strata(dataset.info, y), return_inverse=True)[1]
    by_group = np.argsort(group, kind="stable")
    sizes = np.bincount(group)
    rank = np.empty(len(y), dtype=np.int64)
    rank[by_group] = np.arange(len(y)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    test = rank >= (sizes - np.floor(sizes * test_fraction).astype(np.int64))[group]
    if not test.any():
        raise ConfigError(f"test_fraction = {test_fraction} leaves no test examples; take a larger one")
    return Dataset(dataset.info, x[~test], y[~test], x[test], y[test], users[~test], users[test])


def _between(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 < value < 1):
        raise ConfigError(f"{name} = {value}; give a number between 0 and 1")


def _offsets(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
