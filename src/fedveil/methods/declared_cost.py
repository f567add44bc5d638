"""What a method says that it releases, held against its plans before anything leaves."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Event, Gaussian, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import event_of
from fedveil.mechanism.plan import Plan, Raw, Released
from fedveil.methods.calibration import check_groups
from fedveil.methods.method import Method, weighting_of
from fedveil.methods.parts import Schedule
from fedveil.methods.planner import Planner
from fedveil.methods.run_cost import holds_shares, releases_to, sum_noise
from fedveil.methods.setting import Setting

if TYPE_CHECKING:
    from torch import Tensor

_PRICED = 10_000
"""Plans that are priced one by one before a run begins."""


def check_weights(method: Method, s: Setting) -> None:
    """Refuse a sum that promises anything and is divided by a weight that shows who took part.

    Raises:
        ConfigError: clients drawn independently weigh by their number of examples.
    """
    if weighting_of(method) != "examples" or s.sampling != "poisson" or not sum_noise(s):
        return
    if not any(isinstance(event, Unbounded) for event in releases_to(method, s, s.scope.view)):
        raise ConfigError(
            f"{method.name}: clients drawn by Poisson sampling weigh by their number of examples, so the denominator of the mean "
            f"tells who took part and can be read off the model: set method.weighting = 'uniform' or training.sampling = 'fixed'"
        )


def check_declared(method: Method, s: Setting, model: Tensor) -> Planner:
    """Return what makes the run's plans, once what the method says that it releases was held against them.

    The plans of a schedule are all made, hashed and priced, for the server and the aggregate view where all clients have them. Of
    a policy the first plan is: the others are held against the budget when they are charged.

    Args:
        model: the initial global model [d].

    Raises:
        ConfigError: `releases` understates a view, or the release is of no known type.
    """
    check_weights(method, s)
    check_groups(method, s)
    release = method.release(s)
    planner = Planner.of(release, s)
    views = (View.SERVER, View.AGGREGATE) if planner.common else (s.scope.view,)
    for client, one in ({min(group.clients): s.of_group(group) for group in s.groups} or {Released.client: s}).items():
        first = Released(0, model, None, client=client)
        rounds = range(min(one.rounds, _PRICED)) if isinstance(release, Schedule) else range(1)
        plans = [release.plan(one, t) if isinstance(release, Schedule) else planner.plan(first, planner.start()) for t in rounds]
        for view in views:
            _hold(method.name, releases_to(method, one, view), _priced(plans, one, view), one, view)
    return planner


def _hold(name: str, declared: list[Event], planned: list[Event], s: Setting, view: View) -> None:
    """Refuse releases that cost less than the plans do."""
    if any(isinstance(event, Unbounded) for event in declared):
        return
    low, high = (bound(events, s.delta, adjacency=s.scope.adjacency)[0] for events in (declared, planned))
    if high > low * (1 + 1e-4):
        raise ConfigError(
            f"{name} says that its releases cost epsilon = {low:.4g} in the {view} view, and its plans cost {high:.4g}: correct "
            f"`releases`, or leave it to the default, which reads the plans"
        )


def _priced(plans: Sequence[Plan | Raw], s: Setting, view: View) -> list[Event]:
    """What the plans of the first rounds cost; of one client at most as many as it may take part in, the dearest."""
    scope, rate = replace(s.scope, view=view), s.rate if s.amplified else None
    counted: Counter[Event] = Counter()
    for t, plan in enumerate(plans):
        if isinstance(plan, Raw):
            return [Unbounded(plan.reason)]
        plan = plan if s.evaluation is None else s.evaluation.beside(plan, s.layout)
        shares = s.sharers_to(View.AGGREGATE) if holds_shares(plan, s, view) else 1
        counted[event_of(plan, s.layout, scope, rate=rate, noisy_uploads=shares, round=t)] += 1
    gaussian = sorted((e.mu for e, n in counted.items() if isinstance(e, Gaussian) for _ in range(n)), reverse=True)
    others = [(e, n) for e, n in counted.items() if not isinstance(e, Gaussian)]
    repeated = [e if isinstance(e, Unbounded) else replace(e, count=e.count * n) for e, n in others]
    return [*repeated, Gaussian(math.hypot(*gaussian[: s.participations]))]
