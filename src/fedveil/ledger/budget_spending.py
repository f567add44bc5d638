"""What the projects of a population spent of its lifetime budget, each alone and all together, and what is left."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fedveil.ledger.budget import Budgets
from fedveil.ledger.ledger import Ledger
from fedveil.ledger.population_budget import PopulationBudget, rounded_down


@dataclass(frozen=True)
class Project:
    """Runs of one name. epsilon: of all their releases together; spent: the part of the budget; both of the client with most."""

    name: str
    runs: int
    rows: int
    epsilon: float
    spent: float


@dataclass(frozen=True)
class Spending:
    """What a budget's ledger holds.

    Args:
        clients: how many of them released anything (server view), or 0. most: the one with least left, or -1.
        epsilon, spent: of all projects together, for that client. left: the largest epsilon that a further project may have by
            itself, at the budget's delta, whoever takes part.
    """

    rows: int
    clients: int
    most: int
    epsilon: float
    spent: float
    left: float
    projects: tuple[Project, ...]


@dataclass
class _Count:
    budgets: Budgets
    runs: set[str] = field(default_factory=set)
    rows: int = 0


def spending(budget: PopulationBudget) -> Spending:
    """Everything that the ledger of a budget holds, counted as its cap counts it."""
    empty = Budgets(budget.cap, budget.scope)
    every, projects = _Count(empty), dict[str, _Count]()
    with Ledger.open(budget.path) as ledger:
        for row in ledger.entries():
            run = row[2].run
            project = projects.setdefault(project_of(run), _Count(empty.unspent()))
            for count in (every, project):
                count.budgets.replay([row])
                count.runs.add(run)
                count.rows += 1
    most = max(every.budgets.clients, key=lambda c: every.budgets.of(c).spent_fraction, default=-1)
    free = budget.cap.limit - (every.budgets.of(most).spent if every.rows else 0)
    blocked = bool(every.rows and every.budgets.of(most).blocked)
    left = 0.0 if blocked or free <= 0 else rounded_down(budget.epsilon(free))
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
    )


def project_of(run: str) -> str:
    """The project of a run's name `project/id`; a run without a project is one of its own."""
    return run.rpartition("/")[0] or run


def _epsilon(budget: PopulationBudget, budgets: Budgets) -> float:
    found = [budgets.of(client) for client in budgets.clients]
    if any(one.blocked for one in found):
        return math.inf
    return budget.epsilon(max((one.spent for one in found), default=budget.cap.limit * 0))
