"""FedADDP (Guo et al. 2024): the noise of each coordinate follows a range around where local training began.

Published: range and centre are raw values of the client, and the noise counts tensors where it should count coordinates. Proven:
the range is taken of the released global model and the centre is that model; updates in units of it are clipped and noised.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.base import (
    Fixed,
    Mean,
    Release,
    Setting,
    Summed,
    SumServer,
    Unproven,
    gaussian_plan,
    sum_noise,
    what_is_not_zero,
)
from fedveil.methods.fedglp_parts import MASK_SHARE, descend_part
from fedveil.methods.fisher_split import Split, check_split, fisher_split, pull, pull_to
from fedveil.methods.two_variants import TwoVariants
from fedveil.papers.fedglp_adp.baseline_claims import fedaddp_noise
from fedveil.training.local import Client, Local, Remembering, State

if TYPE_CHECKING:
    from torch import Tensor


class FedADDP(TwoVariants):
    """Fisher personalisation with noise of each coordinate's own size.

    Args:
        variant: published or proven.
        beta: a coordinate may move by q = beta/2 |w|, and its noise is proportional to 2 q.
        threshold: tau, scaled Fisher information from which a coordinate is personal.
        lambda1, lambda2: weights of the pulls of the personal step to the global model, and of the update's length to sum ||2q||.
        sigma: published; sigma_0, instead of the paper's formula from privacy.epsilon.
        clip: proven; L2 bound on an update in units of the range (whose root mean square over all coordinates is 1).
        floor: proven; least |w| that counts, as a part of the model's root mean square: a weight of zero could never move.
    """

    name: Literal["fed-addp"] = "fed-addp"
    reconstructed: ClassVar[str] = "nothing: the published form is the authors' program; the paper's text was not at hand"
    reason: ClassVar[str] = "range and centre of each coordinate, and with them its noise, are raw values of the client (FedADDP)"
    beta: float = Field(0.1, gt=0, allow_inf_nan=False)
    threshold: float = Field(0.4, gt=0, lt=1)
    lambda1: float = Field(0.1, ge=0, allow_inf_nan=False)
    lambda2: float = Field(0.05, ge=0, allow_inf_nan=False)
    sigma: float | None = Field(None, ge=0, allow_inf_nan=False)
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    floor: float = Field(0.1, gt=0, le=1)

    def calibrate(self, s: Setting) -> Setting:
        """Proven: noise for the configured epsilon. Published: sigma_0, which stays apart from what the door knows."""
        check_split(s, self.name)
        return super().calibrate(s)

    def check_published(self, s: Setting) -> None:
        if sum_noise(s):
            raise ConfigError("the published variant of fed-addp sends each client's noisy model: set privacy.view = 'server'")
        if s.noise_multiplier is not None or (self.sigma is not None) == (s.epsilon is not None):
            raise ConfigError("the published variant of fed-addp needs either privacy.epsilon or method.sigma, and nothing else")
        sigma_0(self, s)

    def release(self, s: Setting) -> Release:
        """Proven: clip and noise in units of the range. Published: the upload leaves as training made it."""
        if self.variant == "published":
            return Unproven(("weights", "gradients"), self.unproven, what_is_not_zero)
        return Fixed(gaussian_plan(s, self.clip))

    def client(self, s: Setting) -> Client:
        return RangedNoise(self, s, sigma_0(self, s) if self.variant == "published" else None)

    def server(self, s: Setting) -> SumServer:
        """The mean; proven: out of units of the range again."""
        return InUnits(self.floor) if self.variant == "proven" else Mean()

    def claim(self, s: Setting) -> Claim | None:
        """Of each client's own uploads; the program has a formula from epsilon to sigma_0 only."""
        if self.variant == "proven" or s.epsilon is None:
            return None
        scope = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.SERVER)
        return Claim(s.epsilon, s.delta, scope, "FedADDP, get_sigma0", f"sigma_0 = {sigma_0(self, s):.4g}, tensors counted")


def sigma_0(method: FedADDP, s: Setting) -> float:
    """Noise std / (sqrt(M) 2 q), M the number of tensors."""
    return method.sigma if method.sigma is not None else fedaddp_noise(s.epsilon or 0.0, s.rounds, s.delta)


