"""Partitions: which client has which training examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from fedveil.data.catalogue import Info
from fedveil.data.partition_options import PARTITIONS, Dirichlet, Iid, Isolation, LabelCount, Ladp1, Ladp2, Shards, Users
from fedveil.data.seeding import generator
from fedveil.errors import ConfigError, nearest, unknown

Ints = NDArray[np.int64]
Owners = tuple[Ints, dict[str, Any]]
Generator = np.random.Generator


def iid(options: Iid, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Deal examples out uniformly at random."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    sizes = _equal_sizes(len(labels), options.clients, options.examples_per_client)
    owner[rng.permutation(len(labels))[: sizes.sum()]] = np.repeat(np.arange(options.clients), sizes)
    return owner, {}


def dirichlet(options: Dirichlet, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Deal each label out in Dirichlet proportions."""
    _need_enough(len(labels), options.clients * options.min_size, f"{options.clients} clients of at least {options.min_size}")
    totals = np.bincount(labels)
    tries = options.max_tries if options.too_small == "resample" else 1
    for _ in range(tries):
        counts = _dirichlet_counts(totals, options.clients, options.alpha, rng)
        smallest = int(counts.sum(axis=0).min())
        if smallest >= options.min_size:
            return owners(labels, counts, rng), {}
    if options.too_small == "resample":
        raise ConfigError(
            f"dirichlet: no draw of {tries} with alpha = {options.alpha} gave each of {options.clients} clients min_size = "
            f"{options.min_size} examples (the smallest client of the last draw has {smallest}); take a larger alpha, fewer "
            "clients, a smaller min_size (0 allows clients without data), or too_small = 'top-up'"
        )
    return _top_up(owners(labels, counts, rng), labels, options.clients, options.min_size, rng), {}


