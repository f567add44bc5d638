"""The privacy spent over the rounds of a run, computed from its ledger and from nothing else."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedveil.accounting.accountant import bound, rdp_curve
from fedveil.accounting.composition import rdp_epsilons
from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.subsampled import ORDERS
from fedveil.accounting.types import Event, Gaussian, Scope, Unbounded
from fedveil.errors import LedgerError
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.ledger_totals import charged, charged_to

_ORDERS = np.array(ORDERS[::4])
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
    kinds = dict[Event, int]()  # of releases that are not plain Gaussian
    each_round, each_client, each_kind, each_square = array("q"), array("q"), array("q"), array("d")
    for t, client, event in charged(book, scope):
        kind, square = (
            (-1, event.count * event.mu**2) if isinstance(event, Gaussian) else (kinds.setdefault(event, len(kinds)), 0.0)
        )
        for column, value in ((each_round, t), (each_client, client), (each_kind, kind)):
            column.append(value)
        each_square.append(square)
    if not each_round:
        return Spent(problem=f"the ledger charged nothing for the promised scope ({scope})")
    order = np.argsort(each_round, kind="stable")
    rounds, squares, of_kind = np.array(each_round)[order], np.array(each_square)[order], np.array(each_kind)[order]
    numbers, places = np.unique(np.array(each_client)[order], return_inverse=True)
    cheap, curves = not kinds, np.array([rdp_curve(event, _ORDERS, adjacency=scope.adjacency) for event in kinds])
    totals, active = np.zeros(len(numbers)), np.zeros(len(numbers), dtype=bool)
    by_order = np.zeros((len(numbers), len(_ORDERS)))
    most, median, reason, done = [], [], "", 0

    def epsilon(place: int, t: int) -> float:
        if cheap:
            return epsilon_of(math.sqrt(totals[place]), delta)
        return bound(charged_to(book, scope, int(numbers[place]), t), delta, adjacency=scope.adjacency)[0]

    for t in _spaced(np.unique(rounds).tolist(), _POINTS[cheap]):
        new = slice(done, done := int(np.searchsorted(rounds, t, side="right")))
        np.add.at(totals, places[new], squares[new])
        active[places[new]] = True
        if not cheap:
            sampled = of_kind[new] >= 0
            np.add.at(by_order, places[new][sampled], curves[of_kind[new][sampled]])
        among = np.flatnonzero(active)
        costs = totals if cheap else _by_renyi(totals, by_order, delta)
        top = int(among[np.argmax(costs[among])])
        most.append((t + 1, epsilon(top, t)))
        if numbers[0] >= 0:
            idle, middle = clients - len(among), (clients - 1) // 2
            ranked = among[np.argsort(costs[among], kind="stable")]
            median.append((t + 1, 0.0 if middle < idle else epsilon(int(ranked[middle - idle]), t)))
        if math.isinf(most[-1][1]) and not cheap:
            events = charged_to(book, scope, int(numbers[top]), t)
            reason = next((e.reason for e in events if isinstance(e, Unbounded)), "")
    return Spent(most, median, len(rounds), reason)


def _spaced(rounds: list[int], points: int) -> list[int]:
    """Some of the ascending rounds, evenly spaced, with the last."""
    count = min(points, len(rounds))
    return sorted({rounds[round(i * (len(rounds) - 1) / max(1, count - 1))] for i in range(count)} | {rounds[-1]})


def _by_renyi(squares: NDArray[np.float64], by_order: NDArray[np.float64], delta: float) -> NDArray[np.float64]:
    """Epsilon of each client by Renyi accounting at a few orders: what orders clients by spending."""
    curves = squares[:, None] * (_ORDERS / 2) + by_order
    return np.asarray(rdp_epsilons(np.broadcast_to(_ORDERS, curves.shape), curves, delta).min(axis=1), dtype=np.float64)
