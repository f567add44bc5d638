"""Noisy-FedAvg and Noisy-FedProx: clipped SGD steps bound an upload, and noise is added in shares.

The K steps of a client on gradients of norm at most V move the model by at most C_t, so uploads are bounded by construction.

The published claim (Theorem 3) bounds the last model by a value that stays finite as T grows; it fails for constant and cyclic
rates (docs/privacy.md). What is proven instead composes the rounds; training is the same in both variants.

The penalty of Noisy-FedProx pulls each step back, so that K steps move at most V / alpha: for large alpha, the sensitivity stops
growing with K.
The published claim (Theorem 4) stays finite as T grows and fails as Theorem 3 does (docs/privacy.md).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from pydantic import Field

from fedveil.accounting.gaussian import epsilon_of
from fedveil.accounting.types import Adjacency, Claim, Event, Gaussian, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.methods.base import Mean, MethodConfig, Setting, SumServer, Variant, calibrated
from fedveil.methods.projected import Projected, Trajectory, reach
from fedveil.papers.convergent_dp.claim import FedAvgClaim, StepRates, claim_fedprox
from fedveil.training.local import Client, Plain, Proximal
from fedveil.training.optimizer import OptimizerSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


UNIT_NOTE = "the paper's neighbours differ in one sample, which its client covers"
"""A note on the claims: Definition 1 is about a sample, but the proofs let all gradients of its client differ."""


def batch_clip(s: Setting) -> float:
    """Return V. Raises ConfigError if it is not set, or if the optimiser can move further than the clipped gradient."""
    if s.local.batch_clip is None or s.local.steps is None:
        raise ConfigError(
            "Noisy-FedAvg and Noisy-FedProx take K steps with clipped gradients: set training.batch_clip and training.local_steps"
        )
    o = s.local.optimizer
    if o.name != "sgd" or o.momentum or o.weight_decay:
        raise ConfigError(
            "Noisy-FedAvg and Noisy-FedProx bound plain SGD steps: set training.optimizer to sgd without momentum or weight_decay"
        )
    if s.example_clip is not None:
        raise ConfigError("Noisy-FedAvg and Noisy-FedProx add noise to whole uploads: set training.local = 'sgd'")
    if s.sampling == "poisson":
        raise ConfigError("noise in shares needs a known number of uploads: set training.sampling = 'fixed'")
    return s.local.batch_clip


def schedule_of(s: Setting) -> StepRates:
    """Return the name of the learning rate schedule in the theorems."""
    return StepRates(s.local.schedule.replace("-", "_"))


def trajectory(s: Setting, proximal: float = 0.0) -> NDArray[np.float64]:
    """Return C_t, the largest movement of K clipped steps, per round (one value if the rate does not depend on the round)."""
    batch_clip(s)
    return reach(s.local, s.rounds, proximal)


def upload_std(s: Setting, bounds: NDArray[np.float64]) -> float:
    """Return sigma of one upload: z is relative to C_0 and to the noise that the run's view sees."""
    return s.z * float(bounds[0]) / math.sqrt(s.unknown_noises_in(s.scope.view)) if s.z else 0.0


