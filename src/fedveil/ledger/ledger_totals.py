"""What a ledger adds up to, read by SQL and row by row, so that a million rows need little time and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fedveil.accounting.types import Adjacency, Event, Scope, Unit, View
from fedveil.errors import LedgerError
from fedveil.ledger.entry import event_from
from fedveil.ledger.ledger import Ledger


@dataclass(frozen=True)
class Total:
    """What one client (or the aggregate, -1) released under one scope.

    releases: how many, with multiplicity. sum_mu_squared: over the Gaussian ones (0 if none), in floating point, for display; a
    budget adds up exactly. sampled: how many were credited with a secret sample. unbounded: a reason why nothing can be proven,
    or None.
    """

    client: int
    unit: Unit
    adjacency: Adjacency
    view: View
    releases: int
    sum_mu_squared: float
    sampled: int
    first_round: int
    last_round: int
    unbounded: str | None


_GROUPS = "FROM release GROUP BY client, unit, adjacency, view"
_SUMMARY = f"""
SELECT client, unit, adjacency, view, sum(count), total(count * mu * mu),
       sum(CASE WHEN event IN ('gaussian', 'unbounded') THEN 0 ELSE count END), min(round), max(round), min(reason)
{_GROUPS} ORDER BY view, client, unit, adjacency LIMIT ?
"""


def summary(ledger: Ledger, most: int = -1) -> list[Total]:
    """Totals per client and scope of everything in the ledger; the first `most` of them, or all."""
    rows = ledger.select(_SUMMARY, (most,))
    return [Total(row[0], Unit(row[1]), Adjacency(row[2]), View(row[3]), *row[4:]) for row in rows]


def count_totals(ledger: Ledger) -> int:
    """How many totals `summary` has in all."""
    ((count,),) = ledger.select(f"SELECT count(*) FROM (SELECT 1 {_GROUPS})")
    return int(count)


_EVENT = "event, mu, rate, noise_multiplier"
_OF_SCOPE = "FROM release WHERE unit = ? AND adjacency = ? AND view = ?"


def charged(ledger: Ledger, scope: Scope) -> Iterator[tuple[int, int, Event]]:
    """(round, client, event) of each release under a scope, in the order of the ledger.

    Raises:
        LedgerError: a row is no release.
    """
    rows = ledger.select(f"SELECT round, client, {_EVENT}, count, reason {_OF_SCOPE} ORDER BY seq", _names(scope))
    for t, client, *event in rows:
        yield t, client, _event(*event)


def charged_since(ledger: Ledger, since: int) -> Iterator[tuple[int, int, Event]]:
    """(number, client, event) of each release with a number above `since`, under whichever scope, in the order of the ledger.

    Raises:
        LedgerError: a row is no release.
    """
    rows = ledger.select(f"SELECT seq, client, {_EVENT}, count, reason FROM release WHERE seq > ? ORDER BY seq", (since,))
    for seq, client, *event in rows:
        yield seq, client, _event(*event)


def charged_to(ledger: Ledger, scope: Scope, client: int, last_round: int) -> list[Event]:
    """What a client released under a scope until a round, equal events as one with their count.

    Raises:
        LedgerError: a row is no release.
    """
    which = f"{_OF_SCOPE} AND client = ? AND round <= ? GROUP BY {_EVENT}, reason"
    rows = ledger.select(f"SELECT {_EVENT}, sum(count), reason {which}", (*_names(scope), client, last_round))
    return [_event(*event) for event in rows]


def _names(scope: Scope) -> tuple[str, str, str]:
    return str(scope.unit), str(scope.adjacency), str(scope.view)


@lru_cache(maxsize=4096)
def _event(
    kind: str, mu: float | None, rate: float | None, noise_multiplier: float | None, count: int, reason: str | None
) -> Event:
    try:
        return event_from(kind, mu, rate, noise_multiplier, count, reason)
    except (TypeError, ValueError, IndexError) as problem:
        raise LedgerError(f"the ledger holds a row that is no release ({problem}): it is damaged; restore a backup") from problem
