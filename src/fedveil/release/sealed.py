"""Sealed contributions to a sum and noisy uploads, which only the door reads, and releases without a promise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedveil.errors import UpdateRefused
from fedveil.ledger.ledger import Entry
from fedveil.mechanism.cost import per_layer
from fedveil.mechanism.plan import Plan, Upload, lets_statistics_out
from fedveil.release.release_layout import ReleaseLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.release.noise import Randomness
    from fedveil.training.params import Layout


AGGREGATE = -1
"""The client number of a release that is a whole round's sum."""

ELSEWHERE = torch.empty(0, dtype=torch.int64)
"""The vector of a contribution that is in the sum of another one."""


@dataclass(frozen=True)
class Contribution:
    """One client's clipped vector on its way into a sum. Sealed: nothing but `Door.release_sum` reads it.

    `sealed`: int64 [D] on the plan's grid, or float32 [D] under a plan that promises nothing; [0] where it is in another's sum.
    `refusal`: why it is zero, where the update cannot leave; for the client's own log alone.
    """

    client: int
    reads: tuple[str, ...]
    reason: str
    weight: float
    sealed: Tensor
    plan: Plan | None = None
    buffers: Tensor | None = None
    refusal: str = ""


@dataclass(frozen=True)
class SealedUpload:
    """One client's noisy upload before it leaves, and the ledger row that it leaves by.

    Sealed: `Door.release_uploads` hands it over, and until then only the client's own policy reads it. `refusal`: as of
    `Contribution`.
    """

    upload: Upload
    entry: Entry
    refusal: str = ""

    @property
    def weight(self) -> float:
        """Public weight in the mean."""
        return self.upload.weight


class RunningSum:
    """Adds contributions up as they come, so that a round holds one sum and not one vector a client.

    Only integers: their sum is the same in any order, that of floats is not.
    """

    def __init__(self) -> None:
        self._total: NDArray[np.int64] | None = None

    def add(self, vector: Tensor, room: Tensor | None = None) -> Tensor:
        """What its contribution keeps of a vector: nothing, but the first one the sum of all; floats stay as they are.

        room: memory for the sum, int64 [D], if it shall not have its own.
        """
        if vector.dtype != torch.int64 or not len(vector):
            return vector
        if self._total is None:
            kept = vector.clone() if room is None else room.copy_(vector)
            self._total = kept.numpy()
            return kept
        self._total += vector.numpy()
        return ELSEWHERE


_ROUNDING = 1 - 1e-6
"""A clipped float32 vector that promises nothing is scaled this much further, so that its norm stays at or below the clip."""


def clipped(update: Tensor, plan: Plan, layout: Layout) -> Tensor:
    """A copy of `update` [d] restricted to the plan's support, then clipped per layer, then as a whole, in floats.

    The exact L2 norm of the result is at most `plan.clip`, and of each layer at most `plan.layer_clip`. What leaves with a
    promise is clipped on the grid instead.
    """
    vector = update.clone() if plan.support is None else update * plan.support
    if plan.layer_clip is not None:
        for part, bound in zip(layout.split(vector), plan.layer_clip.tolist(), strict=True):
            _clip_exactly_(part, bound)
    if math.isfinite(plan.clip):
        _clip_exactly_(vector, plan.clip)
    return vector


def _clip_exactly_(vector: Tensor, bound: float) -> None:
    norm = float(torch.linalg.vector_norm(vector, dtype=torch.float64))
    if norm > bound:
        vector.mul_(bound / norm * _ROUNDING)


def float_clipped(vector: Tensor, plan: Plan, parts: ReleaseLayout) -> Tensor:
    """Update and extras [D], clipped in floats."""
    update = clipped(vector[: parts.model.dimension], plan, parts.model)
    extras = [vector[place].clone() for place in parts.places.values()]
    for name, part in zip(parts.extras, extras, strict=True):
        _clip_exactly_(part, plan.extras[name].clip)
    return torch.cat([update, *extras]) if extras else update


def float_noised(vector: Tensor, plan: Plan, parts: ReleaseLayout, randomness: Randomness, name: tuple[int, int]) -> Tensor:
    """float32 noise on a float32 vector [D]; clips it to `plan.clamp` in place. name: of the noise, (round, client)."""
    d = parts.model.dimension
    if any(per_layer(plan.noise_std, parts.model)) or any(extra.noise_std for extra in plan.extras.values()):
        noise = randomness.normal(parts.dimension, *name)
        if isinstance(plan.noise_std, int | float):
            noise[:d].mul_(plan.noise_std)
        else:
            noise[:d].mul_(parts.model.expand(plan.noise_std.to(torch.float32)))
        if plan.support is not None:
            noise[:d].mul_(plan.support)
        for extra, place in parts.places.items():
            noise[place].mul_(plan.extras[extra].noise_std)
        vector = vector + noise
    if plan.clamp is not None:
        vector[:d].clamp_(-plan.clamp, plan.clamp)
    return vector


def free_statistics(buffers: Tensor | None, plan: Plan, reason: str) -> Tensor | None:
    """The batch statistics that travel with a release, if any may; refused like an update when they are not finite."""
    if buffers is None or not lets_statistics_out(plan, reason):
        return None
    if not bool(buffers.isfinite().all()):
        raise UpdateRefused("the batch statistics contain NaN or infinite values")
    return buffers


def mean_statistics(contributions: Sequence[Contribution]) -> Tensor | None:
    buffers = [(c.weight, c.buffers) for c in contributions if c.buffers is not None and c.buffers.numel()]
    if not buffers:
        return None
    total = sum(w for w, _ in buffers)
    return torch.stack([b * (w / total) for w, b in buffers]).sum(0)
