"""Noisy-FedProx (convergent f-DP analysis): Noisy-FedAvg with a proximal gradient alpha (w_i - w), added after the clip.

The penalty pulls each step back, so that K steps go at most V / alpha far: for large alpha the sensitivity stops growing with K.
The published claim (Theorem 4) stays finite as T grows and fails as Theorem 3 does (docs/privacy.md).
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.methods.base import Setting, Variant
from fedveil.methods.trajectory import UNIT_NOTE, AlongTrajectory, batch_clip, trajectory, upload_std
from fedveil.papers.convergent_dp.convergent_claim import claim_fedprox
from fedveil.training.local import Client, Plain, Proximal


class NoisyFedProx(AlongTrajectory):
    """Noisy-FedAvg with a proximal term (from the convergent f-DP analysis).

    V is `training.batch_clip`, K is `training.local_steps`.

    Args:
        variant: published or proven; they train alike and differ in what is quoted.
        proximal: alpha of the penalty alpha/2 ||w_i - w||^2.
        sigma: noise std of each upload, as the paper states it; None calibrates it from the privacy section.
        smoothness: L of the losses; Theorem 4 speaks only of alpha > L. Not stated in the paper.
        project_to, assumed_smoothness: as in `NoisyFedAvg`.
    """

    name: Literal["noisy-fedprox"] = "noisy-fedprox"
    variant: Variant = "proven"
    proximal: float = Field(0.1, gt=0, allow_inf_nan=False)
    sigma: float | None = Field(None, gt=0, allow_inf_nan=False)
    smoothness: float = Field(10.0, gt=0, allow_inf_nan=False)
    project_to: float | None = Field(None, gt=0, allow_inf_nan=False)
    assumed_smoothness: float | None = Field(None, ge=0, allow_inf_nan=False)

    @property
    def pull(self) -> float:
        return self.proximal

    def client(self, s: Setting) -> Client:
        """Local training with the proximal penalty."""
        return Plain(Proximal(self.proximal))

    def claim(self, s: Setting) -> Claim | None:
        """Theorem 4 as printed, where its condition alpha > L holds."""
        if s.z == 0 or self.proximal <= self.smoothness:
            return None
        mu = claim_fedprox(
            clip=batch_clip(s),
            proximal=self.proximal,
            smoothness=self.smoothness,
            rounds=s.rounds,
            clients=s.cohort,
            noise_std=upload_std(s, trajectory(s, self.proximal)),
        )
        scope = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.FINAL)
        return Claim(
            epsilon_of(mu, s.delta),
            s.delta,
            scope,
            "convergent f-DP analysis, Theorem 4, stated for one sample",
            f"mu = {mu:.4g}; {UNIT_NOTE}",
        )
