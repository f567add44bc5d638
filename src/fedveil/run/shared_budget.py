"""The lifetime budget that a run shares with others (`privacy.budget`): opened, compared with the run, checked before training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedveil.accounting.types import View
from fedveil.errors import ConfigError
from fedveil.ledger.ledger import AGGREGATE
from fedveil.ledger.population_budget import PopulationBudget, open_budget
from fedveil.run.assembly import planned_charges

if TYPE_CHECKING:
    from fedveil.configuration.config import Config
    from fedveil.methods.base import Method, Setting


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
    budget = open_budget(path)
    budget.check_scope(setting.scope)
    return budget


def check_plan(budget: PopulationBudget, method: Method, setting: Setting, run: str) -> None:
    """Refuse a run whose planned rounds exceed what is left; raises as `PopulationBudget.check_plan`."""
    clients = range(setting.clients) if setting.scope.view is View.SERVER else (AGGREGATE,)
    budget.check_plan(planned_charges(method, setting), run, clients)


def run_name(config: Config, run_id: str) -> str:
    """The name of the run's releases in the budget: those of one project share what stands before the slash."""
    return f"{config.run.name}/{run_id}" if config.run.name else run_id
