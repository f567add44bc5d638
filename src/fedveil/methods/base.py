"""What every method is made of: the public setting, the protocol, and the parts that most methods share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, cast

from pydantic import BaseModel, ConfigDict

from fedveil.accounting.accountant import bound, calibrate
from fedveil.accounting.types import Claim, Event, Gaussian, SampledGaussian, Scope, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.release.cost import event_of
from fedveil.release.noise_mechanism import Participation
from fedveil.release.plan import DpSgd, Fixed, Plan, Policy, Raw, Released, Upload
from fedveil.tasks.classification import Classification
from fedveil.tasks.task import Task
from fedveil.training.local import LocalSpec, Objective, Plain
from fedveil.training.optimizer import OptimizerSpec
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor

Variant = Literal["published", "proven"]
Weighting = Literal["uniform", "examples"]
FinalModel = Literal["last", "tail", "ema"]

_PRICED = 10_000
"""Plans that are priced one by one before a run begins."""

ROUNDING = 1e-6
"""Relative slack between a calibrated noise and what a budget admits: noise levels are float32, budgets exact."""


@dataclass(frozen=True)
class BudgetGroup:
    """Clients with the same cap (server view): its epsilon, their numbers, and the noise multiplier calibrated to it."""

    epsilon: float
    clients: frozenset[int]
    noise_multiplier: float


@dataclass(frozen=True)
class Setting:
    """The public configuration of a run: everything a method may know before the data are touched.

    Args:
        clients: N. cohort: n, clients a round (expected number under Poisson sampling). rounds: T.
        sampling: `fixed`, n of N without replacement; `poisson`, each client joins with probability n / N.
        records: nominal examples per client, |D| / N. layout: of the flat model; its dimension is d.
        epsilon, delta: the target, or epsilon None. noise_multiplier: z, noise std / clip of what is released, once known.
        example_clip: per-example L2 clip when local training is DP-SGD (record level), else None.
        min_survivors: noisy uploads that the sum of a round is guaranteed to hold. colluders: of which c belong to the adversary.
        max_participations: rounds in which one client may take part, or None for all T.
        server: what the server does with the aggregated step; SGD at rate 1 takes it as it is.
        groups: of clients by cap, where the method gives them caps of their own; `epsilon` and `noise_multiplier` are then those
            of the largest cap.
        task: what is learned, with its public constants.
        final_model: which model is handed over (see `fedveil.federation.final_model`).
    """

    clients: int
    cohort: int
    rounds: int
    sampling: Literal["fixed", "poisson"]
    local: LocalSpec
    layout: Layout
    records: int
    classes: int
    scope: Scope
    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    example_clip: float | None = None
    min_survivors: int | None = None
    colluders: int = 0
    max_participations: int | None = None
    server: OptimizerSpec = field(default_factory=lambda: OptimizerSpec(lr=1.0))
    groups: tuple[BudgetGroup, ...] = ()
    task: Task = field(default_factory=Classification)
    final_model: FinalModel = "last"

    def of(self, client: int) -> Setting:
        """The setting of one client: with the target and the noise of its group."""
        return next((self.of_group(group) for group in self.groups if client in group.clients), self)

    def of_group(self, group: BudgetGroup) -> Setting:
        """The setting of the clients of a group, as if all had their cap."""
        return replace(self, epsilon=group.epsilon, noise_multiplier=group.noise_multiplier, groups=())

    @property
    def rate(self) -> float:
        """q = n / N, the chance that a given client takes part in a round."""
        return self.cohort / self.clients

    @property
    def participations(self) -> int:
        """The most rounds one client can be in."""
        return min(self.rounds, self.max_participations or self.rounds)

    @property
    def tail_rounds(self) -> int:
        """How many rounds at the end a tail average is taken over: a third of them."""
        return max(1, round(self.rounds / 3))

    @property
    def steps(self) -> int:
        """K, local steps a round of a client with the nominal number of examples."""
        return self.local.steps_for(self.records)

    @property
    def sharers(self) -> int:
        """Noisy uploads in a sum that the adversary did not make: survivors less colluders."""
        if self.min_survivors is None and self.sampling == "poisson":
            raise ConfigError(
                "noise added in shares by each client needs a guaranteed number of survivors under Poisson sampling: "
                "set privacy.min_survivors, or training.sampling = 'fixed'"
            )
        survivors = self.min_survivors if self.min_survivors is not None else self.cohort
        honest = survivors - self.colluders
        if honest < 1:
            raise ConfigError(f"privacy.min_survivors ({survivors}) must exceed privacy.colluders ({self.colluders})")
        return honest

    @property
    def can_share(self) -> bool:
        """Whether the number of noisy uploads in a sum is known."""
        return self.sampling == "fixed" or self.min_survivors is not None

    @property
    def amplified(self) -> bool:
        """Whether secret Poisson sampling of clients may be credited: a round that is skipped would show how many took part."""
        return self.sampling == "poisson" and self.max_participations is None and self.min_survivors is None

    @property
    def z(self) -> float:
        """The noise multiplier; an error while it is unknown."""
        if self.noise_multiplier is None:
            raise ConfigError("the noise is not set: give privacy.epsilon or privacy.noise_multiplier")
        return self.noise_multiplier

    def dp_sgd(self) -> DpSgd | None:
        """The DP-SGD plan of one round, the same for every client: rate and steps come from the nominal size."""
        if self.example_clip is None:
            return None
        records = max(self.records, 1)
        rate = min(1.0, self.local.batch_size / records)
        expected = rate * records
        cap = max(records, min(100 * records, 2**17))
        return DpSgd(self.example_clip, self.z, rate, self.steps, expected, cap)


class Method(Protocol):
    """A method: a frozen configuration and functions of the public setting. `MethodConfig` has defaults for all but `policy`."""

    @property
    def name(self) -> str:
        """The name in configurations, for instance `dp-fedavg`."""
        ...

    @property
    def coverage(self) -> bool:
        """Whether `aggregate` means a coordinate over the clients that sent it, not over all; tells the history its noise."""
        ...

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        """Named vectors that leave beside the update: shape by name, `()` for one number."""
        ...

    def participation(self, s: Setting) -> Participation | None:
        """Who may take part how often, where the noise depends on it; the sampler enforces it."""
        ...

    def client_epsilons(self, s: Setting) -> Sequence[float]:
        """The cap of each client, from client 0 on, the largest of them `privacy.epsilon` (server view); empty: all alike."""
        ...

    def calibrate(self, s: Setting) -> Setting:
        """The setting with its noise multiplier known (see `calibrated`)."""
        ...

    def policy(self, s: Setting) -> Policy:
        """The policy that plans each release."""
        ...

    def objective(self, s: Setting) -> Objective:
        """What local training does."""
        ...

    def aggregate(self, uploads: Sequence[Upload], model: Tensor) -> Tensor:
        """The step [d] of the global model from what was released this round (one mean, or n uploads)."""
        ...

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Everything that a run releases to an adversary with that view, as the accountant must count it."""
        ...

    def claim(self, s: Setting) -> Claim | None:
        """What the paper claims of this configuration; None when it claims nothing."""
        ...

    def clip_norm(self, s: Setting) -> float | None:
        """C, the bound on one update's L2 norm, or None when updates are not clipped."""
        ...

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """What the proven bound rests on beyond what every run rests on."""
        ...


