"""What a release is made of: the update in the model's layout, and the named extras of the method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from fedveil.errors import UpdateRefused
from fedveil.mechanism.grid import Group, exponent_for

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.mechanism.plan import Plan
    from fedveil.training.params import Layout

_DEVIATIONS = 14.0
"""A normal variable is further from its mean with a probability below 2e-44."""


@dataclass(frozen=True)
class ReleaseLayout:
    """The update [d] and then each extra, flat, in one vector [D].

    Args:
        model: layout of the update. extras: shape of each extra by name; `()` is one number.
        bits: grid steps in one noise std, as a power of two; None for those of each plan's mechanism.
    """

    model: Layout
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    bits: int | None = None

    @cached_property
    def dimension(self) -> int:
        """D, the coordinates of update and extras."""
        return self.model.dimension + sum(math.prod(shape) for shape in self.extras.values())

    @cached_property
    def places(self) -> dict[str, slice]:
        """Where each extra lies in the flat vector."""
        found, start = {}, self.model.dimension
        for name, shape in self.extras.items():
            found[name] = slice(start, start + math.prod(shape))
            start += math.prod(shape)
        return found

    def flat(self, update: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        """Update and extras as one vector [D].

        Raises:
            UpdateRefused: an extra is missing, unknown, mis-shaped or not float32.
        """
        import torch

        if not self.extras and not extras:
            return update
        extras = dict(extras)
        if set(extras) != set(self.extras):
            raise UpdateRefused(f"the release has the extras {sorted(self.extras)}, and training gave {sorted(map(str, extras))}")
        for name, shape in self.extras.items():
            value = extras[name]
            plain = type(value) is torch.Tensor and value.layout == torch.strided and not value.requires_grad
            if not plain or tuple(value.shape) != shape or value.dtype != torch.float32:
                raise UpdateRefused(f"the extra {name!r} must be a plain float32 tensor, shape {shape}; got {_described(value)}")
        return torch.cat([update, *(torch.flatten(extras[name]) for name in self.extras)])

    def parted(self, vector: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Update [d] and extras, as views of the flat vector [D]."""
        extras = {name: vector[place].reshape(self.extras[name]) for name, place in self.places.items()}
        return vector[: self.model.dimension], extras

    def groups(self, plan: Plan) -> list[tuple[slice, float, float]]:
        """Consecutive groups of coordinates with their noise std and clip (inf where the whole clip alone bounds them).

        Layers of which nothing is sent have std 0. The whole clip of the update is not in it.
        """
        extras = ((place, plan.extras[name]) for name, place in self.places.items())
        return [*self._layers(plan), *((place, extra.noise_std, extra.clip) for place, extra in extras)]

    def _layers(self, plan: Plan) -> Iterator[tuple[slice, float, float]]:
        if isinstance(plan.noise_std, int | float) and plan.layer_clip is None:
            yield slice(0, self.model.dimension), float(plan.noise_std), math.inf
            return
        stds = [float(plan.noise_std)] * len(self.model) if isinstance(plan.noise_std, int | float) else plan.noise_std.tolist()
        clips = [math.inf] * len(self.model) if plan.layer_clip is None else plan.layer_clip.tolist()
        start = 0
        for size, std, clip in zip(self.model.sizes, stds, clips, strict=True):
            yield slice(start, start + size), std, clip
            start += size

    def grid(self, plan: Plan) -> list[Group]:
        """The exponent of the grid step of what leaves, group by group: from the public noise alone.

        Where the clip is so many times the noise that it would not fit into 2^52 steps, the step is 2^-52 of the clip.
        """
        parts, bits = self.groups(plan), plan.mechanism.bits if self.bits is None else self.bits
        exponents = [_exponent(std, min(clip, plan.clip), bits) if std else None for _, std, clip in parts]
        known = [k for k in exponents if k is not None]
        silent = max(known, default=0)  # nothing is sent there
        return [(part, silent if k is None else k) for (part, _, _), k in zip(parts, exponents, strict=True)]

    def bounds(self, plan: Plan) -> list[tuple[int, int]]:
        """The largest absolute integer that may leave one client in each group: where the group ends, and the bound.

        Like the grid it follows from the plan alone, so what is made of it, such as the length of a message, tells nothing of
        the data. Noise is within 14 standard deviations but for one coordinate in 10^43.
        """
        found, d = [], self.model.dimension
        for (part, std, clip), (_, k) in zip(self.groups(plan), self.grid(plan), strict=True):
            most = min(clip, plan.clip if part.stop <= d else math.inf)
            data = math.floor(math.ldexp(most, -k - plan.mechanism.shift)) if std else 0
            noise = math.ceil(math.ldexp(_DEVIATIONS * std, -k)) + 1 if std and plan.place == "upload" else 0
            found.append((part.stop, data + noise))
        return found


def _exponent(std: float, clip: float, bits: int) -> int:
    return max(exponent_for(std, bits), math.frexp(clip)[1] - 52 if math.isfinite(clip) else -(2**31))


def _described(value: object) -> str:
    return f"{getattr(value, 'dtype', type(value).__name__)} of shape {tuple(getattr(value, 'shape', ()))}"
