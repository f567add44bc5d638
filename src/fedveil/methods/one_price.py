"""Methods whose runs have a price fixed before the data are seen."""

from __future__ import annotations

from dataclasses import replace

from fedveil.accounting.types import Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan
from fedveil.methods.base import MethodConfig
from fedveil.methods.method import Fixed, Method, Scheduled
from fedveil.methods.setting import Setting


def _known_plans(method: Method, s: Setting) -> tuple[Plan, ...]:
    """Return the plans of all rounds if they are fixed before the data are seen and scale with one noise multiplier, else ()."""
    if not (isinstance(method, MethodConfig) and type(method).calibrate is MethodConfig.calibrate):
        return ()
    release = method.release(replace(s, noise_multiplier=1.0) if s.noise_multiplier is None else s)
    plans = (release.always,) if isinstance(release, Fixed) else release.plans if isinstance(release, Scheduled) else ()
    return () if any(plan.mechanism.stateful for plan in plans) else plans


def check_selection(method: Method, s: Setting) -> None:
    """Refuse a search without a known price, which requires runs whose plans are fixed before the data are seen.

    Raises:
        ConfigError: plans that adapt, noise not set by a single multiplier, a unit or view that a search does not protect, or a
            guarantee that does not cover the whole search.
    """
    if s.selection is None:
        return
    if not _known_plans(method, s):
        raise ConfigError(
            "privacy.selection needs a method whose noise is fixed before the run by one noise multiplier, and that of "
            f"method.name = '{method.name}' is not: take dp-fedavg, dp-fedsam or time-adaptive, or choose settings on public "
            "data (fedveil tune --on)"
        )
    if s.scope.unit is not Unit.CLIENT or s.scope.view is View.SERVER:
        raise ConfigError(
            f"privacy.selection with privacy.unit = '{s.scope.unit}' and privacy.view = '{s.scope.view}': a score protects whole "
            f"clients, and the server's view holds every run: set privacy.unit = 'client' and privacy.view = 'aggregate'"
        )
    if s.selection.shape is None and s.selection.runs > 1 and s.epsilon is not None:
        raise ConfigError(
            f"privacy.epsilon = {s.epsilon:g} cannot be a target where privacy.selection has runs without a shape, all of "
            "which were looked at: their epsilon is computed from their noise. Leave privacy.epsilon out and set "
            "privacy.noise_multiplier"
        )


def check_noise_cohort(method: Method, s: Setting) -> None:
    """Refuse noise of a larger federation unless it is a single noise level on the sum of a round.

    Raises:
        ConfigError: a federation that is not larger, or releases of another kind.
    """
    larger = s.noise_cohort
    if larger is None:
        return
    if larger.clients < s.clients or not s.cohort <= larger.clients_per_round <= larger.clients:
        raise ConfigError(
            f"privacy.noise_cohort = {larger.clients} clients, {larger.clients_per_round} per round: give at least as many as "
            f"this federation has ({s.clients} clients, {s.cohort} per round), and no more clients per round than clients"
        )
    plans = _known_plans(method, s)
    if not plans or s.scope.unit is not Unit.CLIENT or s.scope.view is View.SERVER or any(p.place != "sum" for p in plans):
        raise ConfigError(
            f"privacy.noise_cohort applies to noise on the sum of a round, fixed before the run: method.name = '{method.name}' "
            f"with privacy.unit = '{s.scope.unit}' and privacy.view = '{s.scope.view}' has no such noise. Set privacy.unit = "
            "'client', privacy.view = 'aggregate' and method.name = 'dp-fedavg', 'dp-fedsam' or 'time-adaptive', or leave "
            "privacy.noise_cohort out"
        )
