"""Baselines of LaDP-FL whose noise changes from round to round by a fixed plan: Time-Varying DP and DPA-LDP.

Time-Varying DP, published: classical Gaussian noise; the sensitivity counts epochs and the epsilons are summed, so nothing is
proven. Proven: clipped updates, and the same decay of the noise at an exact cost; public losses may make it steeper.

DPA-LDP: training contracts, so early errors shrink and early rounds may be noisier. Published: classical noise by the formulas.
Proven: clipped updates, and the same allocation at an exact cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Claim, Event, SampledGaussian, View
from fedveil.errors import ConfigError
from fedveil.mechanism.cost import event_of
from fedveil.mechanism.plan import Plan, Released, UnprovenPlan, Upload
from fedveil.methods.base import (
    Mean,
    Method,
    Policy,
    Release,
    Scheduled,
    Setting,
    Summed,
    SumServer,
    calibrated,
    gaussian_plan,
    gaussian_releases,
    reads_public_split,
    sum_noise,
)
from fedveil.methods.shared import TwoVariants, paper_epsilon, refuse_dp_sgd
from fedveil.papers.ladp_fl.baselines import classical_scope, full_dp_std, sequential_claim, training_reach
from fedveil.papers.ladp_fl.claim import allocated_std, falling_first_std, geometric_sum
from fedveil.training.local import State

if TYPE_CHECKING:
    from torch import Tensor


def priced(s: Setting, shape: Sequence[float]) -> list[float]:
    """Return noise multipliers z_t proportional to `shape`; the most expensive rounds of a client cost as much as with z.

    The sum of the P largest 1 / z_t^2 is P / z^2, with P the most rounds of one client.
    """
    dearest = sorted(shape)[: s.participations]
    scale = (sum(x**-2 for x in dearest) / len(dearest)) ** 0.5
    return [s.z * scale * x for x in shape]


def scheduled(s: Setting, clip: float, shape: Sequence[float]) -> Scheduled:
    """Updates clipped to C with noise z_t C, at the cost of noise z C in each round; or DP-SGD in the clients with z_t."""
    return Scheduled(tuple(gaussian_plan(replace(s, noise_multiplier=z), clip) for z in priced(s, shape)))


def scheduled_releases(plans: Callable[[Setting], Scheduled], s: Setting, view: View) -> list[Event]:
    """Return the cost of f / z per round in total; or one event per round if batches or cohorts are sampled.

    Under DP-SGD these are the most expensive rounds of one client.

    Args:
        plans: function that makes the plans of all rounds, called only if they are needed.
    """
    scope = replace(s.scope, view=view)
    if s.example_clip is not None and s.z > 0:
        events = [event_of(plan, s.layout, scope, rate=None, round=t) for t, plan in enumerate(plans(s).plans)]
        steps = [event for event in events if isinstance(event, SampledGaussian)]
        return [*sorted(steps, key=lambda event: event.noise_multiplier)[: s.participations]] or events[:1]
    if not s.amplified or view is View.SERVER or s.z == 0:
        return gaussian_releases(s, view)
    return [event_of(plan, s.layout, scope, rate=s.rate, round=t) for t, plan in enumerate(plans(s).plans)]


def calibrated_schedule(method: Method, s: Setting) -> Setting:
    """Calibrate noise to the configured epsilon; if sampling amplifies, by Renyi accounting, as unequal rounds are budgeted."""
    unequal = s.example_clip is not None or (s.amplified and s.scope.view is not View.SERVER)
    return calibrated(method, s, accountant="rdp" if unequal else "auto")


_NO_PUBLIC_LOSS = "method.refine_every needs the loss on public data: set data.public_fraction, or refine_every = 0"


class TimeVaryingDP(TwoVariants):
    """Noise that falls geometrically over the rounds.

    Args:
        variant: published or proven.
        source: published; `budget`: epsilon is for the whole run, by `accounting`. `ladp-fl`: epsilon is for the first round,
            whose noise is LaDP-FL's Full DP, and later rounds cost more.
        accounting: published, `budget`; the sum of epsilons (naive), or zero-concentrated DP.
        decay: v; the noise of a round is v times that of the previous round.
        clip: proven; C, L2 bound on the update.
        refine_every: proven; R: after each R rounds in which the public loss has not decreased, v is multiplied by `refinement`
            and the remaining budget is planned again; 0 for never. Needs a public split, and fixed cohorts in the aggregate
            view.
        refinement: kappa, the factor of that step.
    """

    name: Literal["time-varying-dp"] = "time-varying-dp"
    proven_difference: ClassVar[str] = (
        "updates are clipped as a whole, and the decaying noise is scaled to the exact cost of all rounds"
    )
    reconstructed: ClassVar[str] = (
        "all equations; that the noise is a geometric series tied to T and epsilon, delta, and refined online, is the abstract's"
    )
    reason: ClassVar[str] = (
        "its sensitivity counts epochs where steps move the weights, and updates are not clipped (Time-Varying DP)"
    )
    source: Literal["budget", "ladp-fl"] = "budget"
    accounting: Literal["naive", "zcdp"] = "naive"
    decay: float = Field(0.998, gt=0, le=1)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    refine_every: int = Field(0, ge=0)
    refinement: float = Field(0.9, gt=0, lt=1)

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: noise from the formula."""
        if self.variant == "published":
            return super().calibrate(s)
        refuse_dp_sgd(s, self.name)
        if self.refine_every and (not sum_noise(s) or s.sampling != "fixed" or s.participations < s.rounds):
            raise ConfigError(
                "method.refine_every plans what is left of one common budget: set privacy.view = 'aggregate' and "
                "training.sampling = 'fixed', and leave training.max_participations out"
            )
        if self.refine_every and not s.public_split:
            raise ConfigError(_NO_PUBLIC_LOSS)
        return calibrated_schedule(self, s)

    def check_published(self, s: Setting) -> None:
        self.first_std(s)

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return the assumption about the data that the refinement reads."""
        refined = self.variant == "proven" and self.refine_every
        return reads_public_split(s) if refined else ()

    def release(self, s: Setting) -> Release:
        """Plan the noise of each round."""
        if self.variant == "published":
            first = self.first_std(s)
            return Scheduled(tuple(UnprovenPlan(noise_std=first * self.decay**t, reason=self.unproven) for t in range(s.rounds)))
        return Refined(self) if self.refine_every else self._schedule(s)

    def _schedule(self, s: Setting) -> Scheduled:
        return scheduled(s, self.clip, [self.decay**t for t in range(s.rounds)])

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return the cost of constant noise z; nothing for the published variant."""
        if self.variant == "published":
            return super().releases(s, view)
        return gaussian_releases(s, view) if self.refine_every else scheduled_releases(self._schedule, s, view)

    def claim(self, s: Setting) -> Claim | None:
        """Claim epsilon for the whole run, or LaDP-FL's sum of the rounds' epsilons."""
        if self.variant == "proven":
            return None
        epsilon = paper_epsilon(s, self.name)
        if self.source == "budget":
            return Claim(epsilon, s.delta, classical_scope(), "Time-Varying DP (reconstructed)", f"{self.accounting} composition")
        return sequential_claim(s, epsilon * geometric_sum(1 / self.decay, s.rounds), "LaDP-FL, Theorem 1")

    def first_std(self, s: Setting) -> float:
        """Published: sigma_1."""
        if self.source == "ladp-fl":
            return full_dp_std(s, self.name)
        reach = training_reach(s, self.name)
        return falling_first_std(paper_epsilon(s, self.name), s.delta, reach, self.decay, s.rounds, self.accounting)