class MethodConfig(BaseModel):
    """Parameters of a method: frozen, no unknown keys; and what most methods do, for each to override what is its own.

    The defaults are those of DP-FedAvg with a method's own `policy`: plain local training, uniform weights, the mean, and noise
    calibrated to the configured epsilon. `reconstructed`: what of it is rebuilt rather than read in a source, or empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")
    reconstructed: ClassVar[str] = ""
    name: str

    @property
    def coverage(self) -> bool:
        """Coordinates are averaged over all clients."""
        return False

    def extras(self, s: Setting) -> Mapping[str, tuple[int, ...]]:
        return {}

    def participation(self, s: Setting) -> Participation | None:
        return None

    def client_epsilons(self, s: Setting) -> Sequence[float]:
        """All clients have the cap of the run."""
        return ()

    def calibrate(self, s: Setting) -> Setting:
        """The noise multiplier that the configured epsilon needs."""
        return calibrated(cast("Method", self), s)

    def policy(self, s: Setting) -> Policy:
        """A method says here what leaves."""
        raise ConfigError(f"{type(self).__qualname__} is not a method yet: it lacks `policy`, which plans each release")

    def objective(self, s: Setting) -> Objective:
        return Plain()

    def aggregate(self, uploads: Sequence[Upload], model: Tensor) -> Tensor:
        return mean(uploads)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Read off the plan where it is always the same; else f / z a round, which the budget enforces plan by plan."""
        policy = self.policy(s)
        return planned_releases(policy.always, s, view) if isinstance(policy, Fixed) else gaussian_releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        return None

    def clip_norm(self, s: Setting) -> float | None:
        """The parameter `clip`, where there is one."""
        return getattr(self, "clip", None)

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Nothing beyond what every run rests on."""
        return ()


# --- shared parts ------------------------------------------------------------------------------------------------------


def weighting_of(method: Method) -> Weighting:
    """How clients weigh in the mean: by the method's `weighting`, as a parameter or a property, else all the same."""
    found: Weighting = getattr(method, "weighting", "uniform")
    return found


