"""DPA-LDP (Zhang, Fay and Johansson 2024): the noise of each round minimises a bound on the error under a fixed budget.

Early errors are forgotten at the rate at which training contracts, so early rounds may be noisier. Published: classical noise by
the formulas. Proven: clipped updates, and the same allocation at an exact cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Claim, Event, View
from fedveil.mechanism.plan import UnprovenPlan
from fedveil.methods.adaptive import paper_epsilon
from fedveil.methods.base import Mean, Release, Scheduled, Setting, Summed, SumServer
from fedveil.methods.classical_noise import classical_scope, full_dp_std, sequential_claim, training_reach
from fedveil.methods.noise_schedule import calibrated_schedule, scheduled, scheduled_releases
from fedveil.methods.two_variants import TwoVariants
from fedveil.papers.ladp_fl.baseline_formulas import allocated_std, geometric_sum
from fedveil.training.local import State

if TYPE_CHECKING:
    from torch import Tensor


class DPALDP(TwoVariants):
    """Noise allocated to the rounds so that a bound on the final error is least.

    For networks it runs K steps a round where the paper shares gradients.

    Args:
        variant: published or proven.
        source: published; `budget`: epsilon is that of the whole run, by zero-concentrated DP. `ladp-fl`: epsilon is that of the
            first round, whose noise is LaDP-FL's Full DP, and later rounds cost more.
        contraction: kappa, by which one round shrinks an earlier error (1 - eta mu for strongly convex losses). It must not come
            from data.
        l1: the non-smooth part, this times the L1 norm of the model: the server shrinks each coordinate by it in each round.
        clip: proven; C, L2 bound on the update. Under `training.local = "dp-sgd"` single gradients are clipped instead, to
            `training.example_clip`: with one step a round that is the paper's gradient, by sample.
    """

    name: Literal["dpa-ldp"] = "dpa-ldp"
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
        """The noise of each round."""
        if self.variant == "proven":
            return self._schedule(s)
        return Scheduled(tuple(UnprovenPlan(noise_std=std, reason=self.unproven) for std in self.stds(s)))

    def _schedule(self, s: Setting) -> Scheduled:
        return scheduled(s, self.clip, [self.contraction ** (t / 4) for t in range(s.rounds)])

    def server(self, s: Setting) -> SumServer:
        """The mean, and the proximal step of the non-smooth part."""
        return Shrunk(self.l1) if self.l1 else Mean()

    def releases(self, s: Setting, view: View) -> list[Event]:
        """What constant noise z costs; nothing for the published variant."""
        return scheduled_releases(self._schedule, s, view) if self.variant == "proven" else super().releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        """Epsilon of the whole run, or LaDP-FL's sum of the rounds' epsilons."""
        if self.variant == "proven":
            return None
        epsilon = paper_epsilon(s, self.name)
        if self.source == "budget":
            return Claim(epsilon, s.delta, classical_scope(), "DPA-LDP (reconstructed)", "zero-concentrated DP")
        return sequential_claim(s, epsilon * geometric_sum(self.contraction**-0.25, s.rounds), "LaDP-FL, Theorem 1")

    def clip_norm(self, s: Setting) -> float | None:
        """C, or none where single gradients are clipped."""
        return None if s.example_clip is not None else super().clip_norm(s)

    def stds(self, s: Setting) -> list[float]:
        """Published: the noise std of each round."""
        if self.source == "ladp-fl":
            return [full_dp_std(s, self.name) * self.contraction ** (t / 4) for t in range(s.rounds)]
        epsilon, reach = paper_epsilon(s, self.name), training_reach(s, self.name)
        return [allocated_std(epsilon, s.delta, reach, self.contraction, s.rounds, t) for t in range(s.rounds)]


@dataclass(frozen=True)
class Shrunk(SumServer):
    """The mean; each coordinate of the model that it leads to is shrunk by `l1`, which is the proximal step of l1 ||w||_1."""

    l1: float

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        moved = total.start + total.vector
        return state, moved.sign() * (moved.abs() - self.l1).clamp_min(0) - total.start
