"""Which methods can be searched on private data: those whose runs have one price, fixed before the data are seen."""

from __future__ import annotations

from dataclasses import replace

from fedveil.accounting.types import Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan
from fedveil.methods.base import MethodConfig
from fedveil.methods.method import Method
from fedveil.methods.parts import Fixed, Scheduled
from fedveil.methods.setting import Setting


def known_plans(method: Method, s: Setting) -> tuple[Plan, ...]:
    """The plans of all rounds, where they are known before the data are seen and scaled by one noise multiplier; else none."""
    if not (isinstance(method, MethodConfig) and type(method).calibrate is MethodConfig.calibrate):
        return ()
    release = method.release(replace(s, noise_multiplier=1.0) if s.noise_multiplier is None else s)
    plans = (release.always,) if isinstance(release, Fixed) else release.plans if isinstance(release, Scheduled) else ()
    return () if any(plan.mechanism.stateful for plan in plans) else plans


def check_selection(method: Method, s: Setting) -> None:
    """Refuse a search whose price is not known: it counts runs in which the plan of each round is fixed before the data are seen.

    Raises:
        ConfigError: plans that adapt, noise that no single multiplier sets, a unit or view that a search does not protect, or a
            guarantee that is not that of the whole search.
    """
    if s.selection is None:
        return
    if not known_plans(method, s):
        raise ConfigError(
            f"privacy.selection counts runs whose plans are known before the data are seen, and those of {method.name} are not: "
            f"take dp-fedavg, dp-fedsam or time-adaptive, or choose settings on public data (fedveil tune --on)"
        )
    if s.scope.unit is not Unit.CLIENT or s.scope.view is View.SERVER:
        raise ConfigError(
            f"privacy.selection with privacy.unit = '{s.scope.unit}' and privacy.view = '{s.scope.view}': a score protects whole "
            f"clients, and the server's view holds every run: set privacy.unit = 'client' and privacy.view = 'aggregate'"
        )
    if s.selection.shape is None and s.selection.runs > 1 and s.epsilon is not None:
        raise ConfigError(
            f"privacy.epsilon = {s.epsilon:g} with privacy.selection of runs that were looked at: epsilon is then the result; "
            f"give privacy.noise_multiplier"
        )
