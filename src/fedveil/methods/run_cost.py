"""The cost of a run: its plans, their price, the noise for a target, and the declared releases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from fedveil.accounting import accountant
from fedveil.accounting.accountant import AccountantName, bound, calibrate
from fedveil.accounting.finite_precision import sampler_delta, total_variation
from fedveil.accounting.selection import needed_noise_multiplier
from fedveil.accounting.types import Adjacency, Event, Gaussian, Unbounded, Unit, View, small
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import event_of, plan_mu, promises
from fedveil.mechanism.plan import LocalDpSgd, Plan, Raw, Released, Upload, digest, in_shares, reason_of
from fedveil.methods.method import Method, Policy, Schedule, SumServer, Unproven, extras_of, weighting_of
from fedveil.methods.projected import last_model_mu
from fedveil.methods.setting import BudgetGroup, NoiseCohort, Setting
from fedveil.training.local import HasMetrics, State

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.accounting.selection import Selection


@dataclass(frozen=True)
class Planner:
    """Source of a run's plans, for one client (server view) or for all clients (client -1).

    Args:
        part: the release part. hashes: the hash of each round's plan of a schedule, for each cap of clients.
    """

    part: Schedule | Policy | Unproven
    setting: Setting
    hashes: tuple[tuple[bytes, ...], ...] = ()
    _last: dict[int, tuple[int, Plan]] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, part: Schedule | Policy | Unproven, s: Setting) -> Planner:
        """Return the planner of a release part; all plans of a schedule are made and hashed.

        Raises:
            ConfigError: the part, or a plan, is of the wrong type.
        """
        if isinstance(part, Policy | Unproven):
            return cls(part, s)
        if not isinstance(part, Schedule):
            raise ConfigError(
                f"a method's `release` returned {type(part).__name__}; allowed are Schedule, Policy and Unproven "
                f"(fedveil.methods.base)"
            )
        return cls(part, s, tuple(tuple(_hashes(part, one)) for one in [s.of_group(group) for group in s.groups] or [s]))

    @property
    def common(self) -> bool:
        """Return whether all clients have the same plan, known beforehand."""
        return isinstance(self.part, Schedule) and not self.setting.groups

    def start(self) -> State:
        """Return the state before the first release."""
        return self.part.start(self.setting) if isinstance(self.part, Policy) else {}

    def plan(self, released: Released, state: State) -> Plan | Raw:
        """Return the plan of the next release.

        Raises:
            ConfigError: it is not a plan, or differs from the plan made before the first round.
        """
        s = self.setting.of(released.client)
        if isinstance(self.part, Unproven):
            return Raw(self.part.reads, partial(self.part.make, s, released), self.part.reason)
        if isinstance(self.part, Policy):
            return checked(self.part.plan(s, released, state), released.round)
        return self._scheduled(s, released.client, released.round)

    def observe(self, state: State, upload: Upload) -> State:
        """Return the state after a release."""
        return self.part.observe(self.setting.of(upload.client), state, upload) if isinstance(self.part, Policy) else state

    def observe_all(self, state: State, uploads: Sequence[Upload]) -> State:
        """Return the server's state after all uploads of a round."""
        return self.part.observe_all(self.setting, state, uploads) if isinstance(self.part, Policy) else state

    def measured(self, states: Sequence[State]) -> list[Mapping[str, float | list[float]]]:
        """Return the figures of each state, if the part has any (see `HasMetrics`)."""
        return [self.part.measures(state) if state else {} for state in states] if isinstance(self.part, HasMetrics) else []

    def _scheduled(self, s: Setting, client: int, t: int) -> Plan:
        """Return the plan of that round, cached for the other clients of the same cap."""
        cap = next((i for i, group in enumerate(self.setting.groups) if client in group.clients), 0)
        round_made, plan = self._last.get(cap, (-1, None))
        if round_made != t or plan is None:
            assert isinstance(self.part, Schedule)
            plan = checked(self.part.plan(s, t), t)
            expected = self.hashes[cap][t : t + 1]  # empty for a round after the last, which only an audit requests
            if expected and digest(plan) != expected[0]:
                raise ConfigError(
                    f"the plan of round {t} differs from the one that the schedule made before the first round: let "
                    "`plan` be a pure function of the setting and the round"
                )
            self._last[cap] = t, plan
        return plan


def is_common(method: Method, s: Setting) -> bool:
    """Return whether all clients have the same plan in a round, known before the first round."""
    return isinstance(method.release(s), Schedule) and not s.groups


