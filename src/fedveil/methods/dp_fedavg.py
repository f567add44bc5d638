"""DP-FedAvg (McMahan et al. 2018): clip each client's update as a whole, add Gaussian noise, average uniformly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from fedveil.accounting.types import Claim, Event, View
from fedveil.methods.base import MethodConfig, Setting, Weighting, calibrated, gaussian_plan, gaussian_releases, mean
from fedveil.release.plan import Fixed, Policy, Upload
from fedveil.training.local import Objective, Plain

if TYPE_CHECKING:
    from torch import Tensor


class DPFedAvg(MethodConfig):
    """Client-level DP-FedAvg with flat clipping and a fixed denominator q N (the paper's estimator f_f).

    Args:
        clip: C, L2 bound on each client's update.
    """

    name: Literal["dp-fedavg"] = "dp-fedavg"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)

    @property
    def weighting(self) -> Weighting:
        """All clients weigh the same, so the sensitivity of the sum is C."""
        return "uniform"

    def calibrate(self, s: Setting) -> Setting:
        """Noise for the configured epsilon."""
        return calibrated(self, s)

    def policy(self, s: Setting) -> Policy:
        """The same clip and noise in every round."""
        return Fixed(gaussian_plan(s, self.clip))

    def objective(self, s: Setting) -> Objective:
        """Plain local training."""
        return Plain()

    def aggregate(self, uploads: Sequence[Upload], model: Tensor) -> Tensor:
        """The mean."""
        return mean(uploads)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """T Gaussian releases, amplified by Poisson sampling where the adversary does not see who took part."""
        return gaussian_releases(s, view)

    def claim(self, s: Setting) -> Claim | None:
        """The paper's accounting is the proof; there is no separate claim."""
        return None

    def clip_norm(self, s: Setting) -> float | None:
        """C."""
        return self.clip

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Nothing beyond what every run rests on."""
        return ()
