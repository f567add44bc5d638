"""What a run releases and what it costs, from the plans of its method and by the prices that the door charges."""

from __future__ import annotations

import math
from dataclasses import replace

from fedveil.accounting.types import Event, Gaussian, Unbounded, View
from fedveil.mechanism.cost import event_of, plan_mu, promises
from fedveil.mechanism.plan import LocalDpSgd, Plan, Raw, reason_of
from fedveil.methods.method import Method, weighting_of
from fedveil.methods.parts import SumServer
from fedveil.methods.planner import is_common
from fedveil.methods.projected import last_model_mu
from fedveil.methods.setting import Setting


def sum_noise(s: Setting) -> bool:
    """Whether the noise of this run is added once to the sum of a round (secure aggregation or a trusted server)."""
    return s.scope.view is not View.SERVER


def gaussian_plan(s: Setting, clip: float) -> Plan:
    """Clip to C, noise z C: on each upload in the server view, else once on the sum; or DP-SGD inside the client."""
    if (step := s.dp_sgd()) is not None:
        return LocalDpSgd(step=step)
    return Plan(clip=clip, noise_std=s.z * clip, place="sum" if sum_noise(s) else "upload")


def planned_releases(plan: Plan, s: Setting, view: View) -> list[Event]:
    """The cost of a run in which every release is made under the same plan, by the prices that the door charges.

    Noise in shares counts with what the honest survivors of a round add, less the share that a fellow client drew itself.
    """
    if s.noise_multiplier == 0:
        return [Unbounded("no noise is added (noise_multiplier = 0)")]
    scope, rate = replace(s.scope, view=view), s.rate if s.amplified else None
    shares = s.sharers_to(View.AGGREGATE) if holds_shares(plan, s, view) else 1
    first, later = (event_of(plan, s.layout, scope, rate=rate, noisy_uploads=shares, round=t) for t in (0, 1))
    if isinstance(first, Unbounded):
        return [first]
    if first == later:
        return [replace(first, count=first.count * s.participations)]
    return [first]


def gaussian_releases(s: Setting, view: View) -> list[Event]:
    """The cost of a run in which each release is Gaussian with multiplier z, as `gaussian_plan` makes it.

    Noise in shares earns no amplification by sampling: the noise of a sum shows how many took part.
    """
    return planned_releases(gaussian_plan(s, 1.0), s, view)


def releases_to(method: Method, s: Setting, view: View) -> list[Event]:
    """Everything that a run releases to an adversary with that view: the method's word for the run's own view, the house's else.

    Who sees less than the server does gains by that only where `adds_up`; else what is proven against the server holds for all.
    """
    own = s.scope.view
    if view is View.FINAL:
        return _of_last_model(method, s, releases_to(method, s, View.AGGREGATE))
    sums = own is View.FINAL and view is View.AGGREGATE  # what leaves is the same in both
    if view is own or sums or s.example_clip is not None:
        return method.releases(s, view)
    if own is View.SERVER:
        return method.releases(s, view if adds_up(method, s) else own)
    if is_common(method, s):
        return method.releases(s, view)
    return [Unbounded("the server receives uploads without noise of their own; only their sum is protected")]


def _of_last_model(method: Method, s: Setting, rounds: list[Event]) -> list[Event]:
    """The releases of all rounds, or the bound on the last model alone where that is smaller."""
    if not all(isinstance(event, Gaussian) for event in rounds) or (last := last_model_mu(method, s)) is None:
        return rounds
    mu = math.sqrt(sum(e.count * e.mu**2 for e in rounds if isinstance(e, Gaussian)))
    return [Gaussian(last)] if last < mu else rounds


def adds_up(method: Method, s: Setting) -> bool:
    """Whether a round of single uploads shows no more, to all but the server, than their plain sum with the noise of all of them.

    The plans depend on the round alone, the same for all clients: else a coordinate carries only the noise of those that sent it,
    and later plans follow single uploads. All weigh the same: else the heaviest moves the mean by more than its share of the
    noise. The server is given nothing but the sum. And rounds are full: a cap on participations empties the later ones, unless
    `min_survivors` skips those.
    """
    if s.min_survivors is None and s.max_participations is not None and s.max_participations < s.rounds:
        return False
    return isinstance(method.server(s), SumServer) and weighting_of(method) == "uniform" and is_common(method, s)


def run_releases(method: Method, s: Setting, view: View) -> list[Event]:
    """`releases_to`, and the noisy score of a run that is chosen by it."""
    events = releases_to(method, s, view)
    return events if s.selection is None else s.selection.releases(events, s.scope.adjacency)


def noise_of(plan: Plan | Raw, s: Setting) -> float:
    """The noise multiplier of what the run's view sees of a release under this plan; 0 where nothing is proven of it."""
    if isinstance(plan, Raw) or reason_of(plan):
        return 0.0
    if isinstance(plan, LocalDpSgd):
        return plan.step.noise_multiplier
    mu = plan_mu(plan, s.layout, 1, s.sharers_to(View.AGGREGATE) if holds_shares(plan, s, s.scope.view) else 1)
    return 0.0 if isinstance(mu, str) else 1 / mu if mu else math.inf


def holds_shares(plan: Plan, s: Setting, view: View) -> bool:
    """Whether that view sees a sum that carries the noise of several uploads, none of which was cut off by a clamp."""
    noise_of_each = plan.place == "upload" and plan.clamp is None and promises(plan, s.layout)
    return noise_of_each and view is not View.SERVER and s.can_share
