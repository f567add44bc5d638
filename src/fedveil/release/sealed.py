"""Sealed contributions to a sum and noisy uploads, which only the door reads, and releases that promise nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedveil.errors import UpdateRefused
from fedveil.ledger.ledger import Entry
from fedveil.mechanism.cost import per_layer
from fedveil.mechanism.plan import LocalDpSgd, Plan, Upload, lets_statistics_out
from fedveil.release.release_layout import ReleaseLayout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedveil.release.noise import Randomness
    from fedveil.training.params import Layout


AGGREGATE = -1
"""Client number of a release that is a whole round's sum."""

ELSEWHERE = torch.empty(0, dtype=torch.int64)
"""Placeholder for the vector of a contribution that was added to another one's."""


@dataclass(frozen=True)
class Contribution:
    """One client's clipped vector for a sum. Sealed: only `Door.release_sum` reads it.

    `sealed`: int64 [D] on the plan's grid, or float32 [D] under a plan that promises nothing; [0] if it is in another's sum.
    `refusal`: why it is zero, if the update may not be released; only for the client's own log.
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
    """One client's noisy upload before its release, with its ledger row.

    Sealed: `Door.release_uploads` releases it, and until then only the client's own policy reads it. `refusal`: as in
    `Contribution`.
    """

    upload: Upload
    entry: Entry
    refusal: str = ""

    @property
    def weight(self) -> float:
        """Return the public weight in the mean."""
        return self.upload.weight


class RunningSum:
    """Sum of contributions that are added as they arrive, so that a round stores one sum and not one vector per client.

    Only integers are added: their sum is the same in any order, that of floats is not.
    """

    def __init__(self) -> None:
        self._total: NDArray[np.int64] | None = None

    def add(self, vector: Tensor, buffer: Tensor | None = None) -> Tensor:
        """Add a vector, and return what replaces it: the sum for the first, a placeholder for others, floats unchanged.

        buffer: memory for the sum, int64 [D], or None to allocate it.
        """
        if vector.dtype != torch.int64 or not len(vector):
            return vector
        if self._total is None:
            total = vector.clone() if buffer is None else buffer.copy_(vector)
            self._total = total.numpy()
            return total
        self._total += vector.numpy()
        return ELSEWHERE


_ROUNDING = 1 - 1e-6
"""Factor that further scales a clipped float32 vector that promises nothing, so that its norm stays at or below the clip."""


def clipped(update: Tensor, plan: Plan, layout: Layout) -> Tensor:
    """Return a copy of `update` [d] restricted to the plan's support, then clipped per layer, then as a whole, in floats.

    The exact L2 norm of the result is at most `plan.clip`, and of each layer at most `plan.layer_clip`. Releases with a promise
    are clipped on the grid instead.
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
    """Return update and extras [D], clipped in floats; under DP-SGD training has clipped and noised the extras."""
    update = clipped(vector[: parts.model.dimension], plan, parts.model)
    extras = [vector[place].clone() for place in parts.places.values()]
    for name, part in () if isinstance(plan, LocalDpSgd) else zip(parts.extras, extras, strict=True):
        _clip_exactly_(part, plan.extras[name].clip)
    return torch.cat([update, *extras]) if extras else update


def float_noised(vector: Tensor, plan: Plan, parts: ReleaseLayout, randomness: Randomness, name: tuple[int, int]) -> Tensor:
    """Add float32 noise to a float32 vector [D], and clip it to `plan.clamp` in place. name: of the noise, (round, client)."""
    d = parts.model.dimension
    extras_noised = any(extra.noise_std for extra in plan.extras.values()) and not isinstance(plan, LocalDpSgd)
    if any(per_layer(plan.noise_std, parts.model)) or extras_noised:
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
    """Return the batch statistics to release with an upload, if any may be; refuse non-finite ones like an update."""
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
