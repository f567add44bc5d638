"""The projection of each round's global model on a ball, and the bound on the last model alone that it allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, final

import numpy as np

from fedveil.accounting.last_iterate import final_mu, final_mu_constant, lipschitz, shift
from fedveil.accounting.types import Adjacency, View
from fedveil.mechanism.plan import Plan
from fedveil.methods.method import Method, Schedule, Summed, SumServer, weighting_of
from fedveil.methods.setting import Setting
from fedveil.release.release_layout import ReleaseLayout
from fedveil.training.local import LocalSpec, Plain, Proximal, State
from fedveil.training.optimizer import OptimizerSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

_ROUNDING = 1 - 1e-6
"""A projected float32 model is scaled this much further, so that its exact norm stays within the ball."""

_FLOATS = 2.0**-20
"""What float32 puts between two models in a round, in diameters of the ball: decoding the mean, adding it, projecting."""


@final
@dataclass(frozen=True)
class Trajectory(Schedule):
    """The plans of the convergent f-DP analysis: clip C_t known in advance, constant noise std on each upload.

    Args:
        bounds: C_t of each round, or one number for all. C_t is what K clipped steps cannot exceed, so the clip only guards
            against rounding.
    """

    bounds: NDArray[np.float64]
    noise_std: float

    def plan(self, s: Setting, t: int) -> Plan:
        bound = float(self.bounds[min(t, len(self.bounds) - 1)])
        return Plan(clip=bound, noise_std=self.noise_std, place="upload")


@final
@dataclass(frozen=True)
class Projected(SumServer):
    """The mean, and the model that it leads to projected on a ball around the origin; it prices the last model alone.

    Args:
        diameter: D. smoothness: L that the price may assume of every client's loss, or None to assume nothing.
    """

    diameter: float
    smoothness: float | None = None

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        moved, model = total.vector, total.start
        target = (model + moved).double()
        radius, norm = self.diameter / 2, float(target.norm())
        if norm <= radius * _ROUNDING:
            return state, moved
        return state, (target * (radius / norm * _ROUNDING) - model.double()).to(model.dtype)

    def last_mu(self, s: Setting, steps: Trajectory, pull: float | None) -> float:
        """Return mu of the last model, by shifted interpolation (docs/privacy.md, section 5).

        The mean of n uploads, k of them honest, has noise std sigma sqrt(k) / n; one client moves it by f C_t / n. Without
        smoothness two models at distance d end a round at most d + 2 C_t apart, whatever the clients do.

        What leaves is truncated to a grid, which no Lipschitz map is: with smoothness two models end up to h sqrt(d) further
        apart, h the grid step of one upload. Shifts are whole grid steps of the sum, which leaves h sqrt(d) / n. Floats add
        theirs.

        Args:
            pull: alpha of the clients' proximal steps on clipped gradients, 0 for none; None where they train in another way,
                of which smoothness says nothing.
        """
        cell = _grid_step(s, steps) * math.sqrt(s.layout.dimension)
        rounded = cell / s.cohort + _FLOATS * self.diameter
        run = (s.local, s.rounds, tuple(steps.bounds.tolist()), self.diameter)
        mu = _unit_last_mu(*run, None, 2.0, rounded)
        if self.smoothness is not None and pull is not None:
            mu = min(mu, _unit_last_mu(*run, (pull, self.smoothness), s.scope.update_factor / s.cohort, cell + rounded))
        return mu * s.cohort / (steps.noise_std * math.sqrt(s.sharers_to(View.FINAL)))

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return what its price rests on."""
        found = [
            "final view: the adversary sees no model but the last and no figure of the others, such as each round's in "
            "history.csv, and no round fails or has fewer honest uploads than planned",
            "final view: the last digits of the last model, below the grid step of the mean or by the rounding of float32, tell "
            "nothing of earlier rounds",
        ]
        if self.smoothness is not None:
            found.append(
                f"final view: every client's loss is {self.smoothness:g}-smooth, with gradients and steps as float32 computes "
                "them, which no network's is known to be"
            )
        return tuple(found)


