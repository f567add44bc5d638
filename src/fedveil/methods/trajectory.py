"""What Noisy-FedAvg and Noisy-FedProx share: K clipped SGD steps bound an upload, and noise is added in shares.

A client's K steps on gradients of norm at most V cannot go further than C_t, so uploads are clipped by construction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedveil.accounting.last_iterate import final_mu, final_mu_constant
from fedveil.accounting.types import Adjacency, Event, Gaussian, Unbounded, View
from fedveil.errors import ConfigError
from fedveil.methods.base import Method, Setting, SumServer, Total, calibrated
from fedveil.papers.convergent_dp.convergent_claim import Schedule, lipschitz, shift
from fedveil.release.plan import Plan, Released, Upload
from fedveil.release.release_layout import ReleaseLayout
from fedveil.training.local import LocalSpec, State
from fedveil.training.optimizer import OptimizerSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_ROUNDING = 1 - 1e-6
"""A projected float32 model is scaled this much further, so that its exact norm stays within the ball."""

_FLOATS = 2.0**-20
"""What float32 puts between two models in a round, in diameters of the ball: decoding the mean, adding it, projecting."""


UNIT_NOTE = "the paper's neighbours differ in one sample, which its client covers"
"""What stands beside the claims: Definition 1 speaks of a sample, and the proofs let all gradients of its client differ."""


@dataclass(frozen=True)
class Trajectory:
    """The policy of the convergent f-DP analysis: clip C_t known in advance, constant noise std on each upload."""

    bounds: NDArray[np.float64]
    noise_std: float
    common: ClassVar[bool] = True

    def start(self) -> State:
        return {}

    def plan(self, released: Released, state: State) -> Plan:
        """Clip to C_t; C_t is what K clipped steps cannot exceed, so the clip only guards against rounding."""
        bound = float(self.bounds[min(released.round, len(self.bounds) - 1)])
        return Plan(clip=bound, noise_std=self.noise_std, place="upload")

    def observe(self, state: State, upload: Upload) -> State:
        return state


@dataclass(frozen=True)
class Ball(SumServer):
    """The projection of each round's global model on a ball around the origin, for the bound on the last model alone.

    Args:
        diameter: D, or None for no projection. smoothness: L that the bound assumes, or None for the bound that assumes none.
    """

    diameter: float | None
    smoothness: float | None

    def bounds_last_model(self, s: Setting) -> bool:
        """Whether the final view of such a run has a bound of its own."""
        return self.diameter is not None and s.scope.view is not View.SERVER

    def step(self, s: Setting, state: State, total: Total) -> tuple[State, Tensor]:
        """The plain mean, or what is left of it inside the ball."""
        moved, model = total.vector, total.start
        if self.diameter is None:
            return state, moved
        target = (model + moved).double()
        radius, norm = self.diameter / 2, float(target.norm())
        if norm <= radius * _ROUNDING:
            return state, moved
        return state, (target * (radius / norm * _ROUNDING) - model.double()).to(model.dtype)


# --- settings ----------------------------------------------------------------------------------------------------------


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


def schedule_of(s: Setting) -> Schedule:
    """The schedule of learning rates by the name that the theorems use."""
    return Schedule(s.local.schedule.replace("-", "_"))


def rates(spec: LocalSpec, rounds: int) -> list[list[float]]:
    """eta_{k,t} for each round; one round where they do not depend on the round."""
    steps = int(spec.steps or 0)
    distinct = rounds if spec.schedule in ("stage-wise", "iterative") else 1
    return [[spec.learning_rate(t, k, steps) for k in range(steps)] for t in range(distinct)]


def trajectory(s: Setting, proximal: float = 0.0) -> NDArray[np.float64]:
    """C_t for each round (one number where the rate does not depend on the round): how far K clipped steps can go."""
    batch_clip(s)
    return _trajectory(s.local, s.rounds, proximal)


@lru_cache(maxsize=16)
def _trajectory(spec: LocalSpec, rounds: int, proximal: float) -> NDArray[np.float64]:
    v = float(spec.batch_clip or 0.0)
    reach = [shift(r, v, 1, proximal=proximal, adjacency=Adjacency.ZERO_OUT) for r in rates(spec, rounds)]
    bounds = np.array(reach)
    bounds.flags.writeable = False
    return bounds


def upload_std(s: Setting, bounds: NDArray[np.float64]) -> float:
    """sigma of one upload: z is relative to C_0 and to what the run's view sees."""
    return s.z * float(bounds[0]) / math.sqrt(s.sharers_to(s.scope.view)) if s.z else 0.0


def calibrated_trajectory(method: Method, s: Setting, sigma: float | None, proximal: float, ball: Ball) -> Setting:
    """The setting with z known, from sigma or from the target epsilon."""
    batch_clip(s)
    if ball.diameter is not None and s.server != OptimizerSpec(lr=1.0):
        raise ConfigError("project_to puts the averaged model in the ball: leave training.server_optimizer at sgd with lr = 1")
    if ball.smoothness is not None and ball.diameter is None:
        raise ConfigError("assumed_smoothness serves the bound of a projected model: set method.project_to as well")
    if sigma is None:
        return calibrated(method, s)
    if s.epsilon is not None or s.noise_multiplier is not None:
        raise ConfigError(f"method.sigma = {sigma:g} fixes the noise: remove privacy.epsilon and privacy.noise_multiplier")
    return replace(s, noise_multiplier=sigma / upload_std(replace(s, noise_multiplier=1.0), trajectory(s, proximal)))


