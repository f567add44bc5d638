"""Releases as ledger rows: the `Entry`, its row of plain SQL values, and the row's link in the hash chain."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedveil.accounting.secret_samples import rate_of
from fedveil.accounting.types import (
    Adjacency,
    Event,
    FixedSampleGaussian,
    Gaussian,
    OneOrder,
    SampledGaussian,
    Scope,
    SecretSample,
    SeenCountGaussian,
    Unbounded,
    Unit,
    UserRecordsGaussian,
    View,
)
from fedveil.errors import ConfigError, LedgerError

AGGREGATE = -1
"""The `client` of a release about all clients together."""

Value = int | float | str | None
COLUMNS = (
    *("seq", "time", "run", "round", "client", "unit", "adjacency", "view"),
    *("event", "mu", "rate", "noise_multiplier", "count", "reason"),
    *("clip", "noise_std", "coordinates", "dimension", "participants", "reads", "note"),
    *("grid", "mechanism", "extras", "whole_clip"),
    *("nonce", "sealed"),
)
"""Columns of a release, in the order of a row; the last six are new in schema 2."""
COLUMNS_1 = COLUMNS[:-6]
"""Columns of schema 1, whose releases were floats; all of them enter the digest."""
PRIVATE = ("time", "participants", "nonce")
"""Columns that a published ledger omits: if participation is secret, times and counts reveal more than the plan does. `sealed`
is the SHA-256 of the three and enters the digest in their place, so that the chain can be verified without them."""

_LARGEST = 2**63 - 1
_KNOWN = (Gaussian, SampledGaussian, SeenCountGaussian, FixedSampleGaussian, UserRecordsGaussian, Unbounded, OneOrder)


@dataclass(frozen=True)
class Entry:
    """One release of a noisy vector, and its cost.

    run, round (>= 0), client (>= 0, or -1 for the aggregate). unit, adjacency, view: scope of the cost.
    event: the cost. clip: clip norm per layer (inf when unclipped, 0 for a layer that is not sent).
    noise_std: standard deviation of the release's noise, per layer. coordinates: number of values sent, of `dimension`.
    participants: clients in this round's sum (None in a published ledger).
    reads: raw data that the policy read; if there are any, nothing can be proven and the event must be `Unbounded`.
    extras: names of the extra vectors of the release; clip, noise_std and grid have a number for each, after those of the layers.
    grid: exponents k of the grid steps 2^k of the released integers, or None if floats were released. mechanism: of the noise:
    "independent", "banded", or "none" if the door added none; "" in a ledger of schema 1. whole_clip: clip norm of all layers
    together (inf for none). The clips and the noise determine the cost of a plain release.

    Raises ConfigError for values out of range and for combinations whose cost would be wrong: amplification by sampling clients
    in the server view, a server view without a client, a finite cost without noise or with a policy that read raw data.
    """

    run: str
    round: int
    client: int
    unit: Unit
    adjacency: Adjacency
    view: View
    event: Event
    clip: tuple[float, ...]
    noise_std: tuple[float, ...]
    coordinates: int
    dimension: int
    participants: int | None
    reads: tuple[str, ...] = ()
    note: str = ""
    grid: tuple[int, ...] | None = None
    mechanism: str = ""
    extras: tuple[str, ...] = ()
    whole_clip: float = math.inf

    def __post_init__(self) -> None:
        _normalise(self)
        _check_ranges(self)
        _check_sense(self)

    @property
    def scope(self) -> Scope:
        """Return unit, adjacency and view of the cost."""
        return Scope(self.unit, self.adjacency, self.view)

    def of_client(self, client: int) -> Entry:
        """Return the same release by another client (>= 0), without repeating the checks.

        Raises:
            ConfigError: not a valid client number.
        """
        if min(client, self.client) < 0 or client > _LARGEST:
            raise ConfigError(f"client must be >= 0, got {client} in the place of {self.client}")
        other = object.__new__(Entry)
        other.__dict__.update(self.__dict__, client=operator.index(client))
        return other


def _normalise(entry: Entry) -> None:
    """Convert to plain Python numbers and enums, so that a row reads back equal; raise ConfigError if a value would change."""
    for name in ("reads", "extras"):
        if not isinstance(getattr(entry, name), tuple):
            raise ConfigError(f"{name} must be a tuple of names, got {getattr(entry, name)!r}")
    try:
        for name in ("round", "client", "coordinates", "dimension"):
            object.__setattr__(entry, name, operator.index(getattr(entry, name)))
        if entry.participants is not None:
            object.__setattr__(entry, "participants", operator.index(entry.participants))
        object.__setattr__(entry, "whole_clip", float(entry.whole_clip))
        for name in ("clip", "noise_std"):
            object.__setattr__(entry, name, tuple(map(float, getattr(entry, name))))
        if entry.grid is not None:
            object.__setattr__(entry, "grid", tuple(map(operator.index, entry.grid)))
        for name, kind in (("unit", Unit), ("adjacency", Adjacency), ("view", View)):
            object.__setattr__(entry, name, kind(getattr(entry, name)))
        for text in (entry.run, entry.note, entry.mechanism, *entry.reads, *entry.extras):
            text.encode()
    except (TypeError, ValueError, AttributeError) as problem:
        raise ConfigError(f"a ledger entry has a field of the wrong type ({problem}); see the fields of Entry") from problem


def _check_ranges(entry: Entry) -> None:
    if not 0 <= entry.round <= _LARGEST:
        raise ConfigError(f"round must be >= 0, got {entry.round}")
    if not AGGREGATE <= entry.client <= _LARGEST:
        raise ConfigError(f"client must be >= 0, or -1 for the aggregate, got {entry.client}")
    if not 0 <= entry.coordinates <= entry.dimension <= _LARGEST:
        raise ConfigError(f"need 0 <= coordinates <= dimension, got {entry.coordinates} of {entry.dimension}")
    least = 0 if entry.client == AGGREGATE else 1  # an empty Poisson round still releases its noise
    if entry.participants is not None and not least <= entry.participants <= _LARGEST:
        raise ConfigError(f"participants must be >= {least}, got {entry.participants}")
    if not entry.clip or len(entry.clip) != len(entry.noise_std):
        raise ConfigError(f"need one clip and one noise_std per layer, got {len(entry.clip)} and {len(entry.noise_std)}")
    if entry.grid is not None and len(entry.grid) != len(entry.clip):
        raise ConfigError(f"need one exponent of the grid per layer, got {len(entry.grid)} for {len(entry.clip)} layers")
    if not all(c >= 0 for c in (*entry.clip, entry.whole_clip)):
        raise ConfigError(f"clip must be >= 0 (inf when unclipped), got {entry.clip} and {entry.whole_clip} of the whole")
    if not all(s >= 0 and math.isfinite(s) for s in entry.noise_std):
        raise ConfigError(f"noise_std must be finite and >= 0, got {entry.noise_std}")


def _check_sense(entry: Entry) -> None:
    event = entry.event
    if not isinstance(event, _KNOWN):
        raise ConfigError(
            f"the ledger knows {', '.join(kind.__name__ for kind in _KNOWN)}, not {event!r}; "
            f"an unknown mechanism is Unbounded(reason)"
        )
    if entry.view is View.SERVER and entry.client == AGGREGATE:
        raise ConfigError("in the server view each upload is a release of its own: give its client (>= 0), not -1")
    if isinstance(event, Unbounded):
        if not event.reason:
            raise ConfigError("an Unbounded release must say why (reason)")
        return
    if not 1 <= event.count <= _LARGEST:
        raise ConfigError(f"a release counts at least once (and below 2^63), got count = {event.count}")
    clients_are_seen = entry.unit is Unit.CLIENT and entry.view is View.SERVER
    if clients_are_seen and not isinstance(event, Gaussian | UserRecordsGaussian) and rate_of(event) < 1:
        raise ConfigError(
            f"no amplification by sampling clients in the server view, where it is seen who takes part: "
            f"charge Gaussian(mu = {1 / event.noise_multiplier:g})"
        )
    if entry.reads:
        raise ConfigError(
            f"the policy read raw data ({', '.join(entry.reads)}), so nothing can be proven: "
            f"charge Unbounded(reason) instead of {event}"
        )
    if entry.coordinates and any(c > 0 and s == 0 for c, s in zip(entry.clip, entry.noise_std, strict=True)):
        raise ConfigError(
            "a layer with clip > 0 has noise_std = 0: charge Unbounded(reason), or clip = 0 for a layer that is not sent"
        )


# --- rows -------------------------------------------------------------------------------------------------------------


def to_row(seq: int, time: float, entry: Entry) -> tuple[Value, ...]:
    """Return the values of `COLUMNS`; lists are JSON text with null for an infinite clip; `grid` is null for float releases."""
    clip = json.dumps([None if math.isinf(c) else c for c in entry.clip])
    noise_std, reads, extras = map(json.dumps, (entry.noise_std, entry.reads, entry.extras))
    grid = None if entry.grid is None else json.dumps(entry.grid)
    nonce = os.urandom(16).hex()
    return (
        *(seq, time, entry.run, entry.round, entry.client, str(entry.unit), str(entry.adjacency), str(entry.view)),
        *event_columns(entry.event),
        *(clip, noise_std, entry.coordinates, entry.dimension, entry.participants, reads, entry.note),
        *(grid, entry.mechanism, extras, None if math.isinf(entry.whole_clip) else entry.whole_clip),
        *(nonce, seal(time, entry.participants, nonce)),
    )


def event_columns(event: Event) -> tuple[str, float | None, float | None, float | None, int, str | None]:
    """Return the columns event, mu, rate, noise_multiplier, count and reason of an event."""
    if isinstance(event, Gaussian):
        return "gaussian", float(event.mu), None, None, operator.index(event.count), None
    if isinstance(event, OneOrder):
        return f"one_order:{event.order!r}:{event.divergence!r}", None, None, None, 1, event.reason
    if isinstance(event, Unbounded):
        return "unbounded", None, None, None, 1, event.reason
    return _kind(event), None, rate_of(event), float(event.noise_multiplier), operator.index(event.count), None


def from_row(row: Sequence[Value]) -> tuple[int, float | None, Entry]:
    """Return sequence number, Unix time (None in a published ledger) and entry of a row of `COLUMNS` or `COLUMNS_1`.

    Raises LedgerError if the row is not a valid release.
    """
    f: dict[str, Any] = dict(zip(COLUMNS_1 if len(row) == len(COLUMNS_1) else COLUMNS, row, strict=True))
    try:
        entry = Entry(
            **{name: f[name] for name in ("run", "round", "client", "unit", "adjacency", "view")},
            event=event_from(*(f[name] for name in ("event", "mu", "rate", "noise_multiplier", "count", "reason"))),
            clip=tuple(math.inf if c is None else c for c in json.loads(f["clip"])),
            noise_std=tuple(json.loads(f["noise_std"])),
            **{name: f[name] for name in ("coordinates", "dimension", "participants", "note")},
            reads=tuple(json.loads(f["reads"])),
            grid=None if f.get("grid") is None else tuple(json.loads(f["grid"])),
            mechanism=f.get("mechanism", ""),
            extras=tuple(json.loads(f.get("extras", "[]"))),
            whole_clip=math.inf if f.get("whole_clip") is None else f["whole_clip"],
        )
    except (TypeError, ValueError, IndexError) as problem:
        raise LedgerError(f"the ledger has a row that is not a release ({problem}): it is damaged; restore a backup") from problem
    return f["seq"], f["time"], entry


def _kind(event: SecretSample) -> str:
    """Return the text of the column `event`: the kind and, after colons, its integers."""
    if isinstance(event, SeenCountGaussian):
        return f"seen_count_gaussian:{event.clients}"
    if isinstance(event, FixedSampleGaussian):
        return f"fixed_sample_gaussian:{event.clients}:{event.cohort}"
    return f"user_records_gaussian:{event.records}" if isinstance(event, UserRecordsGaussian) else "sampled_gaussian"


def event_from(text: str, mu: Any, rate: Any, noise_multiplier: Any, count: Any, reason: Any) -> Event:
    """Return the event of these columns of a row; raise TypeError, ValueError or IndexError if they are invalid."""
    kind, *numbers = text.split(":")
    if kind == "one_order":
        return OneOrder(reason, *map(float, numbers))
    whole = [int(number) for number in numbers]
    if kind == "gaussian":
        return Gaussian(mu, count)
    if kind == "sampled_gaussian":
        return SampledGaussian(rate, noise_multiplier, count)
    if kind == "seen_count_gaussian":
        return SeenCountGaussian(whole[0], rate, noise_multiplier, count)
    if kind == "fixed_sample_gaussian":
        return FixedSampleGaussian(whole[0], whole[1], noise_multiplier, count)
    if kind == "user_records_gaussian":
        return UserRecordsGaussian(whole[0], rate, noise_multiplier, count)
    if kind == "unbounded":
        return Unbounded(reason)
    raise ValueError(f"unknown event {text!r}")


_SEALED = operator.itemgetter(*map(COLUMNS.index, (*PRIVATE, "sealed")))
_CHAINED = operator.itemgetter(*(i for i, name in enumerate(COLUMNS) if name not in PRIVATE))


def link(previous: str, values: Sequence[Value]) -> str:
    """Return a link of the chain: the SHA-256 (hex) of the previous digest, a line feed and the values as JSON."""
    return hashlib.sha256(f"{previous}\n{json.dumps(list(values))}".encode()).hexdigest()


def chained(values: Sequence[Value]) -> Sequence[Value]:
    """Return the values of a row (of `COLUMNS` or `COLUMNS_1`) that enter its digest."""
    return values if len(values) == len(COLUMNS_1) else _CHAINED(values)


def seal(time: float, participants: int | None, nonce: str) -> str:
    """Return the SHA-256 (hex) that represents the private columns of a row in its digest."""
    return hashlib.sha256(f"{nonce}\n{json.dumps([time, participants])}".encode()).hexdigest()


def sealed_rightly(values: Sequence[Value]) -> bool:
    """Return whether the private columns of a row match their seal, or are all omitted."""
    if len(values) == len(COLUMNS_1):
        return True
    time, participants, nonce, sealed = _SEALED(values)
    if time is participants is nonce is None:
        return True
    return isinstance(nonce, str) and sealed == seal(time, participants, nonce)
