"""Budgets: a filter's cap, enforced before each release, per client or for the aggregate, and rebuilt from the ledger on resume.

A release checks the budget, charges the ledger and is then made, so it may be over-counted but never under-counted.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from fedveil.accounting.types import Event, OneOrder, Scope, Unbounded, View
from fedveil.errors import BudgetExhausted, ConfigError, LedgerError
from fedveil.ledger.filters import Filter, FixedPlan, GdpFilter, RdpFilter, best_order
from fedveil.ledger.ledger import AGGREGATE, Entry, Ledger, Row

__all__ = ["Budget", "Budgets", "Filter", "FixedPlan", "GdpFilter", "RdpFilter", "best_order"]

_ROUNDING = Fraction(1, 10**5)
_NOTHING = Fraction(0)


class Budget:
    """Budget of one client, or of the aggregate: a filter, its scope, and the spent cost.

    Args:
        filter: the cap, a GdpFilter, RdpFilter or FixedPlan. scope: of the filter's epsilon.
    """

    def __init__(self, filter: Filter, scope: Scope) -> None:
        self.filter = filter
        self.scope = scope
        self.spent = Fraction(0)
        self.blocked = ""

    def check(self, event: Event, held: Fraction = _NOTHING) -> None:
        """Check that a release of this cost fits.

        Args:
            held: part of the budget that other runs have reserved.

        Raises:
            BudgetExhausted: the release would exceed the cap, or has no bound; nothing was released.
            ConfigError: the filter cannot account for this kind of release; nothing was released.
        """
        self._with(event, held)

    def spend(self, event: Event, held: Fraction = _NOTHING) -> None:
        """Check and count one release; raise as `check` does, counting nothing."""
        self.spent = self._with(event, held)

    def _with(self, event: Event, held: Fraction) -> Fraction:
        """Return the spent cost after a release of this cost; raise as `check` does."""
        if isinstance(event, Unbounded) and not isinstance(event, OneOrder):
            raise BudgetExhausted(
                f"a run with a budget releases nothing of unbounded cost ({event.reason}). {self}. Nothing was released: use a "
                f"method that proves a cost, or run without a budget"
            )
        if self.blocked:
            raise BudgetExhausted(
                f"the ledger holds a release that this budget cannot bound ({self.blocked}). {self}. Release nothing more"
            )
        cost = self.filter.cost(event, self.scope.adjacency)
        spent = self.spent + cost
        if spent + held > self.filter.limit:
            raise BudgetExhausted(self._refusal(event, cost, held))
        return spent

    def replay(self, rows: Iterable[Row]) -> None:
        """Count all releases of a ledger, even beyond the cap.

        Raises:
            LedgerError: a row has another scope, so its cost cannot be added to this budget.
        """
        for seq, _, entry in rows:
            if entry.scope != self.scope:
                raise LedgerError(_foreign(seq, entry, self.scope))
            self._count(entry.event)

    def _count(self, event: Event) -> None:
        try:
            if isinstance(event, Unbounded) and not isinstance(event, OneOrder):
                self.blocked = event.reason
            else:
                self.spent += self.filter.cost(event, self.scope.adjacency)
        except ConfigError as problem:
            self.blocked = str(problem)

    @property
    def spent_fraction(self) -> float:
        """Return the spent share of the budget: 0 for nothing, 1 for all, above 1 (or inf) if a replayed ledger holds more."""
        if self.blocked:
            return float("inf")
        return _part(self.spent, self.filter.limit)

    def state(self) -> dict[str, str]:
        """Return the budget as plain JSON values for a checkpoint; the ledger takes precedence over it."""
        return {"filter": repr(self.filter), "scope": str(self.scope), "spent": str(self.spent), "blocked": self.blocked}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state`; raise ConfigError if it is damaged or belongs to another filter or scope."""
        if (state.get("filter"), state.get("scope")) != (repr(self.filter), str(self.scope)):
            raise ConfigError(
                f"the saved budget is {state.get('filter')} for {state.get('scope')}, this run has {self.filter!r} for "
                f"{self.scope}: resume with the configuration of the run"
            )
        try:
            spent, blocked = Fraction(str(state["spent"])), str(state["blocked"])
        except (KeyError, ValueError, ZeroDivisionError) as problem:
            raise ConfigError(f"the saved budget is damaged ({problem!r}): rebuild it from the ledger with replay") from problem
        if spent < 0:
            raise ConfigError(
                f"the saved budget is damaged (spent = {float(spent):g} < 0): rebuild it from the ledger with replay"
            )
        self.spent, self.blocked = spent, blocked

    def __str__(self) -> str:
        return f"Budget: {self.filter.quotes} ({self.scope}), {self.spent_fraction:.4%} spent"

    def _refusal(self, event: Event, cost: Fraction, held: Fraction) -> str:
        remaining, limit = max(self.filter.limit - self.spent - held, Fraction(0)), self.filter.limit
        asked = f"{event} asks {_part(cost, limit):.4%} of the budget and {1 - _part(limit - remaining, limit):.4%} is left"
        asked += f", since other runs have reserved {_part(held, limit):.4%}" if held else ""
        by_rounding = remaining and cost <= remaining * (1 + _ROUNDING)
        advice = " (short by a rounding error: calibrate to GdpFilter.share or leave a margin)" if by_rounding else ""
        return f"{asked}{advice}. {self}. Nothing was released: stop with the last model, or plan more noise next time"


