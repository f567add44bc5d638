"""The privacy spent over the rounds of a run, computed from its ledger and from nothing else."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.secret_samples import rate_of, unsampled_mu
from fedveil.accounting.types import Event, Gaussian, Scope, Unbounded
from fedveil.errors import LedgerError
from fedveil.ledger.ledger import Ledger

_POINTS = {True: 60, False: 9}
"""Rounds at which epsilon is computed, where that is cheap (Gaussian releases alone) and where it is not."""


@dataclass(frozen=True)
class Spent:
    """Epsilon after some of the rounds at the statement's delta, by composing what the ledger charged for the promised scope.

    Args:
        most: (round from 1, epsilon) of the client that spent most, or of the aggregate. median: of the median client, server
            view only. releases: how many. problem: why there are no points, or why epsilon is inf.
    """

    most: list[tuple[int, float]] = field(default_factory=list)
    median: list[tuple[int, float]] = field(default_factory=list)
    releases: int = 0
    problem: str = ""


def spent(ledger: Path, scope: Scope, delta: float, clients: int) -> Spent:
    """Epsilon over rounds from a ledger file; a ledger that cannot be trusted gives its problem and no number.

    Args:
        clients: all clients, whether or not they released anything.
    """
    if not ledger.is_file():
        return Spent(problem="the run directory has no ledger")
    try:
        with Ledger.open(ledger) as book:
            entries = [entry for _, _, entry in book.entries()]
    except LedgerError as error:
        return Spent(problem=str(error))
    releases = [(e.round, e.client, e.event) for e in entries if Scope(e.unit, e.adjacency, e.view) == scope]
    if not releases:
        return Spent(problem=f"the ledger charged nothing for the promised scope ({scope})")
    return _over_rounds(releases, scope, delta, clients)


def _over_rounds(releases: list[tuple[int, int, Event]], scope: Scope, delta: float, clients: int) -> Spent:
    by_round: dict[int, list[tuple[int, Event]]] = defaultdict(list)
    for t, client, event in releases:
        by_round[t].append((client, event))
    cheap = all(isinstance(event, Gaussian) for _, _, event in releases)
    each_client = all(client >= 0 for _, client, _ in releases)
    stops = _spaced(sorted(by_round), _POINTS[cheap])
    costs: dict[int, float] = defaultdict(float)
    totals: dict[int, Counter[Event]] = defaultdict(Counter)
    most, median, reason = [], [], ""

    def epsilon(client: int) -> float:
        return epsilon_of(math.sqrt(costs[client]), delta) if cheap else _epsilon(totals[client], scope, delta)

    for t in sorted(by_round):
        for client, event in by_round[t]:
            costs[client] += _cost(event)
            if not cheap:
                totals[client][_one(event)] += 1 if isinstance(event, Unbounded) else event.count
        if t not in stops:
            continue
        order = sorted(costs, key=costs.__getitem__)
        most.append((t + 1, epsilon(order[-1])))
        if each_client:
            idle, middle = clients - len(costs), (clients - 1) // 2
            median.append((t + 1, 0.0 if middle < idle else epsilon(order[middle - idle])))
        if math.isinf(most[-1][1]):
            reason = next((e.reason for e in totals[order[-1]] if isinstance(e, Unbounded)), "")
    return Spent(most, median, len(releases), reason)


def _spaced(rounds: list[int], points: int) -> set[int]:
    count = min(points, len(rounds))
    return {rounds[round(i * (len(rounds) - 1) / max(1, count - 1))] for i in range(count)} | {rounds[-1]}


def _one(event: Event) -> Event:
    return event if isinstance(event, Unbounded) else replace(event, count=1)


def _times(events: Counter[Event]) -> Iterable[Event]:
    for event, count in events.items():
        yield event if isinstance(event, Unbounded) else replace(event, count=count)


def _cost(event: Event) -> float:
    """What orders clients by spending: mu^2, for sampled releases that of the central limit (Dong et al. 2019)."""
    if isinstance(event, Gaussian):
        return event.count * event.mu**2
    if isinstance(event, Unbounded):
        return math.inf
    return event.count * rate_of(event) ** 2 * math.expm1(min(unsampled_mu(event) ** 2, 700.0))


def _epsilon(events: Counter[Event], scope: Scope, delta: float) -> float:
    return bound(list(_times(events)), delta, adjacency=scope.adjacency)[0]
