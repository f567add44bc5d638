"""Lifetime budget of a population: one ledger with a cap, shared by several projects."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Event, Scope, Unbounded, View, small
from fedveil.errors import BudgetExhausted, ConfigError, LedgerError
from fedveil.ledger.budget import Budgets, GdpFilter, RdpFilter
from fedveil.ledger.budgeted_ledger import BudgetedLedger
from fedveil.ledger.files import head_path, owner_only_folder, read_head, require_budget, was_begun
from fedveil.ledger.ledger import AGGREGATE, Ledger
from fedveil.ledger.reservations import (
    Fit,
    Reservation,
    SharedBudgets,
    intervals,
    read_reservations,
    reserved_path,
    write_reservations,
)

Cap = GdpFilter | RdpFilter


@dataclass(frozen=True)
class PopulationBudget:
    """Budget of an existing ledger, from `create_budget` or `open_budget`.

    Args:
        cap: per client in the server view, for all clients together in the other views. scope: of the cap's epsilon.
    """

    path: Path
    cap: Cap
    scope: Scope

    def ledger(self, run: str, client: int | None = None) -> BudgetedLedger:
        """Return the ledger that a run charges, under the name `run` and, for the budget of one client, the number `client`."""
        return BudgetedLedger(self.path, SharedBudgets(self.path, self.cap, self.scope, run), run=run, client=client)

    def check_scope(self, scope: Scope) -> None:
        """Refuse a run of another scope.

        Raises:
            ConfigError: the unit, adjacency or view differs, so the costs cannot be added up.
        """
        if scope != self.scope:
            raise ConfigError(
                f"privacy.budget = '{self.path}' speaks of {self.scope}, this run of {scope}, and the two do not add up: set "
                f"privacy.unit, privacy.adjacency and privacy.view to those of the budget, or create another budget"
            )

    def check_plan(self, planned: Sequence[Event], run: str, clients: Collection[int]) -> None:
        """Refuse a run whose planned releases do not fit; earlier charges of a resumed run count as part of its plan.

        Args:
            planned: all releases about one client. clients: those that may take part, or -1.

        Raises:
            BudgetExhausted: the plan exceeds the remaining budget, or is unbounded. ConfigError: the cap cannot bound it.
        """
        cost, budgets = self._cost(planned), SharedBudgets(self.path, self.cap, self.scope, run)
        with Ledger.open(self.path) as ledger:
            budgets.replay(ledger.entries())
        self._check(budgets, cost, clients)

    def reserve(self, plans: Sequence[tuple[Sequence[Event], Collection[int]]], run: str) -> None:
        """Reserve what a run plans, so that no other run spends it; raise as `check_plan` if it does not fit.

        Args:
            plans: of each group of clients, all releases about one client, and the clients, as in `check_plan`.
        """
        costs = [(self._cost(planned), clients) for planned, clients in plans]
        budgets = SharedBudgets(self.path, self.cap, self.scope, run)

        def take() -> None:
            budgets.replay(ledger.entries(since=budgets.seen))
            for cost, clients in costs:
                self._check(budgets, cost, clients)
            rows = [Reservation(*interval, cost) for cost, clients in costs for interval in intervals(clients)]
            write_reservations(self.path, {**budgets.reserved, run: rows})

        with Ledger.open(self.path) as ledger:
            budgets.replay(ledger.entries())  # a long ledger is counted before the lock that others wait for
            ledger.exclusively(take)

    def give_back(self, run: str) -> bool:
        """Give back what a run has reserved and not spent; return whether it had reserved anything."""
        if run not in read_reservations(self.path):
            return False

        def give() -> None:
            write_reservations(self.path, {name: rows for name, rows in read_reservations(self.path).items() if name != run})

        with Ledger.open(self.path) as ledger:
            ledger.exclusively(give)
        return True

    def _cost(self, planned: Sequence[Event]) -> Fraction:
        for event in planned:
            if isinstance(event, Unbounded):
                raise BudgetExhausted(
                    f"privacy.budget = '{self.path}': this run would release something of unbounded cost ({event.reason}): use a "
                    f"method that proves a cost, or leave privacy.budget out"
                )
        return sum((self.cap.cost(event, self.scope.adjacency) for event in planned), Fraction(0))

    def _check(self, budgets: SharedBudgets, cost: Fraction, clients: Collection[int]) -> None:
        fit = budgets.tightest(cost, clients)
        if fit.asked > fit.free:
            raise BudgetExhausted(self._refusal(fit))

    def _refusal(self, fit: Fit) -> str:
        left, asked, limit = max(fit.free, Fraction(0)), fit.asked, self.cap.limit
        whose = f" of client {fit.client}" if fit.client not in (None, AGGREGATE) else ""
        reserved = f" (other runs have reserved {percent(fit.held / limit)})" if fit.held else ""
        return (
            f"privacy.budget = '{self.path}': this run plans to spend {percent(asked / limit)} of the budget"
            f" ({self.cap.quotes}), and {percent(left / limit)}{whose} is left{reserved}, which is epsilon = "
            f"{rounded_down(self.epsilon(left)):g} at delta = {small(self.cap.delta)}. Nothing was trained or released: plan "
            f"fewer rounds or more noise (fedveil budget show {self.path} lists what was spent and reserved)"
        )

    def epsilon(self, spent: Fraction) -> float:
        """Return the epsilon, at the cap's delta and order, that this spent cost amounts to; 0 for nothing."""
        if not spent:
            return 0.0
        if isinstance(self.cap, GdpFilter):
            return epsilon_of(math.sqrt(spent), self.cap.delta)
        a = self.cap.order
        return max(0.0, float(spent) - (math.log(self.cap.delta) + math.log(a)) / (a - 1) + math.log1p(-1 / a))


