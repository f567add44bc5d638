"""The lifetime budget that a run shares with others (`privacy.budget`): opened, and checked before the run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError, LedgerError
from fedveil.experiment.assembly import planned_charges
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.ledger.filters import best_order
from fedveil.ledger.ledger import AGGREGATE
from fedveil.ledger.population_budget import PopulationBudget, open_budget

if TYPE_CHECKING:
    from fedveil.experiment.experiment import Experiment


def shared_budget(experiment: Experiment) -> PopulationBudget | None:
    """Return the budget that `privacy.budget` names, or None.

    Raises:
        LedgerError: it does not exist. ConfigError: it has another scope, or the run's noise is no protection.
    """
    path = experiment.budget.path
    if path is None:
        return None
    if experiment.seeded_noise:
        raise ConfigError(
            f"privacy.budget = '{path}' counts what leaves of real people's data, and run.seeded_noise = true makes noise that "
            "protects nobody: leave one of them out"
        )
    try:
        budget = open_budget(path)
    except LedgerError as problem:
        raise LedgerError(f"privacy.budget = '{path}': {problem}") from problem
    budget.check_scope(experiment.setting.scope)
    return budget


def affordable(experiment: Experiment, run_id: str) -> PopulationBudget | None:
    """Return the budget that `privacy.budget` names, after checking that the whole plan fits, or None.

    Raises:
        LedgerError, ConfigError: as `shared_budget`. BudgetExhausted: the planned rounds exceed the remaining budget.
    """
    budget = shared_budget(experiment)
    if budget is not None:
        check_plan(budget, experiment, run_name(experiment, run_id))
    return budget


def check_plan(budget: PopulationBudget, experiment: Experiment, run: str) -> None:
    """Refuse a run whose planned rounds exceed the remaining budget; raise as `PopulationBudget.check_plan`."""
    method, setting = experiment.method, experiment.setting
    for group in setting.groups:
        budget.check_plan(planned_charges(method, setting.of_group(group)), run, group.clients)
    if not setting.groups:
        clients = range(setting.clients) if setting.scope.view is View.SERVER else (AGGREGATE,)
        budget.check_plan(planned_charges(method, setting), run, clients)


def scope_and_order(like: Path | None, epsilon: float, delta: float) -> tuple[Scope, float | None]:
    """Return the scope of a budget from a typical configuration, and the best order if that samples in secret."""
    if like is None:
        return Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE), None
    method, setting = calibrated_setting(load_config(like))
    planned = [event for event in planned_charges(method, setting) if not isinstance(event, Unbounded)]
    if all(isinstance(event, Gaussian) for event in planned):
        return setting.scope, None
    return setting.scope, best_order(epsilon, delta, planned, setting.scope.adjacency)


def run_name(experiment: Experiment, run_id: str) -> str:
    """Return the run's name in the budget; runs of one project share the part before the slash."""
    project = experiment.budget.project
    return f"{project}/{run_id}" if project else run_id
