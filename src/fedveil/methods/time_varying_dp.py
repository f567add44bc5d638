"""Time-Varying DP (Yuan et al. 2023): noise that falls geometrically over the rounds.

Published: classical Gaussian noise whose sensitivity counts epochs and whose epsilons are added up, so nothing is proven. Proven:
clipped updates, and the same fall of the noise at an exact cost, which public losses may make steeper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Claim, Event, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released, UnprovenPlan, Upload
from fedveil.methods.adaptive import paper_epsilon, refuse_dp_sgd
from fedveil.methods.base import (
    Policy,
    Release,
    Scheduled,
    Setting,
    gaussian_plan,
    gaussian_releases,
    reads_public_split,
    sum_noise,
)
from fedveil.methods.classical_noise import classical_scope, full_dp_std, sequential_claim, training_reach
from fedveil.methods.noise_schedule import calibrated_schedule, scheduled, scheduled_releases
from fedveil.methods.two_variants import TwoVariants
from fedveil.papers.ladp_fl.baseline_formulas import falling_first_std, geometric_sum
from fedveil.training.local import State

_NO_PUBLIC_LOSS = "method.refine_every needs the loss on public data: set data.public_fraction, or refine_every = 0"


class TimeVaryingDP(TwoVariants):
    """Noise that falls geometrically over the rounds.

    Args:
        variant: published or proven.
        source: published; `budget`: epsilon is that of the whole run, by `accounting`. `ladp-fl`: epsilon is that of the first
            round, whose noise is LaDP-FL's Full DP, and later rounds cost more.
        accounting: published, `budget`; epsilons added up (naive), or zero-concentrated DP.
        decay: v; the noise of a round is v times that of the one before.
        clip: proven; C, L2 bound on the update.
        refine_every: proven; R: after each R rounds in which the public loss has not fallen, v is multiplied by `refinement`
            and what is left of the budget is planned anew; 0 for never. Needs a public split, and fixed cohorts in the aggregate
            view.
        refinement: kappa of that step.
    """

    name: Literal["time-varying-dp"] = "time-varying-dp"
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
        """What the refinement reads."""
        refined = self.variant == "proven" and self.refine_every
        return reads_public_split(s) if refined else ()

    def release(self, s: Setting) -> Release:
        """The noise of each round."""
        if self.variant == "published":
            first = self.first_std(s)
            return Scheduled(tuple(UnprovenPlan(noise_std=first * self.decay**t, reason=self.unproven) for t in range(s.rounds)))
        return Refined(self) if self.refine_every else self._schedule(s)

    def _schedule(self, s: Setting) -> Scheduled:
        return scheduled(s, self.clip, [self.decay**t for t in range(s.rounds)])

    def releases(self, s: Setting, view: View) -> list[Event]:
        """What constant noise z costs; nothing for the published variant."""
        if self.variant == "published":
            return super().releases(s, view)
        return gaussian_releases(s, view) if self.refine_every else scheduled_releases(self._schedule, s, view)

    def claim(self, s: Setting) -> Claim | None:
        """Epsilon of the whole run, or LaDP-FL's sum of the rounds' epsilons."""
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
    """Proven policy that lowers v where the public loss stops falling.

    Its state: v; the round since which it holds; what was left of the budget then, in rounds of z; the last public loss.
    What has been spent and what is planned are T rounds of z together, whatever the losses are.
    """

    method: TimeVaryingDP

    def start(self, s: Setting) -> State:
        return {"decay": self.method.decay, "since": 0, "left": float(s.rounds), "loss": float("inf")}

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        """z_t = z w v^k in the k-th round since v holds; w so that the remaining rounds cost what is left."""
        behind = seen.round - state["since"]
        weight = (geometric_sum(state["decay"] ** -2, s.rounds - state["since"]) / state["left"]) ** 0.5
        clip = self.method.clip
        return Plan(clip=clip, noise_std=s.z * weight * state["decay"] ** behind * clip, place=gaussian_plan(s, clip).place)

    def observe(self, s: Setting, state: State, left: Upload) -> State:
        """Every R rounds: has the public loss fallen?"""
        done = left.round + 1
        if done % self.method.refine_every or done >= s.rounds:
            return state
        if left.public_loss is None:
            raise ConfigError(_NO_PUBLIC_LOSS)
        fallen, inverse = left.public_loss < state["loss"], state["decay"] ** -2
        if fallen:
            return {**state, "loss": left.public_loss}
        whole = geometric_sum(inverse, s.rounds - state["since"])
        rest = state["left"] * (1 - geometric_sum(inverse, done - state["since"]) / whole)
        return {"decay": state["decay"] * self.method.refinement, "since": done, "left": rest, "loss": left.public_loss}