def create_budget(path: str | Path, epsilon: float, delta: float, scope: Scope, order: float | None = None) -> PopulationBudget:
    """Create the ledger of a budget with nothing spent.

    Args:
        epsilon: > 0. delta: in (0, 1). scope: of both; a run of another scope cannot charge the budget.
        order: Renyi order (> 1) of a cap that credits secret samples; None for a cap in Gaussian DP, exact for Gaussian releases,
            which charges secret samples as if everybody took part.

    Raises:
        ConfigError: a number out of range, or an order that admits no release. LedgerError: a ledger exists at `path`.
    """
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ConfigError(f"--epsilon {epsilon:g}: the cap of a budget must be a finite number > 0")
    path, numbers = Path(path), {"epsilon": epsilon, "delta": delta, "order": order}
    budget = PopulationBudget(path, _cap(epsilon, delta, order), scope)
    names = {"unit": str(scope.unit), "adjacency": str(scope.adjacency), "view": str(scope.view)}
    Ledger.create(path, "budget", {"budget": {**numbers, **names}}).close()
    reserved_path(path).unlink(missing_ok=True)  # of an earlier budget with this name
    return budget


def open_budget(path: str | Path) -> PopulationBudget:
    """Open the budget of a ledger after verifying the whole ledger.

    Raises:
        LedgerError: the ledger is missing or damaged, or belongs to a single run.
    """
    path = Path(path)
    require_budget(path)
    with Ledger.open(path, read_only=True) as ledger:
        meta = ledger.meta.get("budget")
    try:
        return PopulationBudget(path, *_read(meta))
    except (TypeError, KeyError, ConfigError):
        raise LedgerError(
            f"{path} is the ledger of one run, and no budget that runs share: create one with fedveil budget create"
        ) from None


def lifetime_budget(
    path: Path, epsilon: float, delta: float, scope: Scope, order: float | None = None, *, alone: bool = False
) -> PopulationBudget:
    """Return the lifetime budget at `path`, creating it on first use, in whatever process.

    Args:
        alone: no other process uses the folder, by its lock, so other numbers may replace a ledger without charges.

    Raises:
        ConfigError: it was created with other numbers. LedgerError: it is damaged, or a file is missing.
    """
    owner_only_folder(path.parent)
    while not was_begun(path):
        try:
            return create_budget(path, epsilon, delta, scope, order)
        except LedgerError as problem:
            if not (isinstance(problem.__cause__, FileExistsError) or was_begun(path)):
                raise  # and otherwise another process is creating it
    budget = open_budget(path)
    if budget != PopulationBudget(path, _cap(epsilon, delta, order), scope):
        if alone and _is_unspent(path):
            for file in (head_path(path), path):
                file.unlink()
            return create_budget(path, epsilon, delta, scope, order)
        raise ConfigError(
            f"epsilon = {epsilon:g} at delta = {small(delta)} ({scope}) is not what {path} was made with, which is "
            f"{budget.cap.quotes} ({budget.scope}): restore these numbers, since earlier charges count by them. "
            f"If nothing was charged yet (fedveil budget show), stop all users of it and remove {path.name} and its -head"
        )
    return budget