def checked(plan: Any, t: int) -> Plan:
    """Return `plan` if it is a Plan.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(plan, Plan):
        raise ConfigError(f"a release's `plan` returned {type(plan).__name__} for round {t}; it must return a Plan")
    return plan


def _hashes(schedule: Schedule, s: Setting) -> list[bytes]:
    hashes: list[bytes] = []
    before = None
    for t in range(s.rounds):
        plan = checked(schedule.plan(s, t), t)
        hashes.append(hashes[-1] if plan is before else digest(plan))
        before = plan
    return hashes


def executed(plan: Plan, s: Setting) -> Plan:
    """Return the plan that clients execute if all of a round's clients answer: with shares of the noise, if it is in shares."""
    return in_shares(plan, s.unknown_noises_in(View.AGGREGATE)) if s.noise_place == "shares" else plan


def sum_noise(s: Setting) -> bool:
    """Return whether the noise is added once to the sum of a round (secure aggregation or a trusted server)."""
    return s.scope.view is not View.SERVER


def gaussian_plan(s: Setting, clip: float) -> Plan:
    """Return the plan with clip C and noise z C, on each upload (server view) or once on the sum; or DP-SGD in the client."""
    if (step := s.dp_sgd()) is not None:
        return LocalDpSgd(step=step)
    return Plan(clip=clip, noise_std=s.z * clip, place="sum" if sum_noise(s) else "upload")


def planned_releases(plan: Plan, s: Setting, view: View) -> list[Event]:
    """Return the cost of a run whose releases all have the same plan, by the prices that the door charges.

    Noise in shares is that of the honest survivors of a round, excluding the share that a fellow client drew itself.
    """
    if s.noise_multiplier == 0:
        return [Unbounded("no noise is added (noise_multiplier = 0)")]
    plan = executed(plan, s)
    scope, rate = replace(s.scope, view=view), s.rate if s.amplified else None
    shares = s.unknown_noises_in(View.AGGREGATE) if _holds_shares(plan, s, view) else 1
    first, later = (event_of(plan, s.layout, scope, rate=rate, noisy_uploads=shares, round=t) for t in (0, 1))
    if isinstance(first, Unbounded):
        return [first]
    if first == later:
        return [replace(first, count=first.count * s.participations)]
    return [first]


def gaussian_releases(s: Setting, view: View) -> list[Event]:
    """Return the cost of a run in which each release is Gaussian with multiplier z, as in `gaussian_plan`.

    Noise in shares is not amplified by sampling: the noise of a sum reveals how many took part.
    """
    return planned_releases(gaussian_plan(s, 1.0), s, view)


def events_in_view(method: Method, s: Setting, view: View) -> list[Event]:
    """Return the privacy events seen under `view`: the method's `releases` for the run's view, derived bounds for other views.

    An adversary weaker than the server gets a smaller bound only if `is_sum_equivalent`; otherwise the bound against the server
    holds.
    """
    view_of_run = s.scope.view
    if view is View.FINAL:
        return _of_last_model(method, s, events_in_view(method, s, View.AGGREGATE))
    sums = view_of_run is View.FINAL and view is View.AGGREGATE  # the releases are the same in both
    if view is view_of_run or sums or s.example_clip is not None:
        return method.releases(s, view)
    if view_of_run is View.SERVER:
        return method.releases(s, view if is_sum_equivalent(method, s) else view_of_run)
    if is_common(method, s) or s.noise_place == "shares":
        return method.releases(s, view)
    return [Unbounded("the server receives uploads without noise of their own; only their sum is protected")]


def _of_last_model(method: Method, s: Setting, rounds: list[Event]) -> list[Event]:
    """Return the releases of all rounds, or the bound on the last model alone if that is smaller."""
    if not all(isinstance(event, Gaussian) for event in rounds) or (last := last_model_mu(method, s)) is None:
        return rounds
    mu = math.sqrt(sum(e.count * e.mu**2 for e in rounds if isinstance(e, Gaussian)))
    return [Gaussian(last)] if last < mu else rounds


def is_sum_equivalent(method: Method, s: Setting) -> bool:
    """Return whether a round of single uploads reveals, except to the server, only their sum with the noise of all uploads.

    There are four conditions. The plans depend on the round alone and are the same for all clients: otherwise a coordinate has
    only the noise of the clients that sent it, and later plans depend on single uploads. All weights are equal: otherwise the
    heaviest upload moves the mean by more than its share of the noise. The server part receives only the sum. Rounds are full: a
    cap on participations empties later rounds, unless `min_survivors` skips them.
    """
    if s.min_survivors is None and s.max_participations is not None and s.max_participations < s.rounds:
        return False
    return isinstance(method.server(s), SumServer) and weighting_of(method) == "uniform" and is_common(method, s)