def last_model_mu(method: Method, s: Setting) -> float | None:
    """Return mu of the last model alone, or None where the parts of the method allow no bound but that of all rounds.

    A projected mean of equal weights has one, of releases along a trajectory and nothing beside them. Runs that promise something
    to the server have none: their uploads are averaged in float32 one by one, whose error has no bound. The bound says nothing
    about an average of several models.
    """
    server = method.server(s)
    if not isinstance(server, Projected) or s.scope.view is View.SERVER or s.z == 0:
        return None
    steps = method.release(s)
    if not isinstance(steps, Trajectory):
        return None
    alone = not method.extras(s) and weighting_of(method) == "uniform" and s.server == OptimizerSpec(lr=1.0)
    return server.last_mu(s, steps, _pull(method, s)) if alone and s.final_model == "last" else None


def assumptions_of(method: Method, s: Setting) -> tuple[str, ...]:
    """Return what the proven bound rests on beyond what every run rests on: of the method, and of a projection."""
    server, found = method.server(s), method.assumptions(s)
    return (*found, *server.assumptions(s)) if isinstance(server, Projected) and s.scope.view is not View.SERVER else found


def rates(spec: LocalSpec, rounds: int) -> list[list[float]]:
    """eta_{k,t} for each round; one round where they do not depend on the round."""
    steps = int(spec.steps or 0)
    distinct = rounds if spec.schedule in ("stage-wise", "iterative") else 1
    return [[spec.learning_rate(t, k, steps) for k in range(steps)] for t in range(distinct)]


@lru_cache(maxsize=16)
def reach(spec: LocalSpec, rounds: int, proximal: float) -> NDArray[np.float64]:
    """C_t for each round (one number where the rate does not depend on the round): how far K clipped steps can go."""
    v = float(spec.batch_clip or 0.0)
    bounds = np.array([shift(r, v, 1, proximal=proximal, adjacency=Adjacency.ZERO_OUT) for r in rates(spec, rounds)])
    bounds.flags.writeable = False
    return bounds


def _pull(method: Method, s: Setting) -> float | None:
    """alpha of the clients' proximal steps, or None where they are no plain SGD on clipped gradients."""
    client, o = method.client(s), s.local.optimizer
    plain = o.name == "sgd" and not o.momentum and not o.weight_decay and s.local.batch_clip is not None
    if type(client) is not Plain or not plain or s.local.steps is None:
        return None
    if client.penalty is None:
        return 0.0
    return client.penalty.alpha if isinstance(client.penalty, Proximal) else None


def _grid_step(s: Setting, steps: Trajectory) -> float:
    """The grid step of an upload, the largest of all rounds."""
    plan = Plan(clip=float(steps.bounds.max()), noise_std=steps.noise_std * s.update_noise, place="upload")
    return max(2.0**k for _, k in ReleaseLayout(s.layout, bits=s.grid_bits).grid(plan))


@lru_cache(maxsize=16)
def _unit_last_mu(
    spec: LocalSpec,
    rounds: int,
    bounds: tuple[float, ...],
    diameter: float,
    smooth: tuple[float, float] | None,
    share: float,
    extra: float,
) -> float:
    """One of the two bounds for noise std 1 on the model; mu is inverse to the std. Each gamma is share C_t + extra.

    Args:
        smooth: alpha of the proximal steps and L of the losses, or None for the bound that assumes nothing.
    """
    each = rates(spec, rounds)
    rhos = np.array([1.0 if smooth is None else lipschitz(r, smooth[1], proximal=smooth[0]) for r in each])
    gammas = share * np.array(bounds) + extra
    if len(gammas) == 1:  # all rounds are alike: in closed form
        return final_mu_constant(float(rhos[0]), float(gammas[0]), rounds, diameter, 1.0)
    gammas[0] += diameter  # the first model may lie outside the ball, where floats are coarser; after it two models are D apart
    return final_mu(rhos, gammas, np.full(rounds, diameter), np.ones(rounds))