def _is_unspent(path: Path) -> bool:
    with Ledger.open(path, read_only=True) as ledger:
        return next(iter(ledger.entries()), None) is None and not read_head(path)[0]


def percent(part: Fraction | float) -> str:
    """Format a share of a budget; inf on overflow."""
    try:
        return f"{float(part):.4%}"
    except OverflowError:
        return "inf %"


def rounded_down(value: float, digits: int = 4) -> float:
    """Round down to `digits` significant digits, so that a remaining budget is not overstated."""
    if not value or not math.isfinite(value):
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - digits + 1)
    return float(f"{math.floor(value / unit) * unit:.{digits}g}")


def _cap(epsilon: float, delta: float, order: float | None) -> Cap:
    return GdpFilter(epsilon, delta, ignore_sampling=True) if order is None else RdpFilter(epsilon, delta, order)


def _read(meta: Any) -> tuple[Cap, Scope]:
    return _cap(meta["epsilon"], meta["delta"], meta["order"]), Scope(meta["unit"], meta["adjacency"], meta["view"])


@dataclass(frozen=True)
class Project:
    """Runs of one name: epsilon of all their releases together and the spent share, both of the client with most."""

    name: str
    runs: int
    rows: int
    epsilon: float
    spent: float


@dataclass(frozen=True)
class Reserved:
    """Reservation of a run that it has not spent yet, as a share of the budget, for the client with the largest one."""

    run: str
    share: float


@dataclass(frozen=True)
class Spending:
    """Summary of a budget's ledger.

    Args:
        clients: number of clients with a release (server view), or 0. most: the client with the least remaining budget, or -1.
        epsilon, spent: of all projects together, for that client. left: the largest epsilon that a further project may use by
            itself, at the budget's delta, with any participants. reserved: by runs that have not ended.
    """

    rows: int
    clients: int
    most: int
    epsilon: float
    spent: float
    left: float
    projects: tuple[Project, ...]
    reserved: tuple[Reserved, ...] = ()


@dataclass
class _Count:
    budgets: Budgets
    runs: set[str] = field(default_factory=set)
    rows: int = 0


def spending(budget: PopulationBudget) -> Spending:
    """Summarise the ledger of a budget, with costs as its cap counts them."""
    empty, shared = Budgets(budget.cap, budget.scope), SharedBudgets(budget.path, budget.cap, budget.scope, "")
    every, projects = _Count(shared), dict[str, _Count]()
    with Ledger.open(budget.path) as ledger:
        for row in ledger.entries():
            run = row[2].run
            project = projects.setdefault(_project_of(run), _Count(empty.unspent()))
            for count in (every, project):
                count.budgets.replay([row])
                count.runs.add(run)
                count.rows += 1
    most = max(every.budgets.clients, key=lambda c: every.budgets.of(c).spent_fraction, default=-1)
    everybody = range(AGGREGATE if budget.scope.view is not View.SERVER else 0, 2**63)
    free = shared.tightest(Fraction(0), everybody).free
    left = 0.0 if free <= 0 else rounded_down(budget.epsilon(free))
    return Spending(
        rows=every.rows,
        clients=sum(client >= 0 for client in every.budgets.clients),
        most=most,
        epsilon=_epsilon(budget, every.budgets),
        spent=every.budgets.spent_fraction,
        left=left,
        projects=tuple(
            Project(name, len(c.runs), c.rows, _epsilon(budget, c.budgets), c.budgets.spent_fraction)
            for name, c in projects.items()
        ),
        reserved=tuple(Reserved(run, float(share / budget.cap.limit)) for run, share in shared.shares().items()),
    )


def _project_of(run: str) -> str:
    """Return the project in a run's name `project/id`, or the whole name if it has no project."""
    return run.rpartition("/")[0] or run


def _epsilon(budget: PopulationBudget, budgets: Budgets) -> float:
    spent = [budgets.of(client) for client in budgets.clients]
    if any(one.blocked for one in spent):
        return math.inf
    return budget.epsilon(max((one.spent for one in spent), default=budget.cap.limit * 0))
