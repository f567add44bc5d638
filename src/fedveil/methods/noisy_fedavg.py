"""Noisy-FedAvg (convergent f-DP analysis): K clipped SGD steps a round, Gaussian noise on each upload, plain mean.

The published claim (Theorem 3) bounds the last model by a value that stays finite as T grows; it fails for constant and cyclic
rates (docs/privacy.md). What is proven instead composes the rounds; training is the same in both variants.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, Claim, Event, Scope, Unit, View
from fedveil.methods.base import MethodConfig, Setting, Variant
from fedveil.methods.trajectory import (
    UNIT_NOTE,
    Ball,
    Trajectory,
    batch_clip,
    calibrated_trajectory,
    cost,
    schedule_of,
    trajectory,
    trajectory_assumptions,
    upload_std,
)
from fedveil.papers.convergent_dp.convergent_claim import FedAvgClaim
from fedveil.release.plan import Policy


class NoisyFedAvg(MethodConfig):
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
    bounds_last_model: ClassVar[bool] = True
    variant: Variant = "proven"
    sigma: float | None = Field(None, gt=0, allow_inf_nan=False)
    smoothness: float = Field(10.0, gt=0, allow_inf_nan=False)
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    project_to: float | None = Field(None, gt=0, allow_inf_nan=False)
    assumed_smoothness: float | None = Field(None, ge=0, allow_inf_nan=False)

    @property
    def ball(self) -> Ball:
        """Where the global model is kept."""
        return Ball(self.project_to, self.assumed_smoothness)

    def calibrate(self, s: Setting) -> Setting:
        """Noise from sigma, or for the configured epsilon by composition (final view: by the bound on the last model)."""
        return calibrated_trajectory(self, s, self.sigma, 0.0, self.ball)

    def policy(self, s: Setting) -> Policy:
        """Each round's clip is the longest way that K clipped steps can go."""
        return Trajectory(trajectory(s), upload_std(s, trajectory(s)))

    def server(self, s: Setting) -> Ball:
        """The plain mean, projected where asked."""
        return self.ball

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Composition over the rounds, or the bound on the last model."""
        return cost(s, view, 0.0, self.ball)

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

    def clip_norm(self, s: Setting) -> float | None:
        """The largest bound on an update, that of the first round."""
        return float(trajectory(s)[0])

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """The noise of the others is in every sum."""
        return trajectory_assumptions(s, self.ball)
