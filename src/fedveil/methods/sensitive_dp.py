"""Sensitive DP (Xue et al. 2023): the noise of a round follows an estimate of the sensitivity, from the history of updates.

Published: the history is raw and bounds nothing, so nothing is proven. Proven: the history is that of noisy releases, and the
next update is clipped to the estimate, so that the estimate is the sensitivity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, field_validator

from fedveil.accounting.gaussian import classical_noise_multiplier
from fedveil.accounting.types import Claim, Event, Unbounded, View
from fedveil.methods.adaptive import debiased_norms, paper_epsilon, refuse_dp_sgd
from fedveil.methods.aldp_fl import Unguarded
from fedveil.methods.base import MethodConfig, Setting, Variant, Weighting, calibrated, gaussian_releases, mean, sum_noise
from fedveil.methods.classical_noise import sequential_claim, training_reach
from fedveil.release.plan import Plan, Policy, Released, Upload
from fedveil.training.local import Local, Objective, Plain, State

if TYPE_CHECKING:
    from torch import Tensor

_REASON = "the noise follows raw updates, and their history bounds nothing (Sensitive DP)"


class SensitiveDP(MethodConfig):
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
        "all equations, for SGD alone of the paper's four optimisers; that the sensitivity is estimated from local and global "
        "history is in the abstract"
    )
    variant: Variant = "proven"
    memory: float = Field(0.9, ge=0, lt=1)
    own: float = Field(0.5, ge=0, le=1)
    headroom: float = Field(2.0, gt=0, allow_inf_nan=False)
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    clip_range: tuple[float, float] = (0.1, 2.0)

    @field_validator("clip_range")
    @classmethod
    def _ordered(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not 0 < value[0] <= value[1] < float("inf"):
            raise ValueError(f"give [lowest, highest] with 0 < lowest <= highest, not {list(value)}")
        return value

    @property
    def weighting(self) -> Weighting:
        """Published: by the number of examples. Proven: uniform, so that the sensitivity is the clip."""
        return "examples" if self.variant == "published" else "uniform"

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: noise from the estimates."""
        refuse_dp_sgd(s, self.name)
        if self.variant == "proven":
            return calibrated(self, s)
        training_reach(s, self.name)
        paper_epsilon(s, self.name)
        return s

    def policy(self, s: Setting) -> Policy:
        """Proven: clips from released norms. Published: the upload leaves as training made it."""
        return Remembered(self, s) if self.variant == "proven" else Unguarded(("norms of earlier updates",), _REASON)

    def objective(self, s: Setting) -> Objective:
        """Proven: plain training. Published: noise by the raw history."""
        if self.variant == "proven":
            return Plain()
        multiplier = classical_noise_multiplier(paper_epsilon(s, self.name), s.delta)
        return RawHistory(method=self, multiplier=multiplier, reach=training_reach(s, self.name))

    def releases(self, s: Setting, view: View) -> list[Event]:
        """f / z a round, whatever the estimates; nothing for the published variant."""
        return gaussian_releases(s, view) if self.variant == "proven" else [Unbounded(_REASON)]

    def claim(self, s: Setting) -> Claim | None:
        """As LaDP-FL counts: epsilon in each round, added up."""
        if self.variant == "proven":
            return None
        return sequential_claim(s, s.rounds * paper_epsilon(s, self.name), "Sensitive DP (reconstructed), LaDP-FL, Theorem 1")

    def clip_norm(self, s: Setting) -> float | None:
        """The clip of the first round."""
        return self.clip if self.variant == "proven" else None

    def average(self, before: Tensor | None, square: Tensor) -> Tensor:
        """beta before + (1 - beta) square; the square where there is nothing before."""
        return square if before is None else self.memory * before + (1 - self.memory) * square


@dataclass(frozen=True, kw_only=True)
class RawHistory(Plain):
    """Published objective: noise of std c min(2 kappa sqrt(zeta a + (1 - zeta) b), 2 eta E G_c) / epsilon on each weight.

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
class Remembered:
    """Proven policy: the clip of a layer is kappa times the root of the average of its released squares, less their noise."""

    method: SensitiveDP
    setting: Setting

    def start(self) -> State:
        return {}

    def plan(self, released: Released, state: State) -> Plan:
        """Clips C_l from the history and one noise std z ||C||: the round costs f / z whatever the clips are."""
        import torch

        m, s = self.method, self.setting
        sizes = torch.tensor([float(n) for n in s.layout.sizes])
        clips = first = m.clip * (sizes / sizes.sum()).sqrt()
        if "own" in state:
            own: Tensor = state["own"]
            others: Tensor = released.server.get("own", own)
            estimate = m.headroom * (m.own * own + (1 - m.own) * others).sqrt()
            clips = estimate.clamp(first * m.clip_range[0], first * m.clip_range[1])
        return Plan(layer_clip=clips, noise_std=s.z * float(clips.norm()), place="sum" if sum_noise(s) else "upload")

    def observe(self, state: State, upload: Upload) -> State:
        """The average with what left."""
        return {"own": self.method.average(state.get("own"), debiased_norms(upload, self.setting.layout).square())}

    def observe_all(self, state: State, uploads: Sequence[Upload]) -> State:
        """The same of the global model's steps, the means of the uploads."""
        if not uploads:
            return state
        step, layout = mean(uploads), self.setting.layout
        weights = [u.weight / sum(other.weight for other in uploads) for u in uploads]
        noise = sum(w**2 * u.noise_std.square() for w, u in zip(weights, uploads, strict=True))
        square = layout.norms(step).square() - step.new_tensor([float(n) for n in layout.sizes]) * noise
        return {"own": self.method.average(state.get("own"), square.clamp_min(0))}
