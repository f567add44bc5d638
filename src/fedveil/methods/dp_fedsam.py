"""DP-FedSAM (Shi et al. 2023): clients seek flat minima by sharpness-aware minimisation; then DP-FedAvg's clip and noise.

Only local training differs from DP-FedAvg, so its proof holds unchanged. The choice of coordinates by `keep` stays secret: the
clipped update is released with noise on all coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.errors import ConfigError
from fedveil.methods.base import Fixed, MethodConfig, Release, Setting, gaussian_plan
from fedveil.training.local import Client, Local, Plain

if TYPE_CHECKING:
    from torch import Tensor


class DPFedSAM(MethodConfig):
    """DP-FedAvg with sharpness-aware local training (Shi et al. 2023, "Make Landscape Flatter").

    Args:
        clip: C, L2 bound on each client's update.
        rho: length of the ascent step to the point at which a step takes its gradient; 0 for plain local training.
        adaptive: measure this length relative to the size of each weight (ASAM), as the authors' program does.
        keep: share of the update's coordinates, the largest, that are kept before the clip (DP-FedSAM-top_k); 1 for all.
    """

    name: Literal["dp-fedsam"] = "dp-fedsam"
    reconstructed: ClassVar[str] = (
        "how DP-FedSAM-top_k keeps coordinates: the largest of the whole update, before the clip, under noise on all"
    )
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    rho: float = Field(0.05, ge=0, allow_inf_nan=False)
    adaptive: bool = False
    keep: float = Field(1.0, gt=0, le=1)

    def check(self, s: Setting) -> None:
        """Refuse DP-SGD, which has no price for a second gradient of the same batch."""
        if s.example_clip is not None:
            raise ConfigError(
                "dp-fedsam takes two gradients of each batch, and the first would influence the release without noise, for "
                "which DP-SGD has no price: set training.local = 'sgd'"
            )

    def release(self, s: Setting) -> Release:
        """Use the same clip and noise in every round."""
        return Fixed(gaussian_plan(s, self.clip))

    def client(self, s: Setting) -> Client:
        return SharpnessAware(rho=self.rho, adaptive=self.adaptive, keep=self.keep)


@dataclass(frozen=True)
class SharpnessAware(Plain):
    """Steps along the gradient at w + rho g / ||g||, with g the gradient at w (Foret et al. 2021; ASAM: Kwon et al. 2021)."""

    rho: float = 0.05
    adaptive: bool = False
    keep: float = 1.0

    def step(self, local: Local, x: Tensor, y: Tensor) -> Tensor:
        """Compute two gradients of one batch; batch statistics are those at the model, not at the ascent point."""
        loss = local.gradient(local, x, y)
        if self.rho:
            model = local.model
            before, statistics = model.vector.clone(), model.buffers()
            model.vector.add_(self._uphill(before, model.grad))
            local.gradient(local, x, y)
            model.vector.copy_(before)
            model.load_buffers(statistics)
        local.descend()
        return loss

    def finish(self, local: Local) -> Tensor:
        """Return the update without its smallest coordinates."""
        update = super().finish(local)
        dropped = len(update) - max(1, round(self.keep * len(update)))
        update[update.abs().topk(dropped, largest=False).indices] = 0.0
        return update

    def _uphill(self, weights: Tensor, gradient: Tensor) -> Tensor:
        """Return the ascent step [d] of length rho, or rho w^2 g / ||w g|| if `adaptive`; zero for a zero gradient."""
        scaled = weights * gradient if self.adaptive else gradient
        way = weights * scaled if self.adaptive else scaled
        uphill: Tensor = way * (self.rho / scaled.norm().clamp_min(1e-12))
        return uphill