@dataclass(frozen=True)
class Refined(Policy):
    """Proven policy that lowers v when the public loss stops decreasing.

    Its state: v; the round of its last change; the remaining budget at that time, in rounds of z; the last public loss.
    The spent and the planned budget are always T rounds of z together.
    """

    method: TimeVaryingDP

    def start(self, s: Setting) -> State:
        return {"decay": self.method.decay, "since": 0, "left": float(s.rounds), "loss": float("inf")}

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Plan z_t = z w v^k in the k-th round since v changed; w is such that the remaining rounds cost the remaining budget."""
        behind = released.round - state["since"]
        weight = (geometric_sum(state["decay"] ** -2, s.rounds - state["since"]) / state["left"]) ** 0.5
        clip = self.method.clip
        return Plan(clip=clip, noise_std=s.z * weight * state["decay"] ** behind * clip, place=gaussian_plan(s, clip).place)

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Every R rounds, lower v unless the public loss has decreased."""
        done = upload.round + 1
        if done % self.method.refine_every or done >= s.rounds:
            return state
        if upload.public_loss is None:
            raise ConfigError(_NO_PUBLIC_LOSS)
        fallen, inverse = upload.public_loss < state["loss"], state["decay"] ** -2
        if fallen:
            return {**state, "loss": upload.public_loss}
        whole = geometric_sum(inverse, s.rounds - state["since"])
        rest = state["left"] * (1 - geometric_sum(inverse, done - state["since"]) / whole)
        return {"decay": state["decay"] * self.method.refinement, "since": done, "left": rest, "loss": upload.public_loss}


