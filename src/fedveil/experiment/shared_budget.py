"""Budgets of a run: its own, from its planned releases, and the lifetime that it shares with others (`privacy.budget`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Adjacency, Event, Gaussian, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError, LedgerError
from fedveil.experiment.config_files import load_config
from fedveil.experiment.public_setting import calibrated_setting
from fedveil.ledger.budget import Budgets, Filter, FixedPlan, GdpFilter, RdpFilter, best_order
from fedveil.ledger.ledger import AGGREGATE, Ledger
from fedveil.ledger.population_budget import PopulationBudget, open_budget
from fedveil.methods.run_cost import ROUNDING, events_in_view, run_releases

if TYPE_CHECKING:
    from fedveil.experiment.experiment import Experiment
    from fedveil.methods.method import Method
    from fedveil.methods.setting import Setting

_log = logging.getLogger(__name__)


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
            f"privacy.budget = '{path}' counts releases of real people's data, and run.seeded_noise = true makes noise that "
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
        for planned, clients in plans(experiment):
            budget.check_plan(planned, run_name(experiment, run_id), clients)
    return budget


@contextmanager
def reserved(budget: PopulationBudget | None, experiment: Experiment, run_id: str, ledger: Path) -> Iterator[None]:
    """Reserve the planned rounds of a run for the duration of the block.

    What was not spent is given back when the run has ended. A run that was interrupted after its first release keeps it, since
    it can be resumed.

    Args:
        ledger: path of the run's own ledger, which is concluded when the run has ended.

    Raises:
        LedgerError, ConfigError, BudgetExhausted: as `PopulationBudget.reserve`.
    """
    if budget is None:
        yield
        return
    run = run_name(experiment, run_id)
    budget.reserve(plans(experiment), run)
    try:
        yield
    finally:
        try:
            if not ledger.exists() or not _is_resumable(ledger, run_id):
                budget.give_back(run)
        except LedgerError as problem:  # the reason why the run ended is told in its own place
            _log.warning("%s keeps what %s has reserved: %s", budget.path, run, problem)


def _is_resumable(path: Path, run_id: str) -> bool:
    """Return whether a run has released something, and may release more."""
    with Ledger.open(path, read_only=True) as ledger:
        return ledger.run == run_id and ledger.closing is None and len(ledger) > 0


def plans(experiment: Experiment) -> list[tuple[list[Event], Collection[int]]]:
    """Return the planned charges of each group of clients, with the clients."""
    method, setting = experiment.method, experiment.setting
    if setting.groups:
        return [(planned_charges(method, setting.of_group(group)), group.clients) for group in setting.groups]
    clients = range(setting.clients) if setting.scope.view is View.SERVER else (AGGREGATE,)
    return [(planned_charges(method, setting), clients)]


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


def planned_charges(method: Method, setting: Setting) -> list[Event]:
    """Return the planned ledger charges for one client (server view) or for the whole run."""
    view = setting.scope.view
    return run_releases(method, setting, View.AGGREGATE if view is View.FINAL else view)


def budgets(method: Method, setting: Setting) -> Budgets | None:
    """Return the budget of each client (server view) or of the whole run, from the planned releases; None if unbounded.

    Clients in groups with own caps get these, from the releases planned for their group. If the last model alone reveals less
    than all releases together, the cap is the total cost, because each release is charged in full.
    """
    planned = planned_charges(method, setting)
    if any(isinstance(event, Unbounded) for event in planned):
        return None
    epsilon = setting.epsilon if planned == events_in_view(method, setting, setting.scope.view) else None
    if setting.selection is not None:
        epsilon = None  # the target is the search's; this run's cap follows from its plan
    delta, adjacency = setting.delta, setting.scope.adjacency
    caps: dict[int, Filter] = {}
    for group in setting.groups:
        cap = filter_for(planned_charges(method, setting.of_group(group)), group.epsilon, delta, adjacency)
        caps |= dict.fromkeys(group.clients, cap)
    return Budgets(filter_for(planned, epsilon, delta, adjacency), setting.scope, by_client=caps)


def filter_for(planned: Sequence[Event], epsilon: float | None, delta: float, adjacency: Adjacency) -> Filter:
    """Return the cap of a run: the target (epsilon, delta), or the cost of the planned releases (plus rounding) without one.

    Unsampled releases are capped by the GDP filter. Equal sampled ones are capped by their number, so any accountant may be
    quoted. Mixtures are capped by the Renyi filter at one order, which the plan fixes in advance.
    """
    gaussian = [event for event in planned if isinstance(event, Gaussian)]
    if len(gaussian) == len(planned):
        mu = math.sqrt(math.fsum(event.count * event.mu**2 for event in gaussian))
        return GdpFilter(epsilon, delta) if epsilon is not None else GdpFilter.from_mu(mu * (1 + ROUNDING), delta)
    if len(planned) == 1 and isinstance(planned[0], SampledGaussian):
        event = planned[0]
        return FixedPlan(SampledGaussian(event.rate, event.noise_multiplier * (1 - ROUNDING)), event.count)
    if epsilon is None:
        epsilon = bound(planned, delta, accountant="rdp", adjacency=adjacency)[0] * (1 + ROUNDING)
    bounded = [event for event in planned if not isinstance(event, Unbounded)]
    return RdpFilter(epsilon, delta, best_order(epsilon, delta, bounded, adjacency))
