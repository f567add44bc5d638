"""Noisy-FedAvg (paper 002): K clipped SGD steps a round, Gaussian noise on each upload, plain mean.

The published claim (Theorem 3) bounds the last model by a value that stays finite as T grows; it fails for constant and cyclic
rates (docs/privacy.md). What is proven instead composes the rounds; training is the same in both variants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import Field

from fedveil.errors import ConfigError
from fedveil.local import Objective, Plain, State
from fedveil.methods.base import MethodConfig, Setting, Variant, Weighting, calibrated, mean
from fedveil.privacy.gaussian import epsilon_of
from fedveil.privacy.noisy_fedavg import Schedule, claim_fedavg, shift
from fedveil.privacy.types import Adjacency, Claim, Event, Gaussian, Scope, Unbounded, Unit, View
from fedveil.release.plan import Plan, Policy, Released, Upload

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


class NoisyFedAvg(MethodConfig):
    """Noisy-FedAvg; V is `training.batch_clip`, K is `training.local_steps`, the schedule is `training.schedule`.

    Args:
        variant: published or proven; they train alike and differ in what is quoted.
        sigma: noise std of each upload, as the paper states it; None calibrates it from the privacy section.
        smoothness: L of the losses, which Theorem 3 needs and no network has; not stated in the paper.
        scale: z of Theorem 3 (d).
    """

    name: Literal["noisy-fedavg"] = "noisy-fedavg"
    variant: Variant = "proven"
    sigma: float | None = Field(None, gt=0, allow_inf_nan=False)
    smoothness: float = Field(10.0, gt=0, allow_inf_nan=False)
    scale: float = Field(1.0, gt=0, allow_inf_nan=False)

    @property
    def weighting(self) -> Weighting:
        """The plain mean."""
        return "uniform"

    def calibrate(self, s: Setting) -> Setting:
        """Noise from sigma, or for the configured epsilon by composition."""
        return calibrated_trajectory(self, s, self.sigma)

    def policy(self, s: Setting) -> Policy:
        """Each round's clip is the longest way that K clipped steps can go."""
        return Trajectory(trajectory(s), upload_std(s, trajectory(s)))

    def objective(self, s: Setting) -> Objective:
        """Plain local training."""
        return Plain()

    def aggregate(self, uploads: Sequence[Upload], model: Tensor) -> Tensor:
        """The plain mean."""
        return mean(uploads)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """Composition over the rounds; the final view is covered by the aggregate one."""
        return composed(s, view, trajectory(s))

    def claim(self, s: Setting) -> Claim | None:
        """Theorem 3 as printed."""
        bound, m = trajectory(s), s.cohort
        mu = claim_fedavg(
            Schedule(s.local.schedule),
            learning_rate=s.local.optimizer.lr,
            clip=batch_clip(s),
            steps=s.steps,
            smoothness=self.smoothness,
            rounds=s.rounds,
            clients=m,
            noise_std=upload_std(s, bound),
            scale=self.scale,
        )
        scope = Scope(Unit.CLIENT, Adjacency.REPLACE_ONE, View.FINAL)
        return Claim(epsilon_of(mu, s.delta), s.delta, scope, f"paper 002, Theorem 3, {s.local.schedule} rates", f"mu = {mu:.4g}")

    def clip_norm(self, s: Setting) -> float | None:
        """The largest bound on an update, that of the first round."""
        return float(trajectory(s)[0])

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """The noise of the others is in every sum."""
        return share_assumptions(s)


# --- shared with Noisy-FedProx -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trajectory:
    """The policy of paper 002: clip C_t known in advance, constant noise std on each upload."""

    bounds: NDArray[np.float64]
    noise_std: float

    def start(self) -> State:
        """No state."""
        return {}

    def plan(self, released: Released, state: State) -> Plan:
        """Clip to C_t; C_t is what K clipped steps cannot exceed, so the clip only guards against rounding."""
        bound = float(self.bounds[min(released.round, len(self.bounds) - 1)])
        return Plan(clip=bound, noise_std=self.noise_std, place="upload")

    def observe(self, state: State, upload: Upload) -> State:
        """Nothing to learn."""
        return state


def batch_clip(s: Setting) -> float:
    """V; an error where it is not set, or where the optimiser could go further than the clipped gradient says."""
    if s.local.batch_clip is None or s.local.steps is None:
        raise ConfigError(
            "paper 002 clips each batch gradient to V and takes K steps: set training.batch_clip and training.local_steps"
        )
    o = s.local.optimizer
    if o.name != "sgd" or o.momentum or o.weight_decay:
        raise ConfigError("paper 002 bounds plain SGD steps: set training.optimizer to sgd without momentum or weight_decay")
    if s.sampling == "poisson":
        raise ConfigError("noise in shares needs a known number of uploads: set training.sampling = 'fixed'")
    return s.local.batch_clip


def trajectory(s: Setting, proximal: float = 0.0) -> NDArray[np.float64]:
    """C_t for each round (one number where the rate does not depend on the round): how far K clipped steps can go."""
    v, steps = batch_clip(s), s.steps
    rounds = s.rounds if s.local.schedule in ("stage-wise", "iterative") else 1
    rates = [[s.local.learning_rate(t, k, steps) for k in range(steps)] for t in range(rounds)]
    return np.array([shift(r, v, 1, proximal=proximal, adjacency=Adjacency.ZERO_OUT) for r in rates])


def upload_std(s: Setting, bounds: NDArray[np.float64]) -> float:
    """sigma of one upload: z is relative to C_0 and to what the run's view sees."""
    shares = 1 if s.scope.view is View.SERVER else s.sharers
    return s.z * float(bounds[0]) / math.sqrt(shares)


def composed(s: Setting, view: View, bounds: NDArray[np.float64]) -> list[Event]:
    """mu_t = f C_t / (sigma sqrt(noisy uploads that this view sees added up)), over the rounds a client may be in."""
    if s.z == 0:
        return [Unbounded("no noise is added (noise_multiplier = 0)")]
    shares = 1 if view is View.SERVER else s.sharers
    mus = s.scope.update_factor * bounds / (upload_std(s, bounds) * math.sqrt(shares))
    if len(bounds) == 1:
        return [Gaussian(float(mus[0]), s.participations)]
    largest = np.sort(mus)[::-1][: s.participations]
    return [Gaussian(float(np.linalg.norm(largest)))]


def calibrated_trajectory(method: NoisyFedAvg, s: Setting, sigma: float | None) -> Setting:
    """The setting with z known, from sigma or from the target epsilon."""
    if sigma is None:
        batch_clip(s)
        return calibrated(method, s)
    if s.epsilon is not None or s.noise_multiplier is not None:
        raise ConfigError(f"method.sigma = {sigma:g} fixes the noise: remove privacy.epsilon and privacy.noise_multiplier")
    reference = replace(s, noise_multiplier=1.0)
    return replace(s, noise_multiplier=sigma / upload_std(reference, trajectory(s)))


def share_assumptions(s: Setting) -> tuple[str, ...]:
    """What noise in shares rests on."""
    if s.scope.view is View.SERVER:
        return ()
    return (
        f"at least {s.sharers} honest clients add their noise share to every released sum (a round with fewer is charged more)",
    )
