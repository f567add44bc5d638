"""BLUR+LUS (Cheng et al. 2022): local training that keeps updates short, and updates without what matters least.

Which values a client drops is its own secret: the clipped rest leaves under dense noise, so nothing of the choice shows. The
published and the proven variant train alike and differ in how their noise is sized.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.accounting.types import Claim
from fedveil.methods.adaptive import refuse_dp_sgd
from fedveil.methods.base import Fixed, MethodConfig, Release, Setting, Variant, calibrated, gaussian_plan
from fedveil.methods.summed_noise import published_noise, summed_claim
from fedveil.papers.fedglp_adp.opacus_accountant import opacus_epsilon, opacus_noise_multiplier
from fedveil.training.local import Client, Local

if TYPE_CHECKING:
    from torch import Tensor


class BlurLus(MethodConfig):
    """DP-FedAvg with bounded local update regularisation and local update sparsification.

    Args:
        variant: published or proven; they train alike. Published: noise for the sum of a round, in shares on each upload.
        clip: S, L2 bound on an update, and the length from which BLUR pulls.
        blur: lambda of BLUR's penalty lambda/2 max(0, ||w_i - w||^2 - S^2); 0 for none.
        drop: share of each layer's values that LUS sets to zero; 0 for none.
        score: what LUS ranks by: the `effect` |update * gradient| on the local loss at the trained model, or the `size`.
        sigma: published; noise std of the sum / clip; None takes it from privacy.epsilon by the Renyi accountant.
    """

    name: Literal["blur-lus"] = "blur-lus"
    reconstructed: ClassVar[str] = (
        "all but the abstract's idea; the penalty is that of a third party's program, LUS's score and share and both defaults "
        "are guesses"
    )
    variant: Variant = "proven"
    clip: float = Field(0.5, gt=0, allow_inf_nan=False)
    blur: float = Field(0.4, ge=0, allow_inf_nan=False)
    drop: float = Field(0.4, ge=0, lt=1)
    score: Literal["effect", "size"] = "effect"
    sigma: float | None = Field(None, ge=0, allow_inf_nan=False)

    def calibrate(self, s: Setting) -> Setting:
        """Published: the accountant's sigma for the sum. Proven: noise for the configured epsilon, in the run's view."""
        if self.variant == "published":
            formula = partial(opacus_noise_multiplier, steps=s.rounds, delta=s.delta, rate=s.rate)
            return published_noise(s, self.name, self.sigma, formula)
        refuse_dp_sgd(s, self.name)
        return calibrated(self, s)

    def release(self, s: Setting) -> Release:
        """Clip and dense noise, the same in every round."""
        return Fixed(gaussian_plan(s, self.clip))

    def client(self, s: Setting) -> Client:
        return ShortAndSparse(self)

    def claim(self, s: Setting) -> Claim | None:
        """User level, for the sum of all uploads."""
        if self.variant == "proven":
            return None
        return summed_claim(s, partial(opacus_epsilon, steps=s.rounds, delta=s.delta, rate=s.rate), "BLUR+LUS, Renyi accountant")


@dataclass(frozen=True)
class ShortAndSparse:
    """SGD on loss + BLUR's penalty; LUS on the update."""

    method: BlurLus

    def begin(self, local: Local) -> None:
        """Start from the global model."""

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """The gradient of the penalty is lambda (w_i - w) where the update is longer than S."""
        loss = local.gradient(local, x, y)
        moved = local.model.vector - local.start
        local.model.grad.add_(moved * (moved.norm() > self.method.clip), alpha=self.method.blur)
        local.descend()
        return loss

    def finish(self, local: Local) -> Tensor:
        """The update without the lowest share of each layer."""
        update = local.model.vector - local.start
        if not self.method.drop or not local.examples:
            return update
        score = (update * self._gradient(local) if self.method.score == "effect" else update).abs()
        for values, part in zip(local.model.layout.split(score), local.model.layout.split(update), strict=True):
            part[values.topk(int(self.method.drop * len(values) + 1e-9), largest=False).indices] = 0.0
        return update

    def _gradient(self, local: Local) -> Tensor:
        """The mean gradient [d] over all of the client's examples at the trained model."""
        import torch

        assert local.data is not None
        total, size = torch.zeros_like(local.start), 4 * local.spec.batch_size
        for x, y in zip(*(torch.split(part, size) for part in local.data), strict=True):
            local.gradient(local, x, y)
            total.add_(local.model.grad, alpha=len(y) / local.examples)
        return total