def run_releases(method: Method, s: Setting, view: View) -> list[Event]:
    """Return `events_in_view`, and the noisy score of a run in a search."""
    events = events_in_view(method, s, view)
    return events if s.selection is None else s.selection.releases(events, s.scope.adjacency)


def noise_of(plan: Plan | Raw, s: Setting) -> float:
    """Return the noise multiplier of a release under this plan, as seen in the run's view; 0 if nothing is proven."""
    if isinstance(plan, Raw) or reason_of(plan):
        return 0.0
    if isinstance(plan, LocalDpSgd):
        return plan.step.noise_multiplier
    mu = plan_mu(plan, s.layout, 1, s.unknown_noises_in(View.AGGREGATE) if _holds_shares(plan, s, s.scope.view) else 1)
    return 0.0 if isinstance(mu, str) else 1 / mu if mu else math.inf


def _holds_shares(plan: Plan, s: Setting, view: View) -> bool:
    """Return whether this view sees a sum with the noise of several uploads, unchanged by a clamp."""
    noise_of_each = plan.place == "upload" and plan.clamp is None and promises(plan, s.layout)
    return noise_of_each and view is not View.SERVER and s.can_share


def run_variation(method: Method, s: Setting) -> float:
    """Return a bound on the total variation between all draws of a run and their ideal law: client noise and Poisson samples.

    For a search it covers all runs and their scores, by the expected number of runs.
    """
    clients = s.cohort if s.sampling == "fixed" else s.clients
    draws = clients * (s.rounds + s.spares) * (1 if s.example_clip is None else s.steps)
    extras = sum(math.prod(shape) for shape in extras_of(method, s).values())
    one = draws * total_variation(s.layout.dimension + extras)
    if s.sampling == "poisson":  # a word for each client
        one += s.rounds * total_variation(s.clients)
    if s.example_clip is not None:  # a word for each example that can join
        one += draws * total_variation(s.example_cap)
        one += 0 if s.evaluation is None else draws * total_variation(s.evaluation.examples)
    if s.selection is not None:
        one = s.selection.runs * (one + total_variation(1))
    return min(1.0, one)


def charged_bound(
    events: Sequence[Event], delta: float, variation: float, adjacency: Adjacency, selection: Selection | None = None
) -> tuple[float, str]:
    """Return epsilon at `delta` and its accountant: for ideal noise at delta minus the sampler's addition.

    If the sampler adds 1 % of delta or more, ideal noise is assumed, which is then listed among the assumptions.

    Args:
        variation: of all noise from its ideal law. selection: how the run with these releases was chosen.
    """

    def bound(delta: float) -> tuple[float, str]:
        if selection is not None:
            return selection.bound(events, delta, adjacency)
        return accountant.bound(events, delta, adjacency=adjacency)

    epsilon, name = bound(delta)
    reduced = charged_delta(epsilon, delta, variation)
    if reduced == delta:
        return epsilon, name
    larger, larger_name = bound(reduced)
    added = sampler_adds(variation, larger, delta)
    return (larger, larger_name) if added is not None and added <= delta - reduced else (epsilon, name)


def charged_delta(epsilon: float, delta: float, variation: float) -> float:
    """Return delta minus twice the sampler's addition at `epsilon`; delta itself if ideal noise is assumed."""
    return delta * (1 - 2 * (sampler_adds(variation, epsilon, delta) or 0.0) / delta)


def sampler_line(variation: float, epsilon: float, delta: float) -> str:
    """Return the line of a statement about the sampler; an empty string if ideal noise is assumed."""
    added = sampler_adds(variation, epsilon, delta)
    if added is None:
        return ""
    return (
        f"the noise sampler is within total variation {variation:.2g} of ideal Gaussian noise over the whole run; that adds "
        f"{added:.2g} to delta, which delta = {small(delta)} includes"
    )


def sampler_adds(variation: float, epsilon: float, delta: float) -> float | None:
    """Return what the sampler adds to delta, None if it is 1 % or more of delta, 0 for an infinite epsilon."""
    if math.isinf(epsilon):
        return 0.0
    try:
        return sampler_delta(variation, 1, 1, epsilon, delta)
    except ConfigError:
        return None


ROUNDING = 1e-6
"""Relative slack of a calibrated noise against its budget: noise levels are float32, budgets are exact."""


