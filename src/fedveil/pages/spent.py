"""The privacy spent over the rounds of a run, computed from its ledger and from nothing else."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from fedveil.accounting.accountant import bound
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.secret_samples import rate_of, unsampled_mu
from fedveil.accounting.types import Event, Gaussian, Scope, Unbounded
from fedveil.errors import LedgerError
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.ledger_totals import charged, charged_to

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


def spent(
    ledger: Path,
    scope: Scope,
    delta: float,
    clients: int,
    progress: Callable[[int, int], None] | None = None,
    verified: str = "",
) -> Spent:
    """Epsilon over rounds from a ledger file; a ledger that cannot be trusted gives its problem and no number.

    Args:
        clients: all clients, whether or not they released anything. progress: called with the rows verified, and all.
        verified: the closing digest of a ledger that was verified a moment ago, as of `Ledger.open`.
    """
    if not ledger.is_file():
        return Spent(problem="the run directory has no ledger")
    try:
        with Ledger.open(ledger, read_only=True, progress=progress, verified=verified) as book:
            return _over_rounds(book, scope, delta, clients)
    except LedgerError as error:
        return Spent(problem=str(error))


def _over_rounds(book: Ledger, scope: Scope, delta: float, clients: int) -> Spent:
    cheap, (each_round, each_client, each_cost) = True, (array("q"), array("q"), array("d"))
    for t, client, event in charged(book, scope):
        each_round.append(t)
        each_client.append(client)
        each_cost.append(_cost(event))
        cheap = cheap and isinstance(event, Gaussian)
    if not each_round:
        return Spent(problem=f"the ledger charged nothing for the promised scope ({scope})")
    order = np.argsort(each_round, kind="stable")
    rounds, costs = np.array(each_round)[order], np.array(each_cost)[order]
    numbers, places = np.unique(np.array(each_client)[order], return_inverse=True)
    totals, active = np.zeros(len(numbers)), np.zeros(len(numbers), dtype=bool)
    most, median, reason, done = [], [], "", 0

    def epsilon(place: int, t: int) -> float:
        if cheap:
            return epsilon_of(math.sqrt(totals[place]), delta)
        return bound(charged_to(book, scope, int(numbers[place]), t), delta, adjacency=scope.adjacency)[0]

    for t in _spaced(np.unique(rounds).tolist(), _POINTS[cheap]):
        end = int(np.searchsorted(rounds, t, side="right"))
        np.add.at(totals, places[done:end], costs[done:end])
        active[places[done:end]] = True
        done = end
        among = np.flatnonzero(active)
        top = int(among[np.argmax(totals[among])])
        most.append((t + 1, epsilon(top, t)))
        if numbers[0] >= 0:
            idle, middle = clients - len(among), (clients - 1) // 2
            ranked = among[np.argsort(totals[among], kind="stable")]
            median.append((t + 1, 0.0 if middle < idle else epsilon(int(ranked[middle - idle]), t)))
        if math.isinf(most[-1][1]) and not cheap:
            events = charged_to(book, scope, int(numbers[top]), t)
            reason = next((e.reason for e in events if isinstance(e, Unbounded)), "")
    return Spent(most, median, len(rounds), reason)


def _spaced(rounds: list[int], points: int) -> list[int]:
    """Some of the ascending rounds, evenly spaced, with the last."""
    count = min(points, len(rounds))
    return sorted({rounds[round(i * (len(rounds) - 1) / max(1, count - 1))] for i in range(count)} | {rounds[-1]})


def _cost(event: Event) -> float:
    """What orders clients by spending: mu^2, for sampled releases that of the central limit (Dong et al. 2019)."""
    if isinstance(event, Gaussian):
        return event.count * event.mu**2
    if isinstance(event, Unbounded):
        return math.inf
    return event.count * rate_of(event) ** 2 * math.expm1(min(unsampled_mu(event) ** 2, 700.0))
