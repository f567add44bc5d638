"""Partitions as functions: each returns the owner of every example, -1 for an example that no client gets."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.partition_options import Dirichlet, Iid, LabelCount, Shards, Users
from fedveil.errors import ConfigError

Ints = NDArray[np.int64]
Owners = tuple[Ints, dict[str, Any]]
Generator = np.random.Generator


def iid(options: Iid, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Uniformly at random."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    sizes = equal_sizes(len(labels), options.clients, options.examples_per_client)
    owner[rng.permutation(len(labels))[: sizes.sum()]] = np.repeat(np.arange(options.clients), sizes)
    return owner, {}


def dirichlet(options: Dirichlet, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Label by label in Dirichlet proportions."""
    need_enough(len(labels), options.clients * options.min_size, f"{options.clients} clients of at least {options.min_size}")
    totals = np.bincount(labels)
    tries = options.max_tries if options.too_small == "resample" else 1
    for _ in range(tries):
        counts = dirichlet_counts(totals, options.clients, options.alpha, rng)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= options.min_size:
            return owners(labels, counts, rng), {}
    if options.too_small == "resample":
        raise ConfigError(
            f"dirichlet: no draw of {tries} with alpha = {options.alpha} gave each of {options.clients} clients min_size = "
            f"{options.min_size} examples (the smallest client of the last draw has {smallest}); take a larger alpha, fewer "
            "clients, a smaller min_size (0 allows clients without data), or too_small = 'top-up'"
        )
    return top_up(owners(labels, counts, rng), labels, options.clients, options.min_size, rng), {}


def shards(options: Shards, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Shards of examples sorted by label."""
    pieces = options.clients * options.per_client
    need_enough(len(labels), pieces, f"{options.clients} clients with {options.per_client} shards each")
    by_label = rng.permutation(len(labels))
    by_label = by_label[np.argsort(labels[by_label], kind="stable")]
    shard = np.repeat(np.arange(pieces), equal_sizes(len(labels), pieces, None))
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label] = rng.permutation(pieces)[shard] // options.per_client
    return owner, {}


def label_count(options: LabelCount, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """The same number of labels for each client."""
    held = np.unique(labels)
    if options.labels_per_client > len(held):
        raise ConfigError(f"label-count: labels_per_client = {options.labels_per_client}, but the data hold only {len(held)}")
    if options.labels_per_client * options.clients < len(held):
        raise ConfigError(
            f"label-count: {options.clients} clients with {options.labels_per_client} labels each cannot hold all "
            f"{len(held)} labels; take more clients or more labels for each"
        )
    holds = balanced_choice(options.clients, len(held), options.labels_per_client, rng)
    counts = np.zeros((int(held[-1]) + 1, options.clients), dtype=np.int64)
    for label, holders in zip(held, holds.T, strict=True):
        total = int((labels == label).sum())
        need_enough(total, int(holders.sum()), f"{int(holders.sum())} clients that hold label {label}")
        counts[label, holders] = equal_sizes(total, int(holders.sum()), None)
    return owners(labels, counts, rng), {}


def users(options: Users, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Natural users, in ascending order of their ids."""
    if users is None:
        raise ConfigError("users: this data set has no natural users; choose another kind of partition")
    ids, who = np.unique(users, return_inverse=True)
    clients = len(ids) if options.clients is None else options.clients
    if clients > len(ids):
        raise ConfigError(f"users: clients = {clients}, but there are only {len(ids)} users with training examples")
    chosen = np.sort(rng.permutation(len(ids))[:clients])
    rank = np.full(len(ids), -1, dtype=np.int64)
    rank[chosen] = np.arange(clients)
    return rank[who], {"users": ids[chosen]}


def equal_sizes(total: int, clients: int, each: int | None) -> Ints:
    """`each` for every client, or `total` shared equally within one; ConfigError if that is more than exist."""
    need_enough(total, clients * (each or 1), f"{clients} clients with {each or 'at least 1'} each")
    if each is not None:
        return np.full(clients, each, dtype=np.int64)
    return np.diff(np.arange(clients + 1, dtype=np.int64) * total // clients)


def need_enough(available: int, wanted: int, what: str) -> None:
    """ConfigError if more examples are requested than exist."""
    if wanted > available:
        raise ConfigError(f"{what} need {wanted} examples; there are {available}")


def dirichlet_counts(totals: Ints, clients: int, alpha: float, rng: Generator) -> Ints:
    """Examples of each label (rows) for each client (columns): cumulative Dirichlet proportions, rounded down."""
    shares = rng.dirichlet(np.full(clients, alpha), size=len(totals))
    cuts = np.floor(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    cuts = np.minimum(cuts, totals[:, None])
    cuts[:, -1] = totals
    return np.diff(cuts, axis=1, prepend=0)


def owners(labels: Ints, counts: Ints, rng: Generator) -> Ints:
    """Random examples for counts[label, client]; what the counts leave over stays without owner."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels))])
    for label, row in enumerate(counts):
        members = by_label[starts[label] : starts[label + 1]]
        owner[members[: row.sum()]] = np.repeat(np.arange(len(row)), row)
    return owner


def balanced_choice(clients: int, choices: int, each: int, rng: Generator, start: Ints | None = None) -> NDArray[np.bool_]:
    """Mask (clients, choices): `each` different choices per client, every choice taken equally often within one.

    Each client takes those least taken so far, ties by lot. start: how often each choice is already taken.
    """
    counts = np.zeros(choices, dtype=np.int64) if start is None else start.copy()
    mask = np.zeros((clients, choices), dtype=bool)
    for client, lot in enumerate(rng.random((clients, choices))):
        chosen = np.lexsort((lot, counts))[:each]
        mask[client, chosen] = True
        counts[chosen] += 1
    return mask


def top_up(owner: Ints, labels: Ints, clients: int, least: int, rng: Generator, barred: tuple[int, int] | None = None) -> Ints:
    """Move random examples from clients above `least` to clients below it, the largest first.

    barred: (client, label): this client is never given this label.
    """
    owner = owner.copy()
    sizes = np.bincount(owner[owner >= 0], minlength=clients)
    lot = rng.random(len(owner))
    for client in np.flatnonzero(sizes < least):
        for donor in np.argsort(-sizes, kind="stable"):
            room = min(int(sizes[donor]) - least, least - int(sizes[client]))
            if room <= 0:
                break
            fair = owner == donor
            if barred is not None and client == barred[0]:
                fair &= labels != barred[1]
            moved = np.flatnonzero(fair)
            moved = moved[np.argsort(lot[moved], kind="stable")][:room]
            owner[moved] = client
            sizes[donor] -= len(moved)
            sizes[client] += len(moved)
        if sizes[client] < least:
            raise ConfigError(f"client {client} cannot be given min_size = {least} examples: too few are left that it may have")
    return owner
