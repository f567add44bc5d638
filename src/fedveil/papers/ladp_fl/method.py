"""LaDP-FL: each layer's noise is inversely proportional to a privacy estimate, the KL divergence of local from global weights.

Published: the estimate and the choice of layers read raw weights, and layers that are not chosen get no noise, so nothing
can be proven. Proven: the estimate compares the last RELEASED model with the global one, the clipped update is noised at the
round's exact share of the budget, and layers that are not chosen are not sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.gaussian import noise_std_for
from fedveil.accounting.types import Claim
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan, Released, Upload
from fedveil.methods.base import Policy, Release, Setting, Unproven, sum_noise
from fedveil.methods.shared import TwoVariants, noise_at_share, paper_epsilon
from fedveil.papers.ladp_fl.baselines import sequential_claim, training_reach
from fedveil.papers.ladp_fl.claim import constant_as_printed
from fedveil.training.local import State

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import Layout


class LaDPFL(TwoVariants):
    """The noise of each layer depends on how far the layer moved.

    For the published variant, G_c is `training.batch_clip` and epsilon (per round) is `privacy.epsilon`.

    Args:
        variant: published or proven.
        threshold: R; layers whose weights have a smaller L2 norm are not chosen. Not stated in the paper.
        bound: B, in nats; larger estimates are replaced by B. Not stated in the paper.
        spread: estimates are at least their largest possible value / spread, so the noise of one layer is at most this multiple
            of another's. Not in the paper, whose noise is infinite for a layer that did not move.
        privacy_estimation: False is the paper's ablation: P is the same for all layers.
        sensitivity: published; 2 eta E G_c counts epochs (Theorem 2), 2 eta K G_c counts the steps that move the weights.
        calibration: published; c as printed in Theorem 3, or the exact constant of the Gaussian mechanism.
        clip: proven; C, L2 bound on the whole update.
        clipping: proven; only the whole update, or also each layer at C times the root of its share of the coordinates.
    """

    name: Literal["ladp-fl"] = "ladp-fl"
    proven_difference: ClassVar[str] = (
        "the privacy estimate and the choice of layers read released models, layers that are not chosen are not sent, and the "
        "whole update is clipped"
    )
    reason: ClassVar[str] = (
        "layers are chosen and noise is scaled by raw weights, and layers below the threshold leave without noise (LaDP-FL)"
    )
    threshold: float = Field(0.0, ge=0, allow_inf_nan=False)
    bound: float = Field(1e-4, gt=0, allow_inf_nan=False)
    spread: float = Field(4.0, ge=1, allow_inf_nan=False)
    privacy_estimation: bool = True
    sensitivity: Literal["theorem2", "per_step"] = "theorem2"
    calibration: Literal["theorem3", "exact"] = "theorem3"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    clipping: Literal["whole", "layers"] = "layers"

    def check_published(self, s: Setting) -> None:
        self.unit_std(s)

    def release(self, s: Setting) -> Release:
        """Plan the noise of each layer, from released or from raw weights."""
        if self.variant == "proven":
            return Estimated(self)
        return Unproven(("layer norms", "KL divergence of local from global layers"), self.unproven, self.by_raw_layers)

    def by_raw_layers(self, s: Setting, released: Released, update: Tensor) -> Plan:
        """Published: sigma_j = c Delta / (epsilon P_j), P_j = min(KL(softmax(w_i,j) || softmax(w_g,j)), B) of raw weights."""
        layout, local = s.layout, released.model + update
        scaled = layer_kl(local, released.model, layout).clamp(self.bound / self.spread, self.bound) / self.bound
        if not self.privacy_estimation:
            scaled = scaled.new_ones(len(layout))
        return Plan(noise_std=self.unit_std(s) / scaled * (layout.norms(local) >= self.threshold))

    def claim(self, s: Setting) -> Claim | None:
        """The paper's accountant: (q T epsilon, q T delta), q = batch / |D_i|; one round's claim if that delta is >= 1."""
        if self.variant == "proven":
            return None
        return sequential_claim(s, s.rounds * paper_epsilon(s, self.name), "LaDP-FL, Theorem 3")

    def unit_std(self, s: Setting) -> float:
        """Return c Delta / (epsilon B), the noise std at P = B and the least of a chosen layer (Theorems 2 and 3)."""
        epsilon = paper_epsilon(s, self.name)
        reach = training_reach(s, self.name, None if self.sensitivity == "theorem2" else s.steps)
        if self.calibration == "exact":
            return noise_std_for(epsilon, s.delta, reach)
        return constant_as_printed(epsilon, s.delta) * reach / epsilon


@dataclass(frozen=True)
class Estimated(Policy):
    """Proven policy: the same estimate from the last release, less the contribution of its noise."""

    method: LaDPFL

    def plan(self, s: Setting, released: Released, state: State) -> Plan:
        """sigma_j proportional to 1 / P_j on the chosen layers, scaled so that the round costs mu = f / z."""
        m = self.method
        chosen = s.layout.norms(released.model) >= m.threshold
        if not bool(chosen.any()):
            raise ConfigError(
                f"method.threshold = {m.threshold:g} is above the norm of every layer of the global model: lower it"
            )
        none, one = released.model.new_zeros(()), released.model.new_ones(())
        estimates = self._estimates(s, released, state, chosen)
        sizes = estimates.new_tensor([float(n) for n in s.layout.sizes]).where(chosen, none)
        return noise_at_share(
            s,
            Plan(
                clip=m.clip,
                noise_std=(1 / estimates).where(chosen, none),
                place="sum" if sum_noise(s) else "upload",
                layer_clip=m.clip * (sizes / sizes.sum()).sqrt().where(chosen, one) if m.clipping == "layers" else None,
                support=None if bool(chosen.all()) else s.layout.expand(chosen),
            ),
        )

    def _estimates(self, s: Setting, released: Released, state: State, chosen: Tensor) -> Tensor:
        """Return P_j [L] > 0 from the last release; all equal if there is none, or if it is mostly noise."""
        m = self.method
        equal = chosen.new_ones(len(s.layout), dtype=released.model.dtype)
        if not state or not m.privacy_estimation:
            return equal
        # A sum is compared with the model before it, since the model after it is the present global model.
        other = state["start"] if sum_noise(s) else released.model
        estimates = (layer_kl(state["model"], other, s.layout) - noise_kl(state["noise_std"], s.layout)).clamp(0, m.bound)
        largest = float(estimates[chosen].max())
        return estimates.clamp_min(largest / m.spread) if largest > 0 else equal

    def observe(self, s: Setting, state: State, upload: Upload) -> State:
        """Store the model of this release and its noise."""
        if upload.start is None:
            raise ConfigError("LaDP-FL's policy must be told the model that an upload started from: set Upload.start")
        known = {"model": upload.start + upload.vector, "noise_std": upload.noise_std}
        return {**known, "start": upload.start} if sum_noise(s) else known


def layer_kl(local: Tensor, other: Tensor, layout: Layout) -> Tensor:
    """Return KL(softmax(local_j) || softmax(other_j)) in nats for each layer [L] of two flat vectors [d] (Algorithm 3)."""
    import torch

    values = []
    for a, b in zip(layout.split(local), layout.split(other), strict=True):
        log_p, log_q = torch.log_softmax(a.double(), 0), torch.log_softmax(b.double(), 0)
        values.append((log_p.exp() * (log_p - log_q)).sum())
    return torch.stack(values).clamp_min(0).to(local.dtype)


def noise_kl(noise_std: Tensor, layout: Layout) -> Tensor:
    """Mean contribution of Gaussian noise to `layer_kl` (nearly uniform softmax): sigma^2 (1 - 1 / n_j) / 2.

    KL(softmax(v + x) || softmax(v)) = Var_v(x) / 2 up to third order; exact for n_j -> infinity. No guarantee depends on it.
    """
    sizes = noise_std.new_tensor([float(n) for n in layout.sizes])
    return noise_std.square() * (1 - 1 / sizes) / 2