def mean(uploads: Sequence[Upload]) -> Tensor:
    """The weighted mean of what was released."""
    total = sum(u.weight for u in uploads)
    step = uploads[0].vector * (uploads[0].weight / total)
    for u in uploads[1:]:
        step.add_(u.vector, alpha=u.weight / total)
    return step


def sum_noise(s: Setting) -> bool:
    """Whether the noise of this run is added once to the sum of a round (secure aggregation or a trusted server)."""
    return s.scope.view is not View.SERVER


def gaussian_plan(s: Setting, clip: float) -> Plan:
    """Clip to C, noise z C: on each upload in the server view, else once on the sum; or DP-SGD inside the client."""
    if s.example_clip is not None:
        return Plan(dp_sgd=s.dp_sgd())
    return Plan(clip=clip, noise_std=s.z * clip, place="sum" if sum_noise(s) else "upload")


def planned_releases(plan: Plan, s: Setting, view: View) -> list[Event]:
    """The cost of a run in which every release is made under the same plan, by the prices that the door charges.

    Noise in shares counts with what the honest survivors of a round add.
    """
    if s.noise_multiplier == 0:
        return [Unbounded("no noise is added (noise_multiplier = 0)")]
    scope, rate = replace(s.scope, view=view), s.rate if s.amplified else None
    shares = s.sharers if _shared(plan, s, view) else 1
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

    Where clients plan for themselves, a coordinate of a sum carries only the noise of those that sent it, and later plans depend
    on single uploads. So other views of such a run inherit what is proven against the server; only plans that depend on the round
    alone, the same for all clients, are credited with the sum of the noise shares.
    A bound of the last model says nothing about an average of several.
    """
    own = s.scope.view
    if view is View.FINAL and not (getattr(method, "bounds_last_model", False) and s.final_model == "last"):
        return releases_to(method, s, View.AGGREGATE)
    sums = own is View.FINAL and view is View.AGGREGATE  # what leaves is the same in both
    if view is own or sums or s.example_clip is not None or getattr(method.policy(s), "common", False):
        return method.releases(s, view)
    if view is View.SERVER:
        return [Unbounded("the server receives uploads without noise of their own; only their sum is protected")]
    return method.releases(s, own)


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
    common = bool(getattr(policy, "common", False))
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
        shares = s.sharers if _shared(plan, s, view) else 1
        counted[event_of(plan, s.layout, scope, rate=rate, noisy_uploads=shares, round=t)] += 1
    gaussian = sorted((e.mu for e, n in counted.items() if isinstance(e, Gaussian) for _ in range(n)), reverse=True)
    others = [(e, n) for e, n in counted.items() if not isinstance(e, Gaussian)]
    repeated = [e if isinstance(e, Unbounded) else replace(e, count=e.count * n) for e, n in others]
    return [*repeated, Gaussian(math.hypot(*gaussian[: s.participations]))]


def _shared(plan: Plan, s: Setting, view: View) -> bool:
    """Whether that view sees a sum that carries the noise of several uploads."""
    return plan.place == "upload" and plan.dp_sgd is None and view is not View.SERVER and s.can_share


def central(s: Setting, multiplier: float) -> Event:
    """T noisy sums with noise std / sensitivity = `multiplier`, amplified by sampling only where it is Poisson."""
    if s.amplified:
        return SampledGaussian(s.rate, multiplier, s.rounds)
    return Gaussian(1 / multiplier, s.participations)


def calibrated(method: Method, s: Setting) -> Setting:
    """The setting with the smallest noise multiplier whose proven epsilon, in the run's view, is at most the target.

    Clients with caps of their own each get the noise multiplier of theirs.
    """
    if s.noise_multiplier is not None or s.epsilon is None:
        return s

    def noise(epsilon: float) -> float:
        def planned(z: float) -> list[Event]:
            return releases_to(method, replace(s, epsilon=epsilon, noise_multiplier=z), s.scope.view)

        return calibrate(epsilon, s.delta, planned, adjacency=s.scope.adjacency) * (1 + 2 * ROUNDING)

    caps = _client_caps(method, s)
    groups = [BudgetGroup(e, frozenset(c for c, cap in enumerate(caps) if cap == e), noise(e)) for e in sorted(set(caps))]
    return replace(s, noise_multiplier=noise(s.epsilon), groups=tuple(groups))


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
