"""ALDP-FL: per-layer clips from a sliding window of layer norms, bounded noise.

Published: the window contains raw norms, and the noise inside local training is a truncated Gaussian, whose support differs
between neighbours, so nothing can be proven. Proven: the window contains debiased norms of releases, the door adds Gaussian noise
once per round, and the bound is a clamp afterwards, which costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.gaussian import classical_noise_multiplier
from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.base import Policy, Release, Setting, Unproven, Weighting, as_trained, sum_noise
from fedveil.methods.shared import ClipRange, TwoVariants, debiased_norms, first_clips, layered_plan, paper_epsilon
from fedveil.training.local import Client, Local, Plain, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor

_FAR = 9.0


class ALDPFL(TwoVariants):
    """Per-layer clips from a sliding window of layer norms, with bounded noise.

    Args:
        variant: published or proven.
        window: k, number of norms in the sliding window.
        eta: parameter of the bound b = (e^epsilon - eta) / (e^epsilon + eta).
        noise_every: published; one iteration is a batch or a pass over the data (not stated in the paper).
        sensitivity: published; d in Delta f = 2 Clip / d, which the paper does not define: the examples of the client
            (`dataset`) or of a batch.
        clip: proven; the clip of a whole update in the first round, divided among layers by the root of their sizes.
        headroom: proven; clips are this multiple of the window's mean. Released norms are already clipped (and in the aggregate
            view they are norms of a mean), so with a headroom of 1 clips could only shrink.
        allocation: proven; noise proportional to the clips, or noise with the least total energy.
        clip_range: proven; the clips stay within these multiples of their start. Above 1, noise and clip can amplify each other.
        bound: proven; b', the clamp of each coordinate of a noisy update, of n b' in a sum of n. It acts where it is below the
            clips: no coordinate of a clipped update passes its layer's clip, so at the default of 1 only noise is cut.
    """

    name: Literal["aldp-fl"] = "aldp-fl"
    proven_difference: ClassVar[str] = (
        "the clips follow norms of releases, plain Gaussian noise is added once a round, and the bound is a clamp after the noise"
    )
    published_weighting: ClassVar[Weighting] = "uniform"
    reason: ClassVar[str] = "truncated noise has another support under a neighbour, and the clips are raw layer norms (ALDP-FL)"
    window: int = Field(3, ge=1)
    eta: float = Field(0.5, gt=-1, lt=1)
    noise_every: Literal["batch", "epoch"] = "batch"
    sensitivity: Literal["dataset", "batch"] = "dataset"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    headroom: float = Field(1.5, ge=1, allow_inf_nan=False)
    allocation: Literal["equal", "least"] = "least"
    clip_range: ClipRange = (0.5, 1.0)
    bound: float = Field(1.0, gt=0, allow_inf_nan=False)

    def release(self, s: Setting) -> Release:
        """Proven: clips from released norms. Published: the upload as training made it."""
        return Window(self) if self.variant == "proven" else Unproven(("layer norms",), self.unproven, as_trained)

    def client(self, s: Setting) -> Client:
        """Proven: plain training. Published: clip and noise in each iteration."""
        if self.variant == "proven":
            return Plain()
        return BoundedNoise(self, paper_epsilon(s, self.name), s.delta)

    def claim(self, s: Setting) -> Claim | None:
        """Epsilon for each local iteration, quoted for the whole run (ALDP-FL, Eq. 21)."""
        if self.variant == "proven":
            return None
        scope = Scope(Unit.RECORD, Adjacency.REPLACE_ONE, View.SERVER)
        return Claim(paper_epsilon(s, self.name), s.delta, scope, "ALDP-FL, Eq. 21", "per iteration; not composed")


@dataclass(frozen=True)
class Window(Policy):
    """Proven policy: C_l = headroom * mean of the last k debiased layer norms that were released."""

    method: ALDPFL

    def start(self, s: Setting) -> State:
        """An empty window, and the first clips."""
        first = first_clips(self.method.clip, s.layout)
        return {"first": first, "norms": first.new_empty((0, len(first)))}

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """Per-layer clips from the window, noise at the round's share of the budget, a clamp afterwards."""
        first, norms = state["first"], state["norms"]
        lo, hi = self.method.clip_range
        clips = first
        if len(norms):
            clips = (norms.mean(0) * self.method.headroom).clamp(first * lo, first * hi)
        n = s.cohort if sum_noise(s) else 1
        return layered_plan(s, clips, equal=self.method.allocation == "equal", clamp=self.method.bound * n)

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Add the debiased norms of the release to the window."""
        norms = debiased_norms(upload, s.layout)
        held = state["norms"][-(self.method.window - 1) :] if self.method.window > 1 else state["norms"][:0]
        return {**state, "norms": held.new_tensor([*held.tolist(), norms.tolist()])}


@dataclass(frozen=True)
class BoundedNoise(Remembering):
    """Published objective: each iteration's step is clipped per layer to the mean of its window, then noised within [-b, b]."""

    method: ALDPFL
    epsilon: float
    delta: float

    def begin(self, local: Local) -> None:
        """Load the window, which the client keeps between rounds."""
        local.state["before"] = local.model.vector.clone()
        local.state.setdefault("window", local.model.vector.new_empty((0, len(local.model.layout))))

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Take a gradient step; at the end of an iteration, clip and noise the movement."""
        loss = local.gradient(local, x, y)
        local.descend()
        every = 1 if self.method.noise_every == "batch" else local.spec.batches_for(local.examples)
        local.scratch["open"] = (local.step + 1) % every != 0
        if not local.scratch["open"]:
            self._bound(local)
        return loss

    def finish(self, local: Local) -> Tensor:
        """Return the sum of all noisy steps; the movement since the last full iteration is clipped and noised too."""
        if local.scratch.pop("open", False):
            self._bound(local)
        local.state.pop("before")
        return local.model.vector - local.start

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        """The clips of the last iteration."""
        if "clips" not in state:
            return {}
        clips = state["clips"]
        return {"layer_clip": clips.tolist(), "clip": float(clips.norm())}

    def _bound(self, local: Local) -> None:
        layout, model = local.model.layout, local.model
        moved = model.vector - local.state["before"]
        norms = layout.norms(moved)
        window = local.state["window"]
        window = window.new_tensor([*window.tolist(), norms.tolist()])[-self.method.window :]
        clips = window.mean(0)
        d = local.examples if self.method.sensitivity == "dataset" else min(local.spec.batch_size, local.examples)
        std = 2 * clips / d * classical_noise_multiplier(self.epsilon, self.delta)
        bound = bound_of(self.epsilon, self.method.eta)
        moved *= layout.expand((clips / norms.clamp_min(1e-30)).clamp_max(1.0))
        moved += truncated_normal(local.noise(layout.dimension), layout.expand(std), bound)
        local.noised(truncated_variance(std, bound) * std.new_tensor([float(n) for n in layout.sizes]))
        model.vector.copy_(local.state["before"] + moved)
        local.state["before"] = model.vector.clone()
        local.state.update(window=window, clips=clips)


def bound_of(epsilon: float, eta: float) -> float:
    """Return b = (e^epsilon - eta) / (e^epsilon + eta) (ALDP-FL, Eq. 3)."""
    shrink = eta * math.exp(-epsilon)
    return (1 - shrink) / (1 + shrink)


def truncated_normal(standard: Tensor, std: Tensor, bound: float) -> Tensor:
    """Return centred Gaussian noise of std `std` [d] conditioned on [-bound, bound], from standard normals [d]; 0 where std is 0.

    x = std Phi^-1(Phi(-b/std) + Phi(standard) (Phi(b/std) - Phi(-b/std))), or simply std standard if the bound is beyond
    `_FAR` std: the mass outside, 2 Phi(-9) < 1e-18, is below double precision.
    """
    import torch

    if bound > _FAR * float(std.max()):
        return (standard * std).clamp(-bound, bound)
    z, scale = standard.double(), std.double().clamp_min(1e-300)
    low = torch.special.ndtr(-bound / scale)
    x = scale * torch.special.ndtri(low + torch.special.ndtr(z) * (1 - 2 * low))
    inside: Tensor = x.clamp(-bound, bound).where(std > 0, x.new_zeros(()))
    return inside.to(standard.dtype)


def truncated_variance(std: Tensor, bound: float) -> Tensor:
    """Variance of `truncated_normal`, std^2 (1 - 2 a phi(a) / (2 Phi(a) - 1)) with a = bound / std (ALDP-FL, Eq. 8)."""
    import torch

    scale = std.double().clamp_min(1e-300)
    a = bound / scale
    inside = torch.special.erf(a / math.sqrt(2))
    kept = 1 - a * (-a.square() / 2).exp() * math.sqrt(2 / math.pi) / inside
    wide = a < 1e-3  # nearly uniform: the formula cancels
    variance = torch.where(wide, torch.full_like(scale, bound**2 / 3), scale.square() * kept)
    return variance.where(std > 0, variance.new_zeros(())).to(std.dtype)
