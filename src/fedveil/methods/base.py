"""What every method is made of: the public setting, the protocol, and the parts that most methods share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from fedveil.accounting.accountant import calibrate
from fedveil.accounting.types import Claim, Event, Gaussian, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.release.plan import DpSgd, Plan, Policy, Upload
from fedveil.training.local import LocalSpec, Objective
from fedveil.training.optimizer import OptimizerSpec
from fedveil.training.params import Layout

if TYPE_CHECKING:
    from torch import Tensor

Variant = Literal["published", "proven"]
Weighting = Literal["uniform", "examples"]

ROUNDING = 1e-6
"""Relative slack between a calibrated noise and what a budget admits: noise levels are float32, budgets exact."""


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

    @property
    def rate(self) -> float:
        """q = n / N, the chance that a given client takes part in a round."""
        return self.cohort / self.clients

    @property
    def participations(self) -> int:
        """The most rounds one client can be in."""
        return min(self.rounds, self.max_participations or self.rounds)

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
    def z(self) -> float:
        """The noise multiplier; an error while it is unknown."""
        if self.noise_multiplier is None:
            raise ConfigError("the noise is not set: give privacy.epsilon or privacy.noise_multiplier")
        return self.noise_multiplier

    def dp_sgd(self) -> DpSgd | None:
        """The DP-SGD plan of one round, the same for every client: rate and steps come from the nominal size."""
        if self.example_clip is None:
            return None
        rate = min(1.0, self.local.batch_size / max(self.records, 1))
        return DpSgd(self.example_clip, self.z, rate, self.steps)


class MethodConfig(BaseModel):
    """Parameters of a method: frozen, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    name: str

    @property
    def coverage(self) -> bool:
        """A coordinate is meaned over all clients."""
        return False


class Method(Protocol):
    """A method: a frozen configuration and six functions of the public setting."""

    @property
    def name(self) -> str:
        """The name in configurations, for instance `dp-fedavg`."""
        ...

    @property
    def weighting(self) -> Weighting:
        """How clients weigh in the mean: all the same, or by their number of examples."""
        ...

    @property
    def coverage(self) -> bool:
        """Whether `aggregate` means a coordinate over the clients that sent it, not over all; tells the history its noise."""
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


# --- shared parts ------------------------------------------------------------------------------------------------------


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


def gaussian_releases(s: Setting, view: View) -> list[Event]:
    """The cost of a run in which each release is Gaussian with multiplier z, as `gaussian_plan` makes it.

    Noise in shares earns no amplification by sampling: the noise of a sum shows how many took part.
    """
    factor = s.scope.update_factor
    step = s.dp_sgd()
    if step is not None:
        if s.scope.unit is not Unit.RECORD:
            return [Unbounded("DP-SGD inside a client protects records, not the client: set privacy.unit = 'record'")]
        multiplier = step.noise_multiplier / s.scope.adjacency.factor
        return [SampledGaussian(step.rate, multiplier, step.steps * s.participations) if multiplier else _no_noise()]
    if s.z == 0:
        return [_no_noise()]
    if view is View.SERVER:
        if sum_noise(s):
            return [Unbounded("the server receives uploads without noise of their own; only their sum is protected")]
        return [Gaussian(factor / s.z, s.participations)]
    if sum_noise(s):
        return [central(s, s.z / factor)]
    shares = s.sharers if _can_share(s) else 1
    return [Gaussian(factor / (s.z * math.sqrt(shares)), s.participations)]


def central(s: Setting, multiplier: float) -> Event:
    """T noisy sums with noise std / sensitivity = `multiplier`, amplified by sampling only where it is Poisson."""
    if s.sampling == "poisson" and s.max_participations is None:
        return SampledGaussian(s.rate, multiplier, s.rounds)
    return Gaussian(1 / multiplier, s.participations)


def calibrated(method: Method, s: Setting) -> Setting:
    """The setting with the smallest noise multiplier whose proven epsilon, in the run's view, is at most the target."""
    if s.noise_multiplier is not None or s.epsilon is None:
        return s

    def planned(z: float) -> list[Event]:
        return method.releases(replace(s, noise_multiplier=z), s.scope.view)

    z = calibrate(s.epsilon, s.delta, planned, adjacency=s.scope.adjacency)
    return replace(s, noise_multiplier=z * (1 + 2 * ROUNDING))


def _can_share(s: Setting) -> bool:
    return s.sampling == "fixed" or s.min_survivors is not None


def _no_noise() -> Unbounded:
    return Unbounded("no noise is added (noise_multiplier = 0)")
