"""DP-FedAvg (McMahan et al. 2018): clip each client's update as a whole, add Gaussian noise, average uniformly."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedveil.methods.base import Fixed, MethodConfig, Release, Setting, gaussian_plan


class DPFedAvg(MethodConfig):
    """Client-level DP-FedAvg with flat clipping and a fixed denominator q N (the paper's estimator f_f).

    Args:
        clip: C, L2 bound on each client's update.
    """

    name: Literal["dp-fedavg"] = "dp-fedavg"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)

    def release(self, s: Setting) -> Release:
        """The same clip and noise in every round."""
        return Fixed(gaussian_plan(s, self.clip))
