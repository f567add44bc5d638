"""FedAvg without privacy, and DP-FedAvg (McMahan et al. 2017, 2018)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedveil.accounting.types import Event, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.mechanism.plan import Plan
from fedveil.methods.base import Fixed, MethodConfig, Release, Setting, Weighting, calibrated, gaussian_plan, gaussian_releases
from fedveil.methods.run_cost import check_weights
from fedveil.training.local import Client, Plain, Proximal


class FedAvg(MethodConfig):
    """Federated averaging, optionally with FedProx's proximal term; with `training.local = "dp-sgd"`, silo DP-SGD.

    Args:
        weighting: clients count by their number of examples, or all the same.
        proximal: alpha of the penalty alpha/2 ||w_i - w||^2 (FedProx, Li et al. 2020); 0 for none.
    """

    name: Literal["fedavg"] = "fedavg"
    weighting: Weighting = "examples"
    proximal: float = Field(0.0, ge=0)

    def calibrate(self, s: Setting) -> Setting:
        """Calibrate the noise of DP-SGD inside the clients; other runs add no noise."""
        if s.example_clip is not None:
            setting = calibrated(self, s)
            check_weights(self, setting)
            return setting
        if s.epsilon is not None or s.noise_multiplier is not None:
            raise ConfigError(
                "fedavg adds no noise, so privacy.epsilon and privacy.noise_multiplier have no meaning here: "
                "remove them, choose method.name = 'dp-fedavg', or set training.local = 'dp-sgd'"
            )
        return s

    def release(self, s: Setting) -> Release:
        """Release updates unchanged, or after DP-SGD."""
        return Fixed(gaussian_plan(s, 1.0) if s.example_clip is not None else Plan())

    def client(self, s: Setting) -> Client:
        """Return plain or proximal local training."""
        return Plain(Proximal(self.proximal) if self.proximal else None)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return the releases of DP-SGD; nothing can be proven without clip and noise."""
        if s.example_clip is not None:
            return gaussian_releases(s, view)
        return [Unbounded("fedavg neither clips nor adds noise")]

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return that sizes are public if DP-SGD is weighted by them; DP-SGD itself uses only the nominal number of records."""
        public = s.example_clip is not None and self.weighting == "examples"
        return ("each client's number of examples is public",) if public else ()


class DPFedAvg(MethodConfig):
    """Client-level DP-FedAvg with flat clipping and a fixed denominator q N (the paper's estimator f_f); DP-FedProx.

    Args:
        clip: C, L2 bound on each client's update.
        proximal: alpha of the penalty alpha/2 ||w_i - w||^2 of local training (FedProx, Li et al. 2020); 0 for none.
    """

    name: Literal["dp-fedavg"] = "dp-fedavg"
    clip: float = Field(1.0, gt=0, allow_inf_nan=False)
    proximal: float = Field(0.0, ge=0, allow_inf_nan=False)

    def release(self, s: Setting) -> Release:
        """Use the same clip and noise in every round."""
        return Fixed(gaussian_plan(s, self.clip))

    def client(self, s: Setting) -> Client:
        """Return plain or proximal local training, on which the guarantee does not depend."""
        return Plain(Proximal(self.proximal) if self.proximal else None)
