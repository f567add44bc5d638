"""The distributions of LaDP-FL's evaluation (sections VII-A and VII-B6): one curious client lacks one private label."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedveil.data.partition_kinds import (
    Generator,
    Ints,
    Owners,
    balanced_choice,
    dirichlet_counts,
    equal_sizes,
    need_enough,
    owners,
    top_up,
)
from fedveil.data.partition_options import Isolation, Ladp1, Ladp2
from fedveil.errors import ConfigError


def isolation(options: Isolation, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Iid of equal sizes; the curious client's examples are drawn from the public labels alone."""
    extras = _checked(options, labels)
    sizes = equal_sizes(len(labels), options.clients, options.examples_per_client)
    own = int(sizes[options.curious])
    shuffled = rng.permutation(len(labels))
    public = shuffled[labels[shuffled] != options.private_label]
    need_enough(len(public), own, "the curious client's share of the public labels")
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[public[:own]] = options.curious
    rest = rng.permutation(np.flatnonzero(owner < 0))
    others = np.delete(np.arange(options.clients), options.curious)
    clients = np.repeat(others, sizes[others])
    owner[rest[: len(clients)]] = clients
    return owner, extras


def ladp1(options: Ladp1, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Distribution I."""
    extras = _checked(options, labels)
    totals = np.bincount(labels)
    public = np.delete(np.arange(len(totals)), options.private_label)
    public = public[totals[public] > 0]
    if options.labels_per_client - 1 > len(public):
        raise ConfigError(f"ladp-1: labels_per_client = {options.labels_per_client}, but only {len(public)} labels are public")
    share = options.private_share if options.private_share is not None else float(totals[options.private_label] / totals.sum())
    holds = balanced_choice(options.clients, len(public), options.labels_per_client - 1, rng)
    size = _size(options, holds, public, share, totals)
    return owners(labels, _ladp1_counts(options, holds, public, share, size, len(totals)), rng), extras


def _size(options: Ladp1, holds: NDArray[np.bool_], public: Ints, share: float, totals: Ints) -> int:
    """The size asked for, or the largest that no label is too rare for (found by bisection: demand grows with size)."""

    def fits(size: int) -> bool:
        return bool((_ladp1_counts(options, holds, public, share, size, len(totals)).sum(axis=1) <= totals).all())

    low, high = options.labels_per_client - 1, int(totals.sum()) // options.clients + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    if low < options.labels_per_client:
        raise ConfigError(
            f"ladp-1: the labels are too rare for {options.clients} clients with {options.labels_per_client} labels each"
        )
    size = low if options.examples_per_client is None else options.examples_per_client
    if not options.labels_per_client <= size <= low:
        raise ConfigError(
            f"ladp-1: examples_per_client = {size} is not possible; with {options.clients} clients, "
            f"{options.labels_per_client} labels and a private share of {share:.3g} it may be "
            f"{options.labels_per_client} to {low}"
        )
    return size


def _ladp1_counts(options: Ladp1, holds: NDArray[np.bool_], public: Ints, share: float, size: int, classes: int) -> Ints:
    """Table (labels, clients): the private share, then the rest equally over the client's public labels."""
    private = np.full(options.clients, max(1, int(size * share)), dtype=np.int64)
    private[options.curious] = 0
    quotient, remainder = np.divmod(size - private, options.labels_per_client - 1)
    rank = np.cumsum(holds, axis=1) - 1
    counts = np.zeros((classes, options.clients), dtype=np.int64)
    counts[options.private_label] = private
    counts[public] = (holds * (quotient[:, None] + (rank < remainder[:, None]))).T
    return counts


def ladp2(options: Ladp2, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Distribution II."""
    extras = _checked(options, labels)
    need_enough(len(labels), options.clients * options.min_size, f"{options.clients} clients of at least {options.min_size}")
    private, totals = options.private_label, np.bincount(labels)
    counts = dirichlet_counts(totals, options.clients, options.alpha, rng)
    alpha = options.alpha if options.private_alpha is None else options.private_alpha
    others = dirichlet_counts(totals[[private]], options.clients - 1, alpha, rng)[0]
    counts[private] = np.insert(others, options.curious, 0)
    owner = owners(labels, counts, rng)
    return top_up(owner, labels, options.clients, options.min_size, rng, barred=(options.curious, private)), extras


def _checked(options: Isolation | Ladp1 | Ladp2, labels: Ints) -> dict[str, Any]:
    if options.clients < 2:
        raise ConfigError(f"{options.kind}: clients = {options.clients}; there must be a curious client and at least one other")
    if options.curious >= options.clients:
        raise ConfigError(f"{options.kind}: curious = {options.curious}; give a client from 0 to {options.clients - 1}")
    if not (labels == options.private_label).any():
        held = ", ".join(str(label) for label in np.unique(labels)[:12])
        raise ConfigError(f"{options.kind}: no example has private_label = {options.private_label}; the data hold {held}")
    return {"private_label": options.private_label, "curious": options.curious}
