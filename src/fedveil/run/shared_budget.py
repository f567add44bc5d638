"""The lifetime budget that a run shares with others (`privacy.budget`): opened, compared with the run, checked beforehand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.types import Adjacency, Gaussian, Scope, Unbounded, Unit, View
from fedveil.configuration.config_files import load_config
from fedveil.configuration.public_setting import calibrated_setting
from fedveil.errors import ConfigError, LedgerError
from fedveil.ledger.filters import best_order
from fedveil.ledger.ledger import AGGREGATE
from fedveil.ledger.population_budget import PopulationBudget, open_budget
from fedveil.run.assembly import planned_charges

if TYPE_CHECKING:
    from fedveil.configuration.config import Config
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting


def shared_budget(config: Config, setting: Setting) -> PopulationBudget | None:
    """The budget that `privacy.budget` names, or None.

    Raises:
        LedgerError: there is none. ConfigError: it speaks of another scope, or the run's noise is no protection.
    """
    path = config.privacy.budget
    if path is None:
        return None
    if config.run.seeded_noise:
        raise ConfigError(
            f"privacy.budget = '{path}' counts what leaves of real people's data, and run.seeded_noise = true makes noise that "
            "protects nobody: leave one of them out"
        )
    try:
        budget = open_budget(path)
    except LedgerError as problem:
        raise LedgerError(f"privacy.budget = '{path}': {problem}") from problem
    budget.check_scope(setting.scope)
    return budget


def affordable(config: Config, method: Method, setting: Setting, run_id: str) -> PopulationBudget | None:
    """The budget that `privacy.budget` names, which has room for all that the run plans, or None.

    Raises:
        LedgerError, ConfigError: as `shared_budget`. BudgetExhausted: the planned rounds exceed what is left.
    """
    budget = shared_budget(config, setting)
    if budget is not None:
        check_plan(budget, method, setting, run_name(config, run_id))
    return budget


def check_plan(budget: PopulationBudget, method: Method, setting: Setting, run: str) -> None:
    """Refuse a run whose planned rounds exceed what is left; raises as `PopulationBudget.check_plan`."""
    for group in setting.groups:
        budget.check_plan(planned_charges(method, setting.of_group(group)), run, group.clients)
    if not setting.groups:
        clients = range(setting.clients) if setting.scope.view is View.SERVER else (AGGREGATE,)
        budget.check_plan(planned_charges(method, setting), run, clients)


def scope_and_order(like: Path | None, epsilon: float, delta: float) -> tuple[Scope, float | None]:
    """The scope that a budget takes from a typical configuration, and the best order for it where that samples in secret."""
    if like is None:
        return Scope(Unit.CLIENT, Adjacency.ZERO_OUT, View.AGGREGATE), None
    method, setting = calibrated_setting(load_config(like))
    planned = [event for event in planned_charges(method, setting) if not isinstance(event, Unbounded)]
    if all(isinstance(event, Gaussian) for event in planned):
        return setting.scope, None
    return setting.scope, best_order(epsilon, delta, planned, setting.scope.adjacency)


def run_name(config: Config, run_id: str) -> str:
    """The name of the run's releases in the budget: those of one project share what stands before the slash."""
    return f"{config.run.name}/{run_id}" if config.run.name else run_id