def magnitude(weights: Tensor, floor: float) -> Tensor:
    """|w|, at least `floor` of its root mean square (or 1, for a model of zeros)."""
    mean_square = weights.square().mean().sqrt()
    return weights.abs().clamp_min(floor * mean_square.where(mean_square > 0, mean_square + 1))


def unit(weights: Tensor, floor: float) -> Tensor:
    """What one unit of a released update stands for [d]: proportional to the range of each coordinate, root mean square 1."""
    size = magnitude(weights, floor)
    return size / size.square().mean().sqrt()


@dataclass(frozen=True)
class InUnits(SumServer):
    """The mean of updates in units of the range of each coordinate of the model."""

    floor: float

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        return state, total.vector * unit(total.start, self.floor)


@dataclass(frozen=True)
class RangedNoise(Remembering):
    """Per batch a step of the personal coordinates, then one of the shared; at the end what may move by q, and its noise.

    `sigma` is sigma_0 in the published variant, else None.
    """

    method: FedADDP
    setting: Setting
    sigma: float | None
    columns = (MASK_SHARE,)

    def begin(self, local: Local) -> None:
        """The split; the length that the update is pulled to is that of the last round's ranges."""
        split = fisher_split(local, self.setting, self.method.threshold, skip_zeros=self.sigma is not None)
        local.scratch.update(split=split, last=split.first)
        if self.sigma is None:
            local.scratch["length"] = self._length(self.method.beta / 2 * magnitude(local.start, self.method.floor), local)
        else:
            local.scratch["length"] = local.state.get("length", 0.0)

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Both steps; the weights before them and the gradients of them make the range."""
        split: Split = local.scratch["split"]
        model, layout = local.model, local.model.layout
        before = model.vector.clone()
        local.gradient(local, x, y)
        model.grad.add_(pull(model.vector - local.start, layout), alpha=self.method.lambda1 / 2)
        gradient = model.grad * split.trains_personal
        descend_part(local, split.trains_personal, "personal")
        loss = local.gradient(local, x, y)
        model.grad.add_(pull_to(model.vector - local.start, layout, local.scratch["length"]), alpha=self.method.lambda2 / 2)
        gradient += model.grad * split.trains_shared
        descend_part(local, split.trains_shared, "shared")
        local.scratch["last"] = before - local.spec.learning_rate(local.round, local.step, local.steps) * gradient
        return loss

    def finish(self, local: Local) -> Tensor:
        """What leaves. The client keeps its own model as it is."""
        split: Split = local.scratch["split"]
        trained = local.model.vector.clone()
        local.state.update(personal=trained, share=float(split.personal.float().mean()))
        if self.sigma is not None:
            return self._published(local, split, trained, self.sigma)
        reach = self.method.beta / 2 * magnitude(local.start, self.method.floor)
        moved: Tensor = ((trained - local.start) * ~split.personal).clamp(-reach, reach)
        return moved / unit(local.start, self.method.floor)

    def personal(self, model: Tensor, state: State) -> Tensor:
        """The client's own model as its last training left it."""
        own: Tensor = state.get("personal", model)
        return own

    def measures(self, state: State) -> Mapping[str, float | list[float]]:
        return {"mask_share": state["share"]} if "share" in state else {}

    def _published(self, local: Local, split: Split, trained: Tensor, sigma: float) -> Tensor:
        """w_0 - q <= w <= w_0 + q, noise std sqrt(M) sigma_0 2q, relative to the global model."""
        layout = local.model.layout
        reach: Tensor = self.method.beta / 2 * local.scratch["last"].abs()
        std = math.sqrt(len(layout)) * sigma * 2 * reach
        local.state["length"] = self._length(reach, local)
        local.noised(layout.norms(std).square())
        within: Tensor = trained.clamp(split.first - reach, split.first + reach)
        return within + local.noise(layout.dimension) * std - local.start

    @staticmethod
    def _length(reach: Tensor, local: Local) -> float:
        """sum_l ||2 q_l||."""
        return float(local.model.layout.norms(2 * reach).sum())