# --- what it costs -----------------------------------------------------------------------------------------------------


def cost(s: Setting, view: View, proximal: float, ball: Ball) -> list[Event]:
    """Composition over the rounds; for the final view of a projected run the bound on the last model, where that is smaller.

    Not for runs that promise something to the server: their uploads are averaged in float32 one by one, whose error has no bound.
    """
    bounds = trajectory(s, proximal)
    events = composed(s, view, bounds)
    if view is not View.FINAL or not ball.bounds_last_model(s) or isinstance(events[0], Unbounded):
        return events
    mu = math.sqrt(sum(e.count * e.mu**2 for e in events if isinstance(e, Gaussian)))
    last = last_model_mu(s, proximal, ball)
    return [Gaussian(last)] if last < mu else events


def composed(s: Setting, view: View, bounds: NDArray[np.float64]) -> list[Event]:
    """mu_t = f C_t / (sigma sqrt(noises in the sum that this view does not know)), over the rounds a client may be in."""
    if s.z == 0:
        return [Unbounded("no noise is added (noise_multiplier = 0)")]
    unknown = s.sharers_to(View.AGGREGATE if view is View.FINAL else view)  # without the last-model bound, as if all were seen
    mus = s.scope.update_factor * bounds / (upload_std(s, bounds) * math.sqrt(unknown))
    if len(bounds) == 1:
        return [Gaussian(float(mus[0]), s.participations)]
    largest = np.sort(mus)[::-1][: s.participations]
    return [Gaussian(float(np.linalg.norm(largest)))]


def last_model_mu(s: Setting, proximal: float, ball: Ball) -> float:
    """mu of the last model of a projected run, by shifted interpolation (docs/privacy.md, section 5).

    The mean of n uploads, k of them honest, has noise std sigma sqrt(k) / n; one client moves it by f C_t / n. Without smoothness
    two models at distance d end a round at most d + 2 C_t apart, whatever the data.

    What leaves is truncated to a grid, which no Lipschitz map is: with smoothness two models end up to h sqrt(d) further apart,
    h the grid step of one upload. Shifts are whole grid steps of the sum, which leaves h sqrt(d) / n. Floats add theirs.
    """
    if ball.diameter is None:
        raise ConfigError("the bound on the last model needs a ball: set method.project_to")
    bounds, sigma = trajectory(s, proximal), upload_std(s, trajectory(s, proximal))
    cell = grid_step(s, bounds, sigma) * math.sqrt(s.layout.dimension)
    rounded = cell / s.cohort + _FLOATS * ball.diameter
    run = (s.local, s.rounds, proximal, ball.diameter)
    mu = _unit_last_model_mu(*run, None, 2.0, rounded)
    if ball.smoothness is not None:
        mu = min(mu, _unit_last_model_mu(*run, ball.smoothness, s.scope.update_factor / s.cohort, cell + rounded))
    return mu * s.cohort / (sigma * math.sqrt(s.sharers_to(View.FINAL)))


def grid_step(s: Setting, bounds: NDArray[np.float64], sigma: float) -> float:
    """The grid step of an upload with noise sigma, the largest of all rounds."""
    plan = Plan(clip=float(bounds.max()), noise_std=sigma * s.update_noise, place="upload")
    return max(2.0**k for _, k in ReleaseLayout(s.layout, bits=s.grid_bits).grid(plan))


@lru_cache(maxsize=16)
def _unit_last_model_mu(
    spec: LocalSpec, rounds: int, proximal: float, diameter: float, smoothness: float | None, share: float, extra: float
) -> float:
    """One of its two bounds for noise std 1 on the model; mu is inverse to the std. Each gamma is share C_t + extra."""
    bounds, each = _trajectory(spec, rounds, proximal), rates(spec, rounds)
    rhos = np.array([1.0 if smoothness is None else lipschitz(r, smoothness, proximal=proximal) for r in each])
    gammas = share * bounds + extra
    if len(gammas) == 1:  # all rounds are alike: in closed form
        return final_mu_constant(float(rhos[0]), float(gammas[0]), rounds, diameter, 1.0)
    gammas[0] += diameter  # the first model may lie outside the ball, where floats are coarser; after it two models are D apart
    return final_mu(rhos, gammas, np.full(rounds, diameter), np.ones(rounds))


def trajectory_assumptions(s: Setting, ball: Ball) -> tuple[str, ...]:
    """What noise in shares, and the bound on the last model, rest on."""
    found: list[str] = []
    if s.scope.view is not View.SERVER:
        known = f"those of the {s.colluders} who collude" if s.colluders else "the one that a fellow client knows as its own"
        found.append(
            f"at least {s.sharers_to(View.AGGREGATE)} honest clients add their noise share to every released sum besides {known} "
            "(a round with fewer is charged more)"
        )
    if ball.bounds_last_model(s):
        found += [
            "final view: the adversary sees no model but the last and no figure of the others, such as each round's in "
            "history.csv, and no round fails or has fewer honest uploads than planned",
            "final view: the last digits of the last model, below the grid step of the mean or by the rounding of float32, tell "
            "nothing of earlier rounds",
        ]
        if ball.smoothness is not None:
            found.append(
                f"final view: every client's loss is {ball.smoothness:g}-smooth, with gradients and steps as float32 computes "
                "them, which no network's is known to be"
            )
    return tuple(found)