class AlongTrajectory(MethodConfig):
    """K clipped SGD steps, whose largest movement is the clip of an upload; noise on each upload; the (projected) mean."""

    if TYPE_CHECKING:
        sigma: float | None
        project_to: float | None
        assumed_smoothness: float | None

    @property
    def pull(self) -> float:
        """alpha of the proximal steps."""
        return 0.0

    def calibrate(self, s: Setting) -> Setting:
        """Take the noise from sigma, or calibrate it to epsilon by composition (final view: by the bound on the last model)."""
        batch_clip(s)
        if self.project_to is not None and s.server != OptimizerSpec(lr=1.0):
            raise ConfigError(
                "project_to puts the averaged model in the ball: leave training.server_optimizer at sgd with lr = 1"
            )
        if self.assumed_smoothness is not None and self.project_to is None:
            raise ConfigError("assumed_smoothness serves the bound of a projected model: set method.project_to as well")
        if self.sigma is None:
            return calibrated(self, s)
        if s.epsilon is not None or s.noise_multiplier is not None:
            raise ConfigError(
                f"method.sigma = {self.sigma:g} fixes the noise: remove privacy.epsilon and privacy.noise_multiplier"
            )
        unit = upload_std(replace(s, noise_multiplier=1.0), trajectory(s, self.pull))
        return replace(s, noise_multiplier=self.sigma / unit)

    def release(self, s: Setting) -> Trajectory:
        """Return plans whose clip is the largest movement of K clipped steps."""
        bounds = trajectory(s, self.pull)
        return Trajectory(bounds, upload_std(s, bounds))

    def server(self, s: Setting) -> SumServer:
        """Return the plain mean, projected if configured."""
        return Mean() if self.project_to is None else Projected(self.project_to, self.assumed_smoothness)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Return mu_t = f C_t / (sigma sqrt(noise shares unknown to this view)) for the rounds that a client can be in."""
        bounds = trajectory(s, self.pull)
        if s.z == 0:
            return [Unbounded("no noise is added (noise_multiplier = 0)")]
        unknown = s.unknown_noises_in(View.AGGREGATE if view is View.FINAL else view)  # priced as if all models were visible
        mus = s.scope.update_factor * bounds / (upload_std(s, bounds) * math.sqrt(unknown))
        if len(bounds) == 1:
            return [Gaussian(float(mus[0]), s.participations)]
        largest = np.sort(mus)[::-1][: s.participations]
        return [Gaussian(float(np.linalg.norm(largest)))]

    def clip_norm(self, s: Setting) -> float | None:
        """Return the largest bound on an update, that of the first round."""
        return float(trajectory(s, self.pull)[0])

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return the assumption that every sum contains the noise of the other clients."""
        if s.scope.view is View.SERVER:
            return ()
        known = f"those of the {s.colluders} who collude" if s.colluders else "the one that a fellow client knows as its own"
        others = s.unknown_noises_in(View.AGGREGATE)
        return (
            f"at least {others} honest clients add their noise share to every released sum besides {known} "
            "(a round with fewer is charged more)",
        )


class NoisyFedAvg(AlongTrajectory):
    """K clipped SGD steps, noise on each upload, plain mean (from the convergent f-DP analysis).

    V is `training.batch_clip`, K is `training.local_steps`, the schedule is `training.schedule`.

    Args:
        variant: published or proven; they train alike and differ in the stated guarantee.
        sigma: noise std of each upload, as the paper states it; None calibrates it from the privacy section.
        smoothness: L of the losses, which Theorem 3 needs and no network has; not stated in the paper.
        scale: c of Theorem 3 (b) and z of (d).
        project_to: D; each round's global model is projected onto the ball of this diameter around the origin, which bounds the
            privacy loss of the last model alone (final view). Not in the paper.
        assumed_smoothness: L that the bound on the last model may assume; None for the bound that assumes nothing.
    """

    name: Literal["noisy-fedavg"] = "noisy-fedavg"
    proven_difference: ClassVar[str] = (
        "the epsilon is composed over the rounds, or bounded by project_to; the paper's limit fails for constant and cyclic rates"
    )
    variant: Variant = "proven"
    sigma: float | None = Field(None, gt=0, allow_inf_nan=False)
    smoothness: float = Field(10.0, gt=0, allow_inf_nan=False)
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)
    project_to: float | None = Field(None, gt=0, allow_inf_nan=False)
    assumed_smoothness: float | None = Field(None, ge=0, allow_inf_nan=False)

    def claim(self, s: Setting) -> Claim | None:
        """Return Theorem 3 as printed."""
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


class NoisyFedProx(AlongTrajectory):
    """Noisy-FedAvg with a proximal term (from the convergent f-DP analysis).

    V is `training.batch_clip`, K is `training.local_steps`.

    Args:
        variant: published or proven; they train alike and differ in the stated guarantee.
        proximal: alpha of the penalty alpha/2 ||w_i - w||^2.
        sigma: noise std of each upload, as the paper states it; None calibrates it from the privacy section.
        smoothness: L of the losses; Theorem 4 speaks only of alpha > L. Not stated in the paper.
        project_to, assumed_smoothness: as in `NoisyFedAvg`.
    """

    name: Literal["noisy-fedprox"] = "noisy-fedprox"
    proven_difference: ClassVar[str] = (
        "the epsilon is composed over the rounds, or bounded by project_to; the paper's limit fails for constant and cyclic rates"
    )
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
        """Return Theorem 4 as printed, if its condition alpha > L holds."""
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
