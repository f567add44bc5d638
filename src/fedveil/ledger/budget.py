"""Budgets: a filter's cap, enforced before each release, per client or for the aggregate, rebuilt from the ledger on resuming.

The order at the door is check, charge the ledger, hand over. Over-counting is allowed, under-counting never.
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


class Budget:
    """What one adversary may learn about one client (or, for the aggregate, about any): a filter, a scope, and what is spent.

    Args:
        filter: GdpFilter, RdpFilter or FixedPlan: the cap. scope: what its epsilon speaks of.
    """

    def __init__(self, filter: Filter, scope: Scope) -> None:
        self.filter = filter
        self.scope = scope
        self.spent = Fraction(0)
        self.blocked = ""

    def check(self, event: Event) -> None:
        """Return if a release of this cost may be made.

        Raises:
            BudgetExhausted: it would exceed the cap, or has no bound; nothing was released.
            ConfigError: this kind of release cannot be accounted for by the filter; nothing was released.
        """
        self._with(event)

    def spend(self, event: Event) -> None:
        """Check and count one release; raises as `check`, and then counts nothing."""
        self.spent = self._with(event)

    def _with(self, event: Event) -> Fraction:
        """What is spent after a release of this cost; raises as `check`."""
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
        if spent > self.filter.limit:
            raise BudgetExhausted(self._refusal(event, cost))
        return spent

    def replay(self, rows: Iterable[Row]) -> None:
        """Count releases that a ledger holds, all of them, whatever is left.

        Raises:
            LedgerError: a row has another scope, so that its cost cannot be added up with ours.
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
        """Part of the budget that is spent: 0 for nothing, 1 for all; above 1 (or inf) when a replayed ledger holds more."""
        if self.blocked:
            return float("inf")
        return _part(self.spent, self.filter.limit)

    def state(self) -> dict[str, str]:
        """The budget as plain JSON values, for a checkpoint; what a ledger says goes before it."""
        return {"filter": repr(self.filter), "scope": str(self.scope), "spent": str(self.spent), "blocked": self.blocked}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; raises ConfigError if it belongs to another filter or scope, or is no such state."""
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

    def _refusal(self, event: Event, cost: Fraction) -> str:
        left, limit = max(self.filter.limit - self.spent, Fraction(0)), self.filter.limit
        asked = f"{event} asks {_part(cost, limit):.4%} of the budget and {1 - _part(limit - left, limit):.4%} is left"
        by_rounding = left and cost <= left * (1 + _ROUNDING)
        advice = " (short by a rounding error: calibrate to GdpFilter.share or leave a margin)" if by_rounding else ""
        return f"{asked}{advice}. {self}. Nothing was released: stop with the last model, or plan more noise next time"


class Budgets:
    """One budget per client, made when first asked for; the aggregate is client -1.

    Args:
        filter: each client's cap. scope: of the budgets.
        others: further scopes under which the same run also charges the ledger; rows of any other scope are refused, not skipped.
        by_client: the caps of clients that have one of their own.
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
        """The budget of a client (-1: of the aggregate)."""
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
        """The clients (-1: the aggregate) whose budgets were asked for or spent so far."""
        return tuple(self._budgets)

    def unspent(self) -> Budgets:
        """The same caps, with nothing counted yet."""
        return Budgets(self.filter, self.scope, self.others, self.by_client)

    def check(self, ledger: Ledger, client: int, event: Event) -> None:
        """Raise as `Budget.check` unless the client may release something of this cost, after all that the ledger holds."""
        self.replay(ledger.entries(since=self.seen))
        self.of(client).check(event)

    def replay(self, rows: Iterable[Row]) -> None:
        """Count what a ledger holds, e.g. `replay(ledger.entries(since=budgets.seen))`; rows up to `seen` are not counted again.

        Raises:
            LedgerError: a row has a scope that is neither ours nor among `others`.
        """
        for seq, _, entry in rows:
            if seq <= self.seen:
                continue
            if entry.scope not in self.others:
                self.of(entry.client).replay([(seq, 0.0, entry)])
            self.seen = seq

    def charge(self, ledger: Ledger, entries: Sequence[Entry]) -> list[int]:
        """Check all entries and charge them in one transaction; sound for any number of processes with budgets on one ledger.

        Under the ledger's write lock it counts what other processes charged since, then checks, then writes.

        Raises:
            BudgetExhausted, ConfigError: as `Budget.check`; nothing was charged. LedgerError: as `Ledger.charge` and `replay`.
        """

        trial: dict[int, Budget] = {}

        def admit() -> None:
            self.replay(ledger.entries(since=self.seen))
            for entry in entries:
                if entry.scope != self.scope:
                    raise ConfigError(f"these budgets speak of {self.scope}, the release of {entry.scope}")
                if entry.client not in trial:
                    trial[entry.client] = copy.copy(self.of(entry.client))
                trial[entry.client].spend(entry.event)

        if not self.seen:  # all of a long ledger, before others have to wait for our lock
            self.replay(ledger.entries())
        sequence = ledger.charge_many(entries, admit)
        for client, budget in trial.items():
            self._budgets[client].spent = budget.spent
        self.seen = sequence[-1] if sequence else self.seen
        return sequence

    @property
    def spent_fraction(self) -> float:
        """The largest part spent by any client; 0 before the first release."""
        return max((budget.spent_fraction for budget in self._budgets.values()), default=0.0)

    def state(self) -> dict[str, Any]:
        """All budgets as plain JSON values, for a checkpoint; what a ledger says goes before it."""
        return {"seen": self.seen, "clients": {str(client): budget.state() for client, budget in self._budgets.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` returned; raises ConfigError as `Budget.restore`."""
        try:
            seen, clients = int(state["seen"]), {int(client): saved for client, saved in state["clients"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as problem:
            raise ConfigError(
                f"the saved budgets are damaged ({problem!r}): rebuild them from the ledger with replay"
            ) from problem
        restored = self.unspent()
        for client, saved in clients.items():
            restored.of(client).restore(saved)
        self.seen, self._budgets = seen, restored._budgets


def _part(amount: Fraction, limit: Fraction) -> float:
    """amount / limit for people to read; an empty budget is wholly spent, and inf stands for what no float can hold."""
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
