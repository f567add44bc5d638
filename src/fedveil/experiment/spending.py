"""The proven epsilon of the releases charged up to a round, in the run's own view."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedveil.accounting.accountant import rdp_curve
from fedveil.accounting.gaussian import rdp_epsilon
from fedveil.accounting.subsampled import ORDERS
from fedveil.accounting.types import Event, Gaussian, SecretSample, Unbounded, View
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.methods.run_cost import ROUNDING, charged_bound, charged_delta, events_in_view, run_variation
from fedveil.statement.scope_checks import neighbouring_pair

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedveil.federation.history import Row
    from fedveil.federation.progress import Federation, Progress
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting
    from fedveil.statement.statement import Statement

COLUMN = "epsilon_spent"
_KNOTS, _APART = 8, 20
"""Number of knots per run, and their least distance in rounds: at knots sampled releases are composed exactly."""

Total = tuple[float, frozenset[tuple[SecretSample, int]]]
"""Releases of one client or the aggregate: the sum of mu^2, and the number of each kind of sampled release."""


def spending_of(job: Federation, statement: Statement) -> Callable[[Progress], None]:
    """Return a callback that adds the column to a finished round's record; if nothing is proven it adds none."""
    after = _column(job, statement)
    return lambda progress: progress.history[-1].public.update(after(progress.round - 1))


def _column(job: Federation, statement: Statement) -> Callable[[int], Row]:
    ledger = job.context.door.ledger
    if not isinstance(ledger, BudgetedLedger) or math.isinf(statement.proven.epsilon):
        return lambda round: {}
    if job.setting.selection is not None:
        return lambda round: {COLUMN: statement.proven.epsilon}  # charged before the first run of the search
    return EpsilonSpent(ledger, job.method, job.setting, statement).after


class EpsilonSpent:
    """Epsilon over the rounds, computed from the ledger's new rows.

    Gaussian releases are composed exactly after each round. Sampled ones are bounded by the least of three numbers: their Renyi
    bound, the cost of the plan up to the next knot, composed as in the statement, and the whole plan. At the end of the plan it
    is the statement's number.

    Args:
        ledger: of the run. statement: with a finite proven epsilon.
    """

    def __init__(self, ledger: BudgetedLedger, method: Method, setting: Setting, statement: Statement) -> None:
        self._ledger, self._setting, self._proven = ledger, setting, statement.proven
        self._pair = neighbouring_pair(setting.scope, per_example=setting.example_clip is not None)
        self._variation = run_variation(method, setting)
        view = setting.scope.view
        composed = events_in_view(method, setting, View.AGGREGATE if view is View.FINAL else view)
        self._is_composition = composed == events_in_view(method, setting, view)
        self._planned = _total(composed)
        self._read = 0
        self._squares: dict[int, float] = defaultdict(float)
        self._sampled: dict[int, Counter[SecretSample]] = defaultdict(Counter)
        self._unbounded = False
        self._curves: dict[SecretSample, NDArray[np.float64]] = {}
        self._knots: dict[int, float] = {}

    def after(self, round: int) -> Row:
        """Return the column of a finished round."""
        for number, client, event in self._ledger.charged_since(self._read):
            self._read = number
            if isinstance(event, Unbounded):
                self._unbounded = True
            elif isinstance(event, Gaussian):
                self._squares[client] += event.count * event.mu**2
            else:
                self._sampled[client][replace(event, count=1)] += event.count
        ended = round + 1 == self._setting.rounds
        return {COLUMN: math.inf if self._unbounded else max((self._epsilon(t, ended) for t in self._totals()), default=0.0)}

    def _totals(self) -> Iterable[Total]:
        """Return totals that include the most expensive one."""
        if not self._sampled:
            return [(max(self._squares.values()), frozenset())] if self._squares else []
        kinds = {event for counts in self._sampled.values() for event in counts}
        if len(kinds) == 1 and not self._squares:
            kind = next(iter(kinds))
            return [(0.0, frozenset([(kind, max(counts[kind] for counts in self._sampled.values()))]))]
        clients = self._squares.keys() | self._sampled.keys()
        return {(self._squares.get(c, 0.0), frozenset(self._sampled.get(c, Counter()).items())) for c in clients}

    def _epsilon(self, total: Total, ended: bool) -> float:
        within = _covers(self._planned, total)
        cap = self._proven.epsilon if within and (ended or self._is_composition) else math.inf
        if not (total[1] and within):
            return min(cap, self._composed(total))
        return min(cap, self._by_renyi(total), self._at_next_knot(total))

    def _composed(self, total: Total) -> float:
        return charged_bound(list(_events(total)), self._proven.delta, self._variation, self._pair)[0]

    def _by_renyi(self, total: Total) -> float:
        orders = np.array(ORDERS)
        for event, _ in total[1]:
            if event not in self._curves:
                self._curves[event] = rdp_curve(event, orders, adjacency=self._pair)
        curve = orders * (total[0] / 2) + sum((n * self._curves[event] for event, n in total[1]), np.zeros(len(orders)))
        return rdp_epsilon(orders, curve, charged_delta(self._proven.epsilon, self._proven.delta, self._variation))

    def _at_next_knot(self, total: Total) -> float:
        """Return the cost of the plan up to the knot at which it covers `total`."""
        ((event, count),) = self._planned[1]
        each = count / self._setting.participations
        stride = each * max(_APART, math.ceil(self._setting.participations / _KNOTS))
        knot = math.ceil(math.ceil(sum(n for _, n in total[1]) / stride) * stride)
        if knot >= count:
            return math.inf
        if knot not in self._knots:
            self._knots[knot] = self._composed((self._planned[0], frozenset([(event, knot)])))
        return self._knots[knot]


def _total(events: Iterable[Event]) -> Total:
    square, sampled = 0.0, Counter[SecretSample]()
    for event in events:
        if isinstance(event, Gaussian):
            square += event.count * event.mu**2
        elif not isinstance(event, Unbounded):
            sampled[replace(event, count=1)] += event.count
    return square, frozenset(sampled.items())


def _events(total: Total) -> Iterator[Event]:
    if total[0]:
        yield Gaussian(math.sqrt(total[0]))
    for event, count in total[1]:
        yield replace(event, count=count)


def _covers(plan: Total, total: Total) -> bool:
    """Return whether a plan with at most one kind of sampled release costs at least `total`, up to rounding of noise levels."""
    if total[0] > plan[0] * (1 + 4 * ROUNDING) or len(plan[1]) > 1:
        return False
    for planned, count in plan[1]:
        same = (replace(event, noise_multiplier=planned.noise_multiplier) == planned for event, _ in total[1])
        enough = (event.noise_multiplier >= planned.noise_multiplier * (1 - 2 * ROUNDING) for event, _ in total[1])
        return all(same) and all(enough) and sum(n for _, n in total[1]) <= count
    return not total[1]