def calibrated(method: Method, s: Setting, accountant: AccountantName = "auto") -> Setting:
    """Return the setting with the smallest noise multiplier whose proven epsilon, in the run's view, is at most the target.

    Clients with individual caps get the noise multiplier of their cap.
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
    """Return advice for DP-SGD at client level, else an empty string."""
    if s.example_clip is None or s.scope.unit is not Unit.CLIENT:
        return ""
    return (
        ": set privacy.unit = 'record'; or, to protect clients, training.local = 'sgd' with a method that clips and noises their "
        "updates, such as method.name = 'dp-fedavg'"
    )


def _extrapolated(method: Method, s: Setting, larger: NoiseCohort, accountant: AccountantName) -> Setting:
    """Return the setting whose noise on the mean equals that of the larger federation."""
    size = replace(s, clients=larger.clients, cohort=larger.clients_per_round, epsilon=larger.epsilon, noise_cohort=None)
    return replace(s, noise_multiplier=calibrated(method, size, accountant).z * s.cohort / larger.clients_per_round)


def _client_caps(method: Method, s: Setting) -> Sequence[float]:
    """Return the checked caps of all clients, or ()."""
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
    """Refuse a setting without the caps that the method gives its clients.

    Raises:
        ConfigError: the target is missing, or the method's `calibrate` omits the caps.
    """
    if method.client_epsilons(s) and not s.groups:
        raise ConfigError(
            f"{method.name} gives each client a cap of its own, and no noise was calibrated to them: set privacy.epsilon to the "
            f"largest of them, and let `calibrate` be that of MethodConfig"
        )


_PRICED = 10_000
"""Maximal number of plans that are priced one by one before a run begins."""


def check_weights(method: Method, s: Setting) -> None:
    """Refuse a sum with a guarantee whose denominator reveals who took part.

    Raises:
        ConfigError: clients drawn by Poisson sampling are weighted by their number of examples.
    """
    if weighting_of(method) != "examples" or s.sampling != "poisson" or not sum_noise(s):
        return
    if not any(isinstance(event, Unbounded) for event in events_in_view(method, s, s.scope.view)):
        raise ConfigError(
            f"{method.name}: clients drawn by Poisson sampling weigh by their number of examples, so the denominator of the mean "
            f"tells who took part and can be read off the model: set method.weighting = 'uniform' or training.sampling = 'fixed'"
        )


def check_declared(method: Method, s: Setting, model: Tensor) -> Planner:
    """Return the planner of a run after checking the method's declared releases against its plans.

    All plans of a schedule are made, hashed and priced, for both the server and the aggregate view if all clients share them. For
    a policy only the first plan is priced; later plans are checked against the budget when they are charged.

    Args:
        model: the initial global model [d].

    Raises:
        ConfigError: `releases` understates the cost in a view, or the release part is of an unknown type.
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
            _check_declared_cost(method.name, events_in_view(method, one, view), _priced(plans, one, view), one, view)
    return planner


def _check_declared_cost(name: str, declared: list[Event], planned: list[Event], s: Setting, view: View) -> None:
    """Refuse declared releases that cost less than the plans."""
    if any(isinstance(event, Unbounded) for event in declared):
        return
    low, high = (bound(events, s.delta, adjacency=s.scope.adjacency)[0] for events in (declared, planned))
    if high > low * (1 + 1e-4):
        raise ConfigError(
            f"{name} says that its releases cost epsilon = {low:.4g} in the {view} view, and its plans cost {high:.4g}: correct "
            f"`releases`, or leave it to the default, which reads the plans"
        )


def _priced(plans: Sequence[Plan | Raw], s: Setting, view: View) -> list[Event]:
    """Return the cost of the first rounds' plans; for one client, of the most expensive ones that it may take part in."""
    scope, rate = replace(s.scope, view=view), s.rate if s.amplified else None
    counted: Counter[Event] = Counter()
    for t, plan in enumerate(plans):
        if isinstance(plan, Raw):
            return [Unbounded(plan.reason)]
        plan = executed(plan if s.evaluation is None else s.evaluation.added_to(plan, s.layout), s)
        shares = s.unknown_noises_in(View.AGGREGATE) if _holds_shares(plan, s, view) else 1
        counted[event_of(plan, s.layout, scope, rate=rate, noisy_uploads=shares, round=t)] += 1
    gaussian = sorted((e.mu for e, n in counted.items() if isinstance(e, Gaussian) for _ in range(n)), reverse=True)
    others = [(e, n) for e, n in counted.items() if not isinstance(e, Gaussian)]
    repeated = [e if isinstance(e, Unbounded) else replace(e, count=e.count * n) for e, n in others]
    return [*repeated, Gaussian(math.hypot(*gaussian[: s.participations]))]
