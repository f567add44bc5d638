"""Sensitive DP (Xue et al. 2023): the noise of a round follows an estimate of the sensitivity, from the history of updates.

Published: the history is raw and bounds nothing, so nothing is proven. Proven: the history is that of noisy releases, and the
next update is clipped to the estimate, so that the estimate is the sensitivity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.gaussian import classical_noise_multiplier
from fedveil.accounting.types import Claim
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.adaptive import ClipRange, debiased_norms, first_clips, paper_epsilon
from fedveil.methods.base import Policy, Release, Setting, Unproven, as_trained, mean, sum_noise
from fedveil.methods.classical_noise import sequential_claim, training_reach
from fedveil.methods.two_variants import TwoVariants
from fedveil.training.local import Client, Local, Plain, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor


class SensitiveDP(TwoVariants):
    """Noise that follows an estimate of the sensitivity from the history of updates.

    Args:
        variant: published or proven.
        memory: beta; squared norms are averaged with this weight on the past.
        own: zeta, the weight of a client's own updates; the rest is that of the steps of the global model.
        headroom: kappa; the estimate is this multiple of the root of the average.
        clip: proven; C, the clip before anything was released, shared among layers by the root of their sizes.
        clip_range: proven; the clips stay within these multiples of their start.
    """

    name: Literal["sensitive-dp"] = "sensitive-dp"
    reconstructed: ClassVar[str] = (
        "all equations, for SGD and momentum of the paper's four optimisers; that the sensitivity is estimated from local and "
        "global history is in the abstract"
    )
    reason: ClassVar[str] = "the noise follows raw updates, and their history bounds nothing (Sensitive DP)"
    memory: float = Field(0.9, ge=0, lt=1)
    own: float = Field(0.5, ge=0, le=1)
    headroom: float = Field(2.0, gt=0, allow_inf_nan=False)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    clip_range: ClipRange = (0.1, 2.0)

    def check_published(self, s: Setting) -> None:
        training_reach(s, self.name, momentum=True)
        super().check_published(s)

    def release(self, s: Setting) -> Release:
        """Proven: clips from released norms. Published: the upload leaves as training made it."""
        return (
            Remembered(self) if self.variant == "proven" else Unproven(("norms of earlier updates",), self.unproven, as_trained)
        )

    def client(self, s: Setting) -> Client:
        """Proven: plain training. Published: noise by the raw history."""
        if self.variant == "proven":
            return Plain()
        multiplier = classical_noise_multiplier(paper_epsilon(s, self.name), s.delta)
        return RawHistory(method=self, multiplier=multiplier, reach=training_reach(s, self.name, momentum=True))

    def claim(self, s: Setting) -> Claim | None:
        """As LaDP-FL counts: epsilon in each round, added up."""
        if self.variant == "proven":
            return None
        return sequential_claim(s, s.rounds * paper_epsilon(s, self.name), "Sensitive DP (reconstructed), LaDP-FL, Theorem 1")

    def average(self, before: Tensor | None, square: Tensor) -> Tensor:
        """beta before + (1 - beta) square; the square where there is nothing before."""
        return square if before is None else self.memory * before + (1 - self.memory) * square


@dataclass(frozen=True, kw_only=True)
class RawHistory(Plain, Remembering):
    """Published objective: noise of std c min(2 kappa sqrt(zeta a + (1 - zeta) b), 2 eta E G_c / (1 - mu)) / epsilon.

    a and b are running averages of the squared norms of the client's own updates, and of how far the global model moved since the
    client saw it last; before there are both, the bound alone counts. Without a clip only the norm of the estimate matters, which
    is the same by coordinate and by layer.
    """

    method: SensitiveDP
    multiplier: float
    reach: float

    def finish(self, local: Local) -> Tensor:
        """The update and its noise; then the history grows."""
        update, state, m = super().finish(local), local.state, self.method
        if "seen" in state:
            state["moved"] = m.average(state.get("moved"), (local.start - state["seen"]).square().sum())
        spread = self.reach
        if "own" in state and "moved" in state:
            square = m.own * state["own"] + (1 - m.own) * state["moved"]
            spread = min(2 * m.headroom * float(square) ** 0.5, self.reach)
        state["own"], state["seen"] = m.average(state.get("own"), update.square().sum()), local.start.clone()
        state["share"] = spread / self.reach
        std = self.multiplier * spread
        local.noised(update.new_tensor([std**2 * n for n in local.model.layout.sizes]))
        return update + std * local.noise(len(update))

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """The estimate as a share of the bound."""
        return {"estimate_share": state["share"]} if "share" in state else {}


@dataclass(frozen=True)
class Remembered(Policy):
    """Proven policy: the clip of a layer is kappa times the root of the average of its released squares, less their noise."""

    method: SensitiveDP

    def plan(self, s: Setting, seen: Released, state: State) -> Plan:
        """Clips C_l from the history and one noise std z ||C||: the round costs f / z whatever the clips are."""
        m = self.method
        clips = first = first_clips(m.clip, s.layout)
        if "own" in state:
            own: Tensor = state["own"]
            others: Tensor = seen.server.get("own", own)
            estimate = m.headroom * (m.own * own + (1 - m.own) * others).sqrt()
            clips = estimate.clamp(first * m.clip_range[0], first * m.clip_range[1])
        return Plan(layer_clip=clips, noise_std=s.z * float(clips.double().norm()), place="sum" if sum_noise(s) else "upload")

    def observe(self, s: Setting, state: State, left: Upload) -> State:
        """The average with what left."""
        return {"own": self.method.average(state.get("own"), debiased_norms(left, s.layout).square())}

    def observe_all(self, s: Setting, state: State, uploads: Sequence[Upload]) -> State:
        """The same of the global model's steps, the means of the uploads."""
        if not uploads:
            return state
        step, layout = mean(uploads), s.layout
        weights = [u.weight / sum(other.weight for other in uploads) for u in uploads]
        noise = sum(w**2 * u.noise_std.square() for w, u in zip(weights, uploads, strict=True))
        square = layout.norms(step).square() - step.new_tensor([float(n) for n in layout.sizes]) * noise
        return {"own": self.method.average(state.get("own"), square.clamp_min(0))}
