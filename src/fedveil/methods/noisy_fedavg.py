"""Noisy-FedAvg (convergent f-DP analysis): K clipped SGD steps a round, Gaussian noise on each upload, plain mean.

The published claim (Theorem 3) bounds the last model by a value that stays finite as T grows; it fails for constant and cyclic
rates (docs/privacy.md). What is proven instead composes the rounds; training is the same in both variants.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, Claim, Scope, Unit, View
from fedveil.methods.base import Setting, Variant
from fedveil.methods.trajectory import UNIT_NOTE, AlongTrajectory, batch_clip, schedule_of, trajectory, upload_std
from fedveil.papers.convergent_dp.convergent_claim import FedAvgClaim


class NoisyFedAvg(AlongTrajectory):
    """K clipped SGD steps, noise on each upload, plain mean (from the convergent f-DP analysis).

    V is `training.batch_clip`, K is `training.local_steps`, the schedule is `training.schedule`.

    Args:
        variant: published or proven; they train alike and differ in what is quoted.
        sigma: noise std of each upload, as the paper states it; None calibrates it from the privacy section.
        smoothness: L of the losses, which Theorem 3 needs and no network has; not stated in the paper.
        scale: c of Theorem 3 (b) and z of (d).
        project_to: D; each round's global model is projected on the ball of this diameter around the origin, which bounds what
            the last model alone tells (final view). Not in the paper.
        assumed_smoothness: L that the bound on the last model may assume; None for the bound that assumes nothing.
    """

    name: Literal["noisy-fedavg"] = "noisy-fedavg"
    variant: Variant = "proven"
    sigma: float | None = Field(None, gt=0, allow_inf_nan=False)
    smoothness: float = Field(10.0, gt=0, allow_inf_nan=False)
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    project_to: float | None = Field(None, gt=0, allow_inf_nan=False)
    assumed_smoothness: float | None = Field(None, ge=0, allow_inf_nan=False)

    def claim(self, s: Setting) -> Claim | None:
        """Theorem 3 as printed."""
        if s.z == 0:
            return None
        mu = FedAvgClaim(
            schedule_of(s),
            learning_rate=s.local.optimizer.lr,
            clip=batch_clip(s),
            steps=s.steps,
            smoothness=self.smoothness,
            rounds=s.rounds,
            clients=s.cohort,
            noise_std=upload_std(s, trajectory(s)),
            scale=self.scale,
        ).mu
        scope = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.FINAL)
        return Claim(
            epsilon_of(mu, s.delta),
            s.delta,
            scope,
            f"convergent f-DP analysis, Theorem 3, {s.local.schedule} rates, stated for one sample",
            f"mu = {mu:.4g}; {UNIT_NOTE}",
        )
