"""Neighbouring data for record and replay: the data of one client are replaced by values that are likely to expose a leak."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedveil.accounting.types import Unit
from fedveil.data.catalogue import IGNORED
from fedveil.errors import ConfigError
from fedveil.federation.clients import Clients

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.federation.progress import Federation

_SIZES_ARE_PUBLIC = "each client's number of examples is public"
"""Methods with this assumption are not tested with neighbours of another size."""

_HUGE, _TINY = 3e38, 1e-40
"""A value near the largest float32, and one below the smallest normal float32."""

_Examples = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Change:
    """One change of a client's examples.

    Args:
        make: function from examples, targets and the number of classes (0 for quantities) to changed examples and targets.
        record: whether one record changes. zeroes: whether that record then contributes nothing.
        resizes: whether the number of examples changes.
        quantities: whether examples become extreme numbers, which is impossible for tokens.
    """

    name: str
    make: Callable[[Tensor, Tensor, int], _Examples]
    record: bool = False
    zeroes: bool = False
    resizes: bool = False
    quantities: bool = False


@dataclass(frozen=True)
class Neighbour:
    """The clients of the run with `change` applied to one, `client`; also its `tests` if counts of these are released."""

    change: Change
    client: int
    clients: Clients
    tests: Clients | None = None

    def __str__(self) -> str:
        return f"client {self.client}: {self.change.name}"


def changes_for(job: Federation) -> list[Change]:
    """Return the changes that the run promises to hide.

    Under DP-SGD inside clients these are changes of one record. Otherwise they include changes of all data of a client, even if
    the unit is a record, since the same noise covers the whole update.
    """
    s = job.setting
    public_sizes = _SIZES_ARE_PUBLIC in job.method.assumptions(s)
    one_record = s.example_clip is not None
    changes = [c for c in CHANGES if c.record or not one_record]
    if s.scope.unit is Unit.CLIENT:
        changes = [c for c in changes if not c.record]
    tokens = not job.context.clients.x.is_floating_point()
    return [c for c in changes if not (c.resizes and public_sizes) and not (c.quantities and tokens)]


def neighbours(job: Federation, changes: Sequence[Change], among: Sequence[int]) -> list[Neighbour]:
    """Return one neighbour per change, with the clients `among` in turn; clients without examples are skipped.

    Raises:
        ConfigError: none of these clients has examples.
    """
    clients = job.context.clients
    holders = [c for c in among if clients.size(c)]
    if not holders:
        raise ConfigError("no client with examples took part in the replayed rounds: replay more of them (--rounds)")
    pairs = [(change, holders[i % len(holders)]) for i, change in enumerate(changes)]
    classes, tests = job.setting.classes, job.context.tests

    def others(of: Clients | None, change: Change, client: int) -> Clients | None:
        return of if of is None or not of.size(client) else _changed(of, change, client, classes)

    return [Neighbour(change, c, _changed(clients, change, c, classes), others(tests, change, c)) for change, c in pairs]


def _changed(clients: Clients, change: Change, client: int, classes: int) -> Clients:
    x, y = change.make(*clients.examples(client), classes)
    low, high = int(clients.offsets[client]), int(clients.offsets[client + 1])
    grown = len(y) - (high - low)
    offsets = np.where(np.arange(len(clients.offsets)) > client, clients.offsets + grown, clients.offsets)
    whole_x, whole_y = (torch.cat([a[:low], b, a[high:]]) for a, b in ((clients.x, x), (clients.y, y)))
    return Clients(whole_x, whole_y, offsets)


def _first(x: Tensor, value: float) -> Tensor:
    x[:1] = value
    return x


def other_targets(y: Tensor, classes: int) -> Tensor:
    """Change every target to the next class, or to a quantity larger by 1; ignored targets stay."""
    return torch.where(y == IGNORED, y, (y + 1) % classes) if classes else y + 1


def _flipped(y: Tensor, classes: int) -> Tensor:
    return torch.where(y == IGNORED, y, classes - 1 - y) if classes else -y


def _target_of_first(y: Tensor, classes: int) -> Tensor:
    y[:1] = other_targets(y[:1], classes)
    return y


CHANGES = (
    Change("no examples", lambda x, y, k: (x[:0], y[:0]), resizes=True),
    Change("one example", lambda x, y, k: (x[:1], y[:1]), resizes=True),
    Change("flipped targets", lambda x, y, k: (x, _flipped(y, k))),
    Change("all targets 0", lambda x, y, k: (x, torch.zeros_like(y))),
    Change("huge values", lambda x, y, k: (torch.full_like(x, _HUGE), y), quantities=True),
    Change("tiny values", lambda x, y, k: (torch.full_like(x, _TINY), y), quantities=True),
    Change("an example on which training gives NaN", lambda x, y, k: (_first(x, math.nan), y), quantities=True),
    Change("a record removed", lambda x, y, k: (x[:-1], y[:-1]), record=True, zeroes=True, resizes=True),
    Change("a record whose gradient is NaN", lambda x, y, k: (_first(x, math.nan), y), record=True, zeroes=True, quantities=True),
    Change("a record of huge values", lambda x, y, k: (_first(x, _HUGE), y), record=True, quantities=True),
    Change("a record of tiny values", lambda x, y, k: (_first(x, _TINY), y), record=True, quantities=True),
    Change("a record with another target", lambda x, y, k: (x, _target_of_first(y, k)), record=True),
)
