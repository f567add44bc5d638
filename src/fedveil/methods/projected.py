"""The projection of each round's global model on a ball, and the resulting bound for the last model alone."""

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
"""Extra factor on a projected float32 model, so that its exact norm stays within the ball."""

_FLOATS = 2.0**-20
"""Float32 error per round between two models, in diameters of the ball: decoding the mean, adding it, projecting."""


@final
@dataclass(frozen=True)
class Trajectory(Schedule):
    """Schedule of the convergent f-DP analysis: clip C_t known in advance, constant noise std on each upload.

    Args:
        bounds: C_t of each round, or one number for all. K clipped steps cannot exceed C_t, so the clip only guards against
            rounding.
    """

    bounds: NDArray[np.float64]
    noise_std: float

    def plan(self, s: Setting, t: int) -> Plan:
        bound = float(self.bounds[min(t, len(self.bounds) - 1)])
        return Plan(clip=bound, noise_std=self.noise_std, place="upload")


@final
@dataclass(frozen=True)
class Projected(SumServer):
    """Server that takes the mean and projects the new model on a ball around the origin; it can price the last model alone.

    Args:
        diameter: D. smoothness: L, assumed for every client's loss in the price, or None for no assumption.
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
        smoothness, two models at distance d end a round at most d + 2 C_t apart, for any client behaviour.

        Releases are truncated to a grid, and truncation is not Lipschitz: with smoothness two models end up to h sqrt(d) further
        apart, for the grid step h of one upload. Shifts are whole grid steps of the sum, which adds h sqrt(d) / n. Float32 adds
        its error.

        Args:
            pull: alpha of the clients' proximal steps on clipped gradients, 0 for none; None for other training, to which
                smoothness does not apply.
        """
        cell = _grid_step(s, steps) * math.sqrt(s.layout.dimension)
        rounded = cell / s.cohort + _FLOATS * self.diameter
        run = (s.local, s.rounds, tuple(steps.bounds.tolist()), self.diameter)
        mu = _unit_last_mu(*run, None, 2.0, rounded)
        if self.smoothness is not None and pull is not None:
            mu = min(mu, _unit_last_mu(*run, (pull, self.smoothness), s.scope.update_factor / s.cohort, cell + rounded))
        return mu * s.cohort / (steps.noise_std * math.sqrt(s.unknown_noises_in(View.FINAL)))

    def assumptions(self, s: Setting) -> tuple[str, ...]:
        """Return the assumptions of the price."""
        texts = [
            "final view: the adversary sees no model but the last and no figure of the others, such as each round's in "
            "history.csv, and no round fails or has fewer honest uploads than planned",
            "final view: the last digits of the last model, below the grid step of the mean or by the rounding of float32, tell "
            "nothing of earlier rounds",
        ]
        if self.smoothness is not None:
            texts.append(
                f"final view: every client's loss is {self.smoothness:g}-smooth, with gradients and steps as float32 computes "
                "them, which no network's is known to be"
            )
        return tuple(texts)


def last_model_mu(method: Method, s: Setting) -> float | None:
    """Return mu of the last model alone, or None if the method allows only the bound for all rounds.

    The bound holds for a projected mean of equal weights, with releases along a `Trajectory` and without extras. It does not hold
    in the server view, where uploads are averaged in float32 one by one with an unbounded error, nor for an average of models.
    """
    server = method.server(s)
    if not isinstance(server, Projected) or s.scope.view is View.SERVER or s.z == 0:
        return None
    steps = method.release(s)
    if not isinstance(steps, Trajectory):
        return None
    bounded = not method.extras(s) and weighting_of(method) == "uniform" and s.server == OptimizerSpec(lr=1.0)
    return server.last_mu(s, steps, _pull(method, s)) if bounded and s.final_model == "last" else None


def assumptions_of(method: Method, s: Setting) -> tuple[str, ...]:
    """Return the assumptions of the proven bound beyond those of every run: of the method, and of a projection."""
    server, common = method.server(s), method.assumptions(s)
    return (*common, *server.assumptions(s)) if isinstance(server, Projected) and s.scope.view is not View.SERVER else common


def rates(spec: LocalSpec, rounds: int) -> list[list[float]]:
    """Return eta_{k,t} for each round, or for one round if they do not depend on it."""
    steps = int(spec.steps or 0)
    distinct = rounds if spec.schedule in ("stage-wise", "iterative") else 1
    return [[spec.learning_rate(t, k, steps) for k in range(steps)] for t in range(distinct)]


@lru_cache(maxsize=16)
def reach(spec: LocalSpec, rounds: int, proximal: float) -> NDArray[np.float64]:
    """Return C_t for each round (one number if rates do not depend on the round), the largest move of K clipped steps."""
    v = float(spec.batch_clip or 0.0)
    bounds = np.array([shift(r, v, 1, proximal=proximal, adjacency=Adjacency.ZERO_OUT) for r in rates(spec, rounds)])
    bounds.flags.writeable = False
    return bounds


def _pull(method: Method, s: Setting) -> float | None:
    """Return alpha of the clients' proximal steps, or None unless they are plain SGD on clipped gradients."""
    client, o = method.client(s), s.local.optimizer
    plain = o.name == "sgd" and not o.momentum and not o.weight_decay and s.local.batch_clip is not None
    if type(client) is not Plain or not plain or s.local.steps is None:
        return None
    if client.penalty is None:
        return 0.0
    return client.penalty.alpha if isinstance(client.penalty, Proximal) else None


def _grid_step(s: Setting, steps: Trajectory) -> float:
    """Return the largest grid step of an upload over all rounds."""
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
    """Return one of the two bounds for noise std 1 on the model; mu is inverse to the std. Each gamma is share C_t + extra.

    Args:
        smooth: alpha of the proximal steps and L of the losses, or None for the bound without assumptions.
    """
    each = rates(spec, rounds)
    rhos = np.array([1.0 if smooth is None else lipschitz(r, smooth[1], proximal=smooth[0]) for r in each])
    gammas = share * np.array(bounds) + extra
    if len(gammas) == 1:  # equal rounds have a closed form
        return final_mu_constant(float(rhos[0]), float(gammas[0]), rounds, diameter, 1.0)
    # the first model may lie outside the ball, where floats are coarser; afterwards two models are at most D apart
    gammas[0] += diameter
    return final_mu(rhos, gammas, np.full(rounds, diameter), np.ones(rounds))
