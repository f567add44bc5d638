"""Which client has which training examples."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from fedveil.data import partition_kinds, partition_ladp
from fedveil.data.catalogue import Info
from fedveil.data.partition_options import PARTITIONS
from fedveil.data.seeding import generator
from fedveil.errors import ConfigError, nearest, unknown

Ints = NDArray[np.int64]

_KINDS: dict[str, Callable[..., partition_kinds.Owners]] = {
    "iid": partition_kinds.iid,
    "dirichlet": partition_kinds.dirichlet,
    "shards": partition_kinds.shards,
    "label-count": partition_kinds.label_count,
    "users": partition_kinds.users,
    "private-label-isolation": partition_ladp.isolation,
    "ladp-1": partition_ladp.ladp1,
    "ladp-2": partition_ladp.ladp2,
}


class ClientIndices(Sequence[Ints]):
    """Index arrays of many clients in two arrays: client i has order[offsets[i]:offsets[i + 1]], ascending."""

    def __init__(self, order: Ints, offsets: Ints) -> None:
        self.order = order
        self.offsets = offsets

    @classmethod
    def from_owners(cls, owner: Ints, clients: int) -> ClientIndices:
        """From the owner of each example, -1 for none."""
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
        """The examples of one client."""
        return self.clients[client]

    @property
    def sizes(self) -> Ints:
        """Number of examples of each client."""
        return self.clients.sizes

    def label_counts(self, labels: Ints, classes: int) -> Ints:
        """Table (clients, classes) of how many examples of each label each client has."""
        owner = np.repeat(np.arange(len(self)), self.sizes)
        flat = np.bincount(owner * classes + labels[self.clients.order], minlength=len(self) * classes)
        return flat.reshape(len(self), classes)

    def checked(self, examples: int) -> Ints:
        """All examples that clients hold, in one array.

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
        """SHA-256 over all index arrays: equal for equal partitions."""
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

    kind: one of PARTITIONS. labels: (examples,) integers from 0. clients: how many; may be left out where the kind has a
    default. users: (examples,) ids of the natural users, needed by kind "users" alone.
    among: indices of the examples that may be dealt out, e.g. what a public split leaves; None is all.
    options: those of the kind, see partition_options.
    Raises ConfigError for unknown kinds or options, impossible values, and what the data set cannot provide.
    """
    options = options if clients is None else {"clients": clients, **options}
    return from_options(_options(kind, options), labels, seed=seed, users=users, among=among)


def from_options(
    options: BaseModel, labels: NDArray[Any], *, seed: int, users: NDArray[Any] | None = None, among: NDArray[Any] | None = None
) -> Partition:
    """As `partition`, from an option model that a configuration has already checked."""
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
    """Refuse a partition by class of examples that do not have one class each.

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
    """The option model of a configured partition `{kind = ..., ...}`; errors as `partition`."""
    options = dict(table)
    return _options(str(options.pop("kind", "iid")), options)