class Budgets:
    """Budgets of all clients, each created on first use; the aggregate is client -1.

    Args:
        filter: each client's cap. scope: of the budgets.
        others: further scopes under which the same run also charges the ledger; rows of any other scope are refused, not skipped.
        by_client: individual caps, by client.
    """

    def __init__(
        self, filter: Filter, scope: Scope, others: Collection[Scope] = (), by_client: Mapping[int, Filter] | None = None
    ) -> None:
        self.filter = filter
        self.scope = scope
        self.others = frozenset(others) - {scope}
        self.by_client = dict(by_client or {})
        self.seen = 0
        self._budgets: dict[int, Budget] = {}

    def of(self, client: int) -> Budget:
        """Return the budget of a client (-1: of the aggregate)."""
        if client < AGGREGATE or (client == AGGREGATE and self.scope.view is View.SERVER):
            raise ConfigError(f"in the {self.scope.view} view there is no budget of client {client}; clients count from 0")
        if client not in self._budgets:
            if self._budgets and (client == AGGREGATE) != (AGGREGATE in self._budgets):
                raise ConfigError(
                    "budgets of single clients and of the aggregate (-1) do not add up: charge one kind only in a scope"
                )
            self._budgets[client] = Budget(self.by_client.get(client, self.filter), self.scope)
        return self._budgets[client]

    @property
    def clients(self) -> tuple[int, ...]:
        """Return the clients (-1: the aggregate) whose budgets were used so far."""
        return tuple(self._budgets)

    def unspent(self) -> Budgets:
        """Return budgets with the same caps and nothing spent."""
        return Budgets(self.filter, self.scope, self.others, self.by_client)

    def check(self, ledger: Ledger, client: int, event: Event) -> None:
        """Raise as `Budget.check` does unless a release of this cost fits after all releases in the ledger."""
        self.replay(ledger.entries(since=self.seen))
        self.of(client).check(event, self.held(client))

    def held(self, client: int) -> Fraction:
        """Return the part of a client's budget that is not available to this run."""
        return _NOTHING

    def replay(self, rows: Iterable[Row]) -> None:
        """Count rows of a ledger, e.g. `replay(ledger.entries(since=budgets.seen))`, skipping rows up to `seen`.

        Raises:
            LedgerError: a row has a scope that is neither `scope` nor among `others`.
        """
        for seq, _, entry in rows:
            if seq <= self.seen:
                continue
            if entry.scope not in self.others:
                self.of(entry.client).replay([(seq, 0.0, entry)])
            self.seen = seq

    def charge(self, ledger: Ledger, entries: Sequence[Entry]) -> list[int]:
        """Check all entries and charge them in one transaction; sound for any number of processes with budgets on one ledger.

        Under the ledger's write lock it counts the charges of other processes, then checks, then writes.

        Raises:
            BudgetExhausted, ConfigError: as `Budget.check`; nothing was charged. LedgerError: as `Ledger.charge` and `replay`.
        """

        trial: dict[int, Budget] = {}

        def admit() -> None:
            self.replay(ledger.entries(since=self.seen))
            for entry in entries:
                if entry.scope != self.scope:
                    raise ConfigError(f"these budgets are for {self.scope}, and the release is for {entry.scope}")
                if entry.client not in trial:
                    trial[entry.client] = copy.copy(self.of(entry.client))
                trial[entry.client].spend(entry.event, self.held(entry.client))

        if not self.seen:  # count a long ledger before taking the lock that others wait for
            self.replay(ledger.entries())
        sequence = ledger.charge_many(entries, admit)
        for client, budget in trial.items():
            self._budgets[client].spent = budget.spent
        self.seen = sequence[-1] if sequence else self.seen
        return sequence

    @property
    def spent_fraction(self) -> float:
        """Return the largest share spent by any client; 0 before the first release."""
        return max((budget.spent_fraction for budget in self._budgets.values()), default=0.0)

    def state(self) -> dict[str, Any]:
        """Return all budgets as plain JSON values for a checkpoint; the ledger takes precedence over it."""
        return {"seen": self.seen, "clients": {str(client): budget.state() for client, budget in self._budgets.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a result of `state`; raise ConfigError as `Budget.restore` does."""
        try:
            last_row, clients = int(state["seen"]), {int(client): saved for client, saved in state["clients"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ConfigError(
                f"the saved budgets are damaged ({problem!r}): rebuild them from the ledger with replay"
            ) from problem
        restored = self.unspent()
        for client, saved in clients.items():
            restored.of(client).restore(saved)
        self.seen, self._budgets = last_row, restored._budgets


def _part(amount: Fraction, limit: Fraction) -> float:
    """Return amount / limit for display: 1 if an empty budget is spent, inf on overflow."""
    if not limit:
        return 1.0 if not amount else float("inf")
    try:
        return float(amount / limit)
    except OverflowError:
        return float("inf")


def _foreign(seq: int, entry: Entry, scope: Scope) -> str:
    return (
        f"release {seq} of the ledger was charged for {entry.scope}, this budget speaks of {scope}, and the two do not "
        f"add up: resume with the unit, adjacency and view of the run, or name its other scopes (Budgets(..., others))"
    )
