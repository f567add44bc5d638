"""What a method says that it releases, held against its plans before anything leaves."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from fedveil.accounting.accountant import bound
from fedveil.accounting.types import Event, Gaussian, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.methods.calibration import check_groups
from fedveil.methods.method import Method, weighting_of
from fedveil.methods.run_cost import holds_shares, releases_to, sum_noise
from fedveil.methods.setting import Setting
from fedveil.release.cost import event_of
from fedveil.release.plan import Plan, Policy, Raw, Released, is_common

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


def check_declared(method: Method, s: Setting, model: Tensor) -> None:
    """Hold what a method says that it releases against its plans, before anything leaves.

    Plans that depend on the round alone are all priced, for the server and the aggregate view. Of a policy that adapts, the first
    plan is: the others are held against the budget when they are charged.

    Args:
        model: the initial global model [d].

    Raises:
        ConfigError: `releases` understates a view.
    """
    check_weights(method, s)
    check_groups(method, s)
    policy = method.policy(s)
    if not all(callable(getattr(policy, part, None)) for part in ("start", "plan", "observe")):
        raise ConfigError(f"{method.name}: `policy` returned {type(policy).__name__}; it needs start, plan and observe")
    common = is_common(policy)
    clients = {min(group.clients): s.of_group(group) for group in s.groups} or {Released.client: s}
    for view, (client, one) in product((View.SERVER, View.AGGREGATE) if common else (s.scope.view,), clients.items()):
        declared = releases_to(method, one, view)
        planned = _priced(policy, one, Released(0, model, None, client=client), view, one.rounds if common else 1)
        if any(isinstance(e, Unbounded) for e in declared):
            continue
        low, high = (bound(events, s.delta, adjacency=s.scope.adjacency)[0] for events in (declared, planned))
        if high > low * (1 + 1e-4):
            raise ConfigError(
                f"{method.name} says that its releases cost epsilon = {low:.4g} in the {view} view, and its plans cost "
                f"{high:.4g}: correct `releases`, or leave it to the default, which reads the plans"
            )


def _priced(policy: Policy, s: Setting, released: Released, view: View, rounds: int) -> list[Event]:
    """What the plans of the first rounds cost; of one client at most as many as it may take part in, the dearest."""
    scope, rate = replace(s.scope, view=view), s.rate if s.amplified else None
    counted: Counter[Event] = Counter()
    state = policy.start()
    for t in range(min(rounds, _PRICED)):
        plan = policy.plan(replace(released, round=t), state)
        if isinstance(plan, Raw):
            return [Unbounded(plan.reason)]
        if not isinstance(plan, Plan):
            raise ConfigError(f"the policy's `plan` returned {type(plan).__name__} for round {t}; allowed are Plan and Raw")
        plan = plan if s.evaluation is None else s.evaluation.beside(plan, s.layout)
        shares = s.sharers_to(View.AGGREGATE) if holds_shares(plan, s, view) else 1
        counted[event_of(plan, s.layout, scope, rate=rate, noisy_uploads=shares, round=t)] += 1
    gaussian = sorted((e.mu for e, n in counted.items() if isinstance(e, Gaussian) for _ in range(n)), reverse=True)
    others = [(e, n) for e, n in counted.items() if not isinstance(e, Gaussian)]
    repeated = [e if isinstance(e, Unbounded) else replace(e, count=e.count * n) for e, n in others]
    return [*repeated, Gaussian(math.hypot(*gaussian[: s.participations]))]