class DPALDP(TwoVariants):
    """Noise allocated to the rounds so that a bound on the final error is minimal.

    The paper shares gradients; for networks this method runs K steps per round.

    Args:
        variant: published or proven.
        source: published; `budget`: epsilon is for the whole run, by zero-concentrated DP. `ladp-fl`: epsilon is for the first
            round, whose noise is LaDP-FL's Full DP, and later rounds cost more.
        contraction: kappa, by which one round shrinks an earlier error (1 - eta mu for strongly convex losses). It must not come
            from data.
        l1: factor of the L1 norm of the model, the non-smooth part; in each round, the server shrinks each coordinate by it.
        clip: proven; C, L2 bound on the update. Under `training.local = "dp-sgd"` single gradients are clipped instead, to
            `training.example_clip`: with one step per round this is the paper's gradient, per sample.
    """

    name: Literal["dpa-ldp"] = "dpa-ldp"
    proven_difference: ClassVar[str] = (
        "updates, or the gradients of single examples, are clipped, and the allocation of noise is scaled to the exact cost "
        "of all rounds"
    )
    reconstructed: ClassVar[str] = (
        "all equations; that the variances minimise a bound on the error under a fixed budget, for a non-smooth part too, is "
        "in the abstract"
    )
    reason: ClassVar[str] = "its sensitivity counts epochs where steps move the weights, and updates are not clipped (DPA-LDP)"
    source: Literal["budget", "ladp-fl"] = "budget"
    contraction: float = Field(0.995, gt=0, le=1)
    l1: float = Field(0.0, ge=0, allow_inf_nan=False)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: noise from the formula."""
        return calibrated_schedule(self, s) if self.variant == "proven" else super().calibrate(s)

    def check_published(self, s: Setting) -> None:
        self.stds(s)

    def release(self, s: Setting) -> Release:
        """Plan the noise of each round."""
        if self.variant == "proven":
            return self._schedule(s)
        return Scheduled(tuple(UnprovenPlan(noise_std=std, reason=self.unproven) for std in self.stds(s)))

    def _schedule(self, s: Setting) -> Scheduled:
        return scheduled(s, self.clip, [self.contraction ** (t / 4) for t in range(s.rounds)])

    def server(self, s: Setting) -> SumServer:
        """The mean, and the proximal step of the non-smooth part."""
        return Shrunk(self.l1) if self.l1 else Mean()

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return the cost of constant noise z; nothing for the published variant."""
        return scheduled_releases(self._schedule, s, view) if self.variant == "proven" else super().releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        """Claim epsilon for the whole run, or LaDP-FL's sum of the rounds' epsilons."""
        if self.variant == "proven":
            return None
        epsilon = paper_epsilon(s, self.name)
        if self.source == "budget":
            return Claim(epsilon, s.delta, classical_scope(), "DPA-LDP (reconstructed)", "zero-concentrated DP")
        return sequential_claim(s, epsilon * geometric_sum(self.contraction**-0.25, s.rounds), "LaDP-FL, Theorem 1")

    def clip_norm(self, s: Setting) -> float | None:
        """Return C, or None if single gradients are clipped."""
        return None if s.example_clip is not None else super().clip_norm(s)

    def stds(self, s: Setting) -> list[float]:
        """Published: the noise std of each round."""
        if self.source == "ladp-fl":
            return [full_dp_std(s, self.name) * self.contraction ** (t / 4) for t in range(s.rounds)]
        epsilon, reach = paper_epsilon(s, self.name), training_reach(s, self.name)
        return [allocated_std(epsilon, s.delta, reach, self.contraction, s.rounds, t) for t in range(s.rounds)]


@dataclass(frozen=True)
class Shrunk(SumServer):
    """The mean; each coordinate of the resulting model is shrunk by `l1`, the proximal step of l1 ||w||_1."""

    l1: float

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        moved = total.start + total.vector
        return state, moved.sign() * (moved.abs() - self.l1).clamp_min(0) - total.start
