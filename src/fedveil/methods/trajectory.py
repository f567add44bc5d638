"""What Noisy-FedAvg and Noisy-FedProx share: K clipped SGD steps bound an upload, and noise is added in shares.

A client's K steps on gradients of norm at most V cannot go further than C_t, so uploads are clipped by construction.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fedveil.accounting.types import Event, Gaussian, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.methods.base import Mean, MethodConfig, Setting, SumServer, calibrated
from fedveil.methods.projected import Projected, Trajectory, reach
from fedveil.papers.convergent_dp.convergent_claim import StepRates
from fedveil.training.optimizer import OptimizerSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

UNIT_NOTE = "the paper's neighbours differ in one sample, which its client covers"
"""What stands beside the claims: Definition 1 speaks of a sample, and the proofs let all gradients of its client differ."""


def batch_clip(s: Setting) -> float:
    """V; an error where it is not set, or where the optimiser could go further than the clipped gradient says."""
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
    """The schedule of learning rates by the name that the theorems use."""
    return StepRates(s.local.schedule.replace("-", "_"))


def trajectory(s: Setting, proximal: float = 0.0) -> NDArray[np.float64]:
    """C_t for each round (one number where the rate does not depend on the round): how far K clipped steps can go."""
    batch_clip(s)
    return reach(s.local, s.rounds, proximal)


def upload_std(s: Setting, bounds: NDArray[np.float64]) -> float:
    """sigma of one upload: z is relative to C_0 and to what the run's view sees."""
    return s.z * float(bounds[0]) / math.sqrt(s.sharers_to(s.scope.view)) if s.z else 0.0


class AlongTrajectory(MethodConfig):
    """K clipped SGD steps, whose reach is the clip of an upload; noise on each upload; the mean, projected where asked."""

    if TYPE_CHECKING:
        sigma: float | None
        project_to: float | None
        assumed_smoothness: float | None

    @property
    def pull(self) -> float:
        """alpha of the proximal steps."""
        return 0.0

    def calibrate(self, s: Setting) -> Setting:
        """Noise from sigma, or for the configured epsilon by composition (final view: by the bound on the last model)."""
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
        """Each round's clip is the longest way that K clipped steps can go."""
        bounds = trajectory(s, self.pull)
        return Trajectory(bounds, upload_std(s, bounds))

    def server(self, s: Setting) -> SumServer:
        """The plain mean, projected where asked."""
        return Mean() if self.project_to is None else Projected(self.project_to, self.assumed_smoothness)

    def releases(self, s: Setting, view: View) -> list[Event]:
        """mu_t = f C_t / (sigma sqrt(noises in the sum that this view does not know)), over the rounds a client may be in."""
        bounds = trajectory(s, self.pull)
        if s.z == 0:
            return [Unbounded("no noise is added (noise_multiplier = 0)")]
        unknown = s.sharers_to(View.AGGREGATE if view is View.FINAL else view)  # as if all models were seen
        mus = s.scope.update_factor * bounds / (upload_std(s, bounds) * math.sqrt(unknown))
        if len(bounds) == 1:
            return [Gaussian(float(mus[0]), s.participations)]
        largest = np.sort(mus)[::-1][: s.participations]
        return [Gaussian(float(np.linalg.norm(largest)))]

    def clip_norm(self, s: Setting) -> float | None:
        """The largest bound on an update, that of the first round."""
        return float(trajectory(s, self.pull)[0])

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """The noise of the others is in every sum."""
        if s.scope.view is View.SERVER:
            return ()
        known = f"those of the {s.colluders} who collude" if s.colluders else "the one that a fellow client knows as its own"
        return (
            f"at least {s.sharers_to(View.AGGREGATE)} honest clients add their noise share to every released sum besides {known} "
            "(a round with fewer is charged more)",
        )
