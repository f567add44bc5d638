"""The cost of a plan: from the object that the door executes to the event that the ledger charges."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

from fedveil.accounting.finite_precision import norm_excess, sum_error
from fedveil.accounting.gaussian import mu_groups, mu_groups_joint
from fedveil.accounting.types import Adjacency, Event, SampledGaussian, Scope, Unbounded, Unit, View
from fedveil.errors import ConfigError
from fedveil.mechanism.grid import exponent_for
from fedveil.mechanism.plan import COUNTS, DpSgd, LocalDpSgd, Plan, UnprovenPlan, reason_of

if TYPE_CHECKING:
    from fedveil.training.params import Layout


def active_layers(plan: Plan, layout: Layout) -> list[int]:
    """Return the layers of which the plan sends at least one coordinate."""
    if plan.support is None:
        return list(range(len(layout)))
    return [i for i, part in enumerate(layout.split(plan.support)) if bool(part.any())]


def per_layer(value: float | object, layout: Layout) -> list[float]:
    """Convert a number or a tensor [L] to a list of L numbers."""
    if isinstance(value, int | float):
        return [float(value)] * len(layout)
    return [float(v) for v in value.tolist()]  # type: ignore[attr-defined]


def plan_mu(plan: Plan, layout: Layout, factor: int, shares: int = 1) -> float | str:
    """Return the exact mu of one joint Gaussian release of the update and all extras, or a reason (see `_update_mu`)."""
    mus: list[float] = []
    for name, extra in plan.extras.items():
        if not extra.noise_std:
            return f"the extra {name!r} leaves without noise"
        mus.append(factor * extra.clip / (extra.noise_std * math.sqrt(shares)))
    mu = _update_mu(plan, layout, factor, shares)
    return mu if isinstance(mu, str) or not mus else math.hypot(mu, *mus)


def _update_mu(plan: Plan, layout: Layout, factor: int, shares: int = 1) -> float | str:
    """Return the exact mu of one Gaussian release of the update under this plan, or the reason why it has no bound.

    Args:
        factor: 1 for zero-out, 2 for replace-one adjacency.
        shares: number of independent upload noises in the adversary's view (n for a sum of n noisy uploads, else 1).

    With a single clip, the worst shift of norm `factor * clip` lies in the layer with the least noise. With layer clips, mu is
    the norm of the shifts in units of their noise; with both, a fractional knapsack (see fedveil.accounting.gaussian).
    """
    layers = active_layers(plan, layout)
    if not layers:
        return 0.0
    stds = [s * math.sqrt(shares) for s in per_layer(plan.noise_std, layout)]
    bare = [layout.names[i] for i in layers if stds[i] == 0]
    if bare:
        return f"coordinates leave without noise (layers: {', '.join(bare[:3])}{', ...' if len(bare) > 3 else ''})"
    sigmas = [stds[i] for i in layers]
    if plan.layer_clip is None:
        if math.isinf(plan.clip):
            return "the update is not clipped: its sensitivity has no bound"
        return factor * plan.clip / min(sigmas)
    clips = [factor * float(plan.layer_clip[i]) for i in layers]
    if not all(map(math.isfinite, clips)) and math.isinf(plan.clip):
        return "a layer is not clipped: its sensitivity has no bound"
    if math.isinf(plan.clip):
        return float(mu_groups(clips, sigmas))
    bounded = [min(c, factor * plan.clip) for c in clips]
    return float(mu_groups_joint(bounded, sigmas, factor * plan.clip))


def promises(plan: Plan, layout: Layout) -> bool:
    """Return whether the plan clips and noises the whole release, which then consists of integers on the grid."""
    return not reason_of(plan) and not isinstance(plan, LocalDpSgd) and not isinstance(plan_mu(plan, layout, 1), str)


def on_grid(plan: Plan, reason: str, layout: Layout) -> bool:
    """Return whether the release under this plan consists of integers on the grid: always if the door gives a guarantee."""
    return not reason and promises(plan, layout)


def event_of(plan: Plan, layout: Layout, scope: Scope, *, rate: float | None, noisy_uploads: int = 1, round: int = 0) -> Event:
    """Return the privacy event of one release.

    Args:
        rate: Poisson sampling rate if the adversary does not see who took part, else None. It amplifies noise on the sum only:
            the size of noise in shares reveals how many took part.
        noisy_uploads: number of independent noises in the sum that the adversary does not know (aggregate view with `place =
            "upload"`); a fellow client knows its own noise.
    """
    if isinstance(plan, UnprovenPlan):
        return Unbounded(plan.reason)
    if isinstance(plan, LocalDpSgd):
        step = plan.step
        if scope.unit is not Unit.RECORD:
            return Unbounded("DP-SGD inside a client protects records, not the client")
        if step.noise_multiplier == 0:
            return Unbounded("no noise is added (noise_multiplier = 0)")
        if others := sorted(plan.extras.keys() - {COUNTS}):
            raise ConfigError(f"under DP-SGD no extra of a method can leave, for it has no noise: leave {others} out of the plan")
        multiplier = step.noise_multiplier * step.clip / step_sensitivity(step, layout.dimension, scope.adjacency)
        for counts in plan.extras.values():  # of test records, each of which moves the counts of a step and no gradient
            if not counts.noise_std:
                return Unbounded("the counts of an evaluation leave without noise")
            multiplier = min(multiplier, counts.noise_std / (scope.adjacency.factor * counts.clip))
        return SampledGaussian(step.rate, multiplier, step.steps)
    in_server_view = scope.view is View.SERVER
    if in_server_view and plan.place == "sum":
        return Unbounded("the server receives uploads without noise of their own; only their sum is protected")
    shares = 1 if in_server_view or plan.place == "sum" else noisy_uploads
    if shares < 1:
        return Unbounded("no honest noisy upload took part besides a fellow client's: the sum has no noise that it does not know")
    mu = plan_mu(plan, layout, scope.update_factor, shares)
    if isinstance(mu, str):
        return Unbounded(mu)
    return plan.mechanism.price(mu, None if in_server_view or plan.place == "upload" else rate, round)


def step_sensitivity(step: DpSgd, dimension: int, adjacency: Adjacency) -> float:
    """Return the L2 sensitivity of a batch's gridded sum to one example: the clip, and the errors of norms, sums and rounding.

    It is f (C (1 + e_n) (1 + 2 B gamma) + h sqrt(d)), with norms and sums in float64 and the grid step h of the noise. For
    replace-one, f = 2: a Poisson sample's price allows each example half of this to its absence, and two examples all of it.

    Args:
        dimension: d of the gradient.

    Source: `fedveil.accounting.finite_precision`; docs/exact-release.md, "DP-SGD to the bit".
    """
    each = step.clip * (1 + norm_excess(dimension, "float64"))
    moved = 1 + sum_error(step.cap + 2, "float64", weighted=True)
    grid_step = 2.0 ** step_exponent(step)
    return adjacency.factor * (each * moved + grid_step * math.sqrt(dimension)) * (1 + 1e-12)


def step_exponent(step: DpSgd) -> int:
    """Return the exponent k of the grid step 2^k of a noisy sum, such that a batch's sum stays below 2^53 steps."""
    return max(exponent_for(step.noise_multiplier * step.clip), math.frexp(step.cap * step.clip)[1] - 52)


def plan_digest(plan: Plan, layout: Layout) -> bytes:
    """Return the SHA-256 of everything that determines a plan's price."""
    clips = None if plan.layer_clip is None else plan.layer_clip.tolist()
    sent = None if plan.support is None else plan.support.numpy().tobytes()
    parts = plan.clip, per_layer(plan.noise_std, layout), clips, sent, sorted(plan.extras.items()), plan.mechanism
    return hashlib.sha256(repr(parts).encode()).digest()