def shards(options: Shards, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Deal out shards of examples sorted by label."""
    pieces = options.clients * options.per_client
    _need_enough(len(labels), pieces, f"{options.clients} clients with {options.per_client} shards each")
    by_label = rng.permutation(len(labels))
    by_label = by_label[np.argsort(labels[by_label], kind="stable")]
    shard = np.repeat(np.arange(pieces), _equal_sizes(len(labels), pieces, None))
    owner = np.empty(len(labels), dtype=np.int64)
    owner[by_label] = rng.permutation(pieces)[shard] // options.per_client
    return owner, {}


def _label_count(options: LabelCount, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Give each client the same number of labels."""
    held = np.unique(labels)
    if options.labels_per_client > len(held):
        raise ConfigError(f"label-count: labels_per_client = {options.labels_per_client}, but the data hold only {len(held)}")
    if options.labels_per_client * options.clients < len(held):
        raise ConfigError(
            f"label-count: {options.clients} clients with {options.labels_per_client} labels each cannot hold all "
            f"{len(held)} labels; take more clients or more labels for each"
        )
    holds = _balanced_choice(options.clients, len(held), options.labels_per_client, rng)
    counts = np.zeros((int(held[-1]) + 1, options.clients), dtype=np.int64)
    for label, holders in zip(held, holds.T, strict=True):
        total = int((labels == label).sum())
        _need_enough(total, int(holders.sum()), f"{int(holders.sum())} clients that hold label {label}")
        counts[label, holders] = _equal_sizes(total, int(holders.sum()), None)
    return owners(labels, counts, rng), {}


def users(options: Users, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Make natural users the clients, in ascending order of their ids."""
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


def _equal_sizes(total: int, clients: int, each: int | None) -> Ints:
    """Return `each` for every client, or `total` shared equally within one; ConfigError if that is more than exist."""
    _need_enough(total, clients * (each or 1), f"{clients} clients with {each or 'at least 1'} each")
    if each is not None:
        return np.full(clients, each, dtype=np.int64)
    return np.diff(np.arange(clients + 1, dtype=np.int64) * total // clients)


def _need_enough(available: int, wanted: int, what: str) -> None:
    """Raise ConfigError if more examples are requested than exist."""
    if wanted > available:
        raise ConfigError(f"{what} need {wanted} examples; there are {available}")


def _dirichlet_counts(totals: Ints, clients: int, alpha: float, rng: Generator) -> Ints:
    """Return counts of each label (rows) for each client (columns): cumulative Dirichlet proportions, rounded down."""
    shares = rng.dirichlet(np.full(clients, alpha), size=len(totals))
    cuts = np.floor(np.cumsum(shares, axis=1) * totals[:, None]).astype(np.int64)
    cuts = np.minimum(cuts, totals[:, None])
    cuts[:, -1] = totals
    return np.diff(cuts, axis=1, prepend=0)


def owners(labels: Ints, counts: Ints, rng: Generator) -> Ints:
    """Choose random examples for counts[label, client]; examples beyond the counts have no owner."""
    owner = np.full(len(labels), -1, dtype=np.int64)
    shuffled = rng.permutation(len(labels))
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(np.bincount(labels))])
    for label, row in enumerate(counts):
        members = by_label[starts[label] : starts[label + 1]]
        owner[members[: row.sum()]] = np.repeat(np.arange(len(row)), row)
    return owner


def _balanced_choice(clients: int, choices: int, each: int, rng: Generator, start: Ints | None = None) -> NDArray[np.bool_]:
    """Return a mask (clients, choices): `each` different choices per client, every choice taken equally often within one.

    Each client takes those least taken so far, with random ties. start: how often each choice is already taken.
    """
    counts = np.zeros(choices, dtype=np.int64) if start is None else start.copy()
    mask = np.zeros((clients, choices), dtype=bool)
    for client, lot in enumerate(rng.random((clients, choices))):
        chosen = np.lexsort((lot, counts))[:each]
        mask[client, chosen] = True
        counts[chosen] += 1
    return mask


def _top_up(owner: Ints, labels: Ints, clients: int, least: int, rng: Generator, barred: tuple[int, int] | None = None) -> Ints:
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


def isolation(options: Isolation, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Deal out IID examples of equal sizes; the curious client gets only public labels."""
    extras = _checked(options, labels)
    sizes = _equal_sizes(len(labels), options.clients, options.examples_per_client)
    own = int(sizes[options.curious])
    shuffled = rng.permutation(len(labels))
    public = shuffled[labels[shuffled] != options.private_label]
    _need_enough(len(public), own, "the curious client's share of the public labels")
    owner = np.full(len(labels), -1, dtype=np.int64)
    owner[public[:own]] = options.curious
    rest = rng.permutation(np.flatnonzero(owner < 0))
    others = np.delete(np.arange(options.clients), options.curious)
    clients = np.repeat(others, sizes[others])
    owner[rest[: len(clients)]] = clients
    return owner, extras


def _ladp1(options: Ladp1, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Deal examples out by Distribution I."""
    extras = _checked(options, labels)
    totals = np.bincount(labels)
    public = np.delete(np.arange(len(totals)), options.private_label)
    public = public[totals[public] > 0]
    if options.labels_per_client - 1 > len(public):
        raise ConfigError(f"ladp-1: labels_per_client = {options.labels_per_client}, but only {len(public)} labels are public")
    share = options.private_share if options.private_share is not None else float(totals[options.private_label] / totals.sum())
    holds = _balanced_choice(options.clients, len(public), options.labels_per_client - 1, rng)
    size = _size(options, holds, public, share, totals)
    return owners(labels, _ladp1_counts(options, holds, public, share, size, len(totals)), rng), extras


def _size(options: Ladp1, holds: NDArray[np.bool_], public: Ints, share: float, totals: Ints) -> int:
    """Return the requested size, or the largest for which no label is too rare (by bisection: demand grows with size)."""

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
    """Return a table (labels, clients): the private share, then the rest equally over the client's public labels."""
    private = np.full(options.clients, max(1, int(size * share)), dtype=np.int64)
    private[options.curious] = 0
    quotient, remainder = np.divmod(size - private, options.labels_per_client - 1)
    rank = np.cumsum(holds, axis=1) - 1
    counts = np.zeros((classes, options.clients), dtype=np.int64)
    counts[options.private_label] = private
    counts[public] = (holds * (quotient[:, None] + (rank < remainder[:, None]))).T
    return counts


def _ladp2(options: Ladp2, labels: Ints, users: Ints | None, rng: Generator) -> Owners:
    """Deal examples out by Distribution II."""
    extras = _checked(options, labels)
    _need_enough(len(labels), options.clients * options.min_size, f"{options.clients} clients of at least {options.min_size}")
    private, totals = options.private_label, np.bincount(labels)
    counts = _dirichlet_counts(totals, options.clients, options.alpha, rng)
    alpha = options.alpha if options.private_alpha is None else options.private_alpha
    others = _dirichlet_counts(totals[[private]], options.clients - 1, alpha, rng)[0]
    counts[private] = np.insert(others, options.curious, 0)
    owner = owners(labels, counts, rng)
    return _top_up(owner, labels, options.clients, options.min_size, rng, barred=(options.curious, private)), extras


def _checked(options: Isolation | Ladp1 | Ladp2, labels: Ints) -> dict[str, Any]:
    if options.clients < 2:
        raise ConfigError(f"{options.kind}: clients = {options.clients}; there must be a curious client and at least one other")
    if options.curious >= options.clients:
        raise ConfigError(f"{options.kind}: curious = {options.curious}; give a client from 0 to {options.clients - 1}")
    if not (labels == options.private_label).any():
        held = ", ".join(str(label) for label in np.unique(labels)[:12])
        raise ConfigError(f"{options.kind}: no example has private_label = {options.private_label}; the data hold {held}")
    return {"private_label": options.private_label, "curious": options.curious}


_KINDS: dict[str, Callable[..., Owners]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "shards": shards,
    "label-count": _label_count,
    "users": users,
    "private-label-isolation": isolation,
    "ladp-1": _ladp1,
    "ladp-2": _ladp2,
}


class ClientIndices(Sequence[Ints]):
    """Index arrays of many clients in two arrays: client i has order[offsets[i]:offsets[i + 1]], ascending."""

    def __init__(self, order: Ints, offsets: Ints) -> None:
        self.order = order
        self.offsets = offsets

    @classmethod
    def from_owners(cls, owner: Ints, clients: int) -> ClientIndices:
        """Make a partition from the owner of each example, -1 for none."""
        sizes = np.bincount(owner[owner >= 0], minlength=clients)
        order = np.argsort(owner, kind="stable")[len(owner) - int(sizes.sum()) :]
        return cls(order.astype(np.int64), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @property
    def sizes(self) -> Ints:
        """Number of examples of each client."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Ints: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Ints, ...]: ...

    def __getitem__(self, index: int | slice) -> Ints | tuple[Ints, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        if not -len(self) <= index < len(self):
            raise IndexError(f"client {index} of {len(self)}")
        index %= len(self)
        return self.order[self.offsets[index] : self.offsets[index + 1]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, eq=False)
class Partition:
    """Training examples by client.

    clients: a sequence of ascending int64 index arrays into the training set; no example occurs twice.
    kind, seed: how it was made. extras: what else the kind fixes, e.g. `curious` and `private_label`, or `users`.
    """

    clients: ClientIndices
    kind: str
    seed: int
    extras: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.clients)

    def indices(self, client: int) -> Ints:
        """Return the examples of one client."""
        return self.clients[client]

    @property
    def sizes(self) -> Ints:
        """Number of examples of each client."""
        return self.clients.sizes

    def label_counts(self, labels: Ints, classes: int) -> Ints:
        """Return a table (clients, classes) of the number of examples of each label."""
        owner = np.repeat(np.arange(len(self)), self.sizes)
        flat = np.bincount(owner * classes + labels[self.clients.order], minlength=len(self) * classes)
        return flat.reshape(len(self), classes)

    def checked(self, examples: int) -> Ints:
        """Return all examples that clients hold, in one array.

        Args:
            examples: of the training set.

        Raises:
            ConfigError: a client holds what there is not, or an example occurs twice: bounds count each once.
        """
        order = np.concatenate([np.asarray(held).reshape(-1) for held in self.clients])
        if order.dtype.kind not in "iu":
            raise ConfigError(f"a partition's indices are integers, got an array of {order.dtype}")
        if len(order) and not (int(order.min()) >= 0 and int(order.max()) < examples):
            raise ConfigError(
                f"a partition's indices are 0 to {examples - 1} for {examples} training examples, "
                f"got {order.min()} to {order.max()}"
            )
        if twice := len(order) - len(np.unique(order)):
            raise ConfigError(
                f"the partition gives {twice} examples a second time, to the same client or to another one: give each once, "
                "or store a copy of it in the data set"
            )
        return order

    def fingerprint(self) -> str:
        """Return the SHA-256 over all index arrays, equal for equal partitions."""
        arrays = (np.ascontiguousarray(part, dtype="<i8") for part in (self.clients.offsets, self.clients.order))
        return hashlib.sha256(b"".join(part.tobytes() for part in arrays)).hexdigest()


def partition(
    kind: str,
    labels: NDArray[Any],
    *,
    clients: int | None = None,
    seed: int,
    users: NDArray[Any] | None = None,
    among: NDArray[Any] | None = None,
    **options: Any,
) -> Partition:
    """Partition the training examples among clients; the same arguments give the same partition.

    kind: one of PARTITIONS. labels: (examples,) integers from 0. clients: their number; may be left out if the kind has a
    default. users: (examples,) ids of the natural users, only for kind "users". among: indices of the examples to deal out, such
    as those outside a public split; None is all.
    options: those of the kind, see partition_options.
    Raises ConfigError for unknown kinds or options, impossible values, and what the data set cannot provide.
    """
    options = options if clients is None else {"clients": clients, **options}
    return from_options(_options(kind, options), labels, seed=seed, users=users, among=among)


def from_options(
    options: BaseModel, labels: NDArray[Any], *, seed: int, users: NDArray[Any] | None = None, among: NDArray[Any] | None = None
) -> Partition:
    """Do the same as `partition`, from options that a configuration has already checked."""
    kind = str(options.kind)  # type: ignore[attr-defined]
    values = _integers(labels, "labels")
    people = None if users is None else _integers(users, "users")
    if len(values) == 0 or values.min() < 0:
        raise ConfigError("labels must be integers from 0, at least one")
    if people is not None and people.shape != values.shape:
        raise ConfigError(f"users have shape {people.shape}, labels {values.shape}; they must agree")
    chosen = _subset(among, len(values))
    owner, extras = _KINDS[kind](
        options, values[chosen], None if people is None else people[chosen], generator(seed, f"partition {kind}")
    )
    count = len(extras["users"]) if kind == "users" else int(options.clients)  # type: ignore[attr-defined]
    clients = ClientIndices.from_owners(owner, count)
    return Partition(ClientIndices(chosen[clients.order], clients.offsets), kind, seed, extras)


def need_strata(data: Info, options: BaseModel) -> None:
    """Refuse to partition by class examples that do not have exactly one class.

    Raises:
        ConfigError: of such a partition.
    """
    kind = str(options.kind)  # type: ignore[attr-defined]
    if kind not in ("iid", "users") and data.strata == 1:
        raise ConfigError(
            f"data.partition.kind = {kind!r} goes by the class of each example, and those of {data.name} do not have one class "
            f"each: choose 'iid' or 'users'"
        )


def _options(kind: str, options: dict[str, Any]) -> BaseModel:
    if kind not in PARTITIONS:
        raise unknown("data.partition.kind", kind, "partition", PARTITIONS)
    model = PARTITIONS[kind]
    allowed = [key for key in model.model_fields if key != "kind"]
    for key in options:
        if key not in allowed:
            near = nearest(key, allowed)
            raise ConfigError(f"data.partition.{key}: {kind} has no option {key!r}{near}; it takes {', '.join(allowed)}")
    try:
        return model(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        if key not in options:
            raise ConfigError(f"partition {kind} needs the option {key!r}; it takes {', '.join(allowed)}") from None
        raise ConfigError(f"partition {kind}: {key} = {options[key]!r} is not possible: {first['msg'].lower()}") from None


def _integers(values: NDArray[Any], what: str) -> Ints:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(f"{what} are {array.dtype} of shape {array.shape}; give one integer per example")
    return array.astype(np.int64)


def _subset(among: NDArray[Any] | None, total: int) -> Ints:
    if among is None:
        return np.arange(total, dtype=np.int64)
    chosen = np.unique(_integers(among, "among"))
    if len(chosen) == 0 or len(chosen) != len(among) or chosen[0] < 0 or chosen[-1] >= total:
        raise ConfigError(f"among must hold different indices from 0 to {total - 1}, at least one")
    return chosen


def checked_options(table: Mapping[str, Any]) -> BaseModel:
    """Return the option model of a configured partition `{kind = ..., ...}`; errors as for `partition`."""
    options = dict(table)
    return _options(str(options.pop("kind", "iid")), options)
