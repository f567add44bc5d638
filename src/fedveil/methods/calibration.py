"""The noise that a configured epsilon needs, and that of clients with caps of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from fedveil.accounting.accountant import AccountantName, calibrate
from fedveil.accounting.selection import needed_noise_multiplier
from fedveil.accounting.types import Event, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.method import Method
from fedveil.methods.run_cost import run_releases
from fedveil.methods.sampler_error import charged_delta, run_variation
from fedveil.methods.setting import BudgetGroup, NoiseCohort, Setting

ROUNDING = 1e-6
"""Relative slack between a calibrated noise and what a budget admits: noise levels are float32, budgets exact."""


def calibrated(method: Method, s: Setting, accountant: AccountantName = "auto") -> Setting:
    """The setting with the smallest noise multiplier whose proven epsilon, in the run's view, is at most the target.

    Clients with caps of their own each get the noise multiplier of theirs.
    """
    if s.noise_cohort is not None and s.noise_multiplier is None:
        return _extrapolated(method, s, s.noise_cohort, accountant)
    if s.noise_multiplier is not None or s.epsilon is None:
        return s

    def noise(epsilon: float) -> float:
        def planned(z: float) -> list[Event]:
            return run_releases(method, replace(s, epsilon=epsilon, noise_multiplier=z), s.scope.view)

        if reasons := [event.reason for event in planned(1.0) if isinstance(event, Unbounded)]:
            raise ConfigError(f"privacy.epsilon = {epsilon:g}: no noise reaches it, for {reasons[0]}{_instead(s)}")
        delta, pair = charged_delta(epsilon, s.delta, variation), s.scope.adjacency
        if s.selection is not None and (law := s.selection.law) is not None:
            return needed_noise_multiplier(law, planned, epsilon, delta, adjacency=pair) * (1 + 2 * ROUNDING)
        return calibrate(epsilon, delta, planned, accountant=accountant, adjacency=pair) * (1 + 2 * ROUNDING)

    caps, variation = _client_caps(method, s), run_variation(method, replace(s, noise_multiplier=1.0))
    groups = [BudgetGroup(e, frozenset(c for c, cap in enumerate(caps) if cap == e), noise(e)) for e in sorted(set(caps))]
    return replace(s, noise_multiplier=noise(s.epsilon), groups=tuple(groups))


def _instead(s: Setting) -> str:
    """What to do where DP-SGD is to protect clients."""
    if s.example_clip is None or s.scope.unit is not Unit.CLIENT:
        return ""
    return (
        ": set privacy.unit = 'record'; or, to protect clients, training.local = 'sgd' with a method that clips and noises their "
        "updates, such as method.name = 'dp-fedavg'"
    )


def _extrapolated(method: Method, s: Setting, larger: NoiseCohort, accountant: AccountantName) -> Setting:
    """The noise on the sum by which the mean has the noise that it would have in the larger federation."""
    size = replace(s, clients=larger.clients, cohort=larger.clients_per_round, epsilon=larger.epsilon, noise_cohort=None)
    return replace(s, noise_multiplier=calibrated(method, size, accountant).z * s.cohort / larger.clients_per_round)


def _client_caps(method: Method, s: Setting) -> Sequence[float]:
    """The checked caps of all clients, or none."""
    caps = method.client_epsilons(s)
    if not caps:
        return ()
    if s.scope.view is not View.SERVER:
        raise ConfigError(
            f"{method.name} gives each client a cap of its own, and in the {s.scope.view} view every round's sum is charged to "
            f"all clients: set privacy.view = 'server'"
        )
    if len(caps) != s.clients or not all(0 < cap < math.inf for cap in caps) or max(caps) != s.epsilon:
        raise ConfigError(
            f"{method.name}.client_epsilons must give one finite epsilon > 0 for each of the {s.clients} clients, the largest "
            f"equal to privacy.epsilon = {s.epsilon}; it gives {len(caps)} of them, from {min(caps):g} to {max(caps):g}"
        )
    return caps


def check_groups(method: Method, s: Setting) -> None:
    """Refuse a setting that lacks the caps which the method gives its clients.

    Raises:
        ConfigError: no target was given from which they follow, or the method's own `calibrate` left them out.
    """
    if method.client_epsilons(s) and not s.groups:
        raise ConfigError(
            f"{method.name} gives each client a cap of its own, and no noise was calibrated to them: set privacy.epsilon to the "
            f"largest of them, and let `calibrate` be that of MethodConfig"
        )
