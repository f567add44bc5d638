"""The layout of a release, its row in the ledger, and the counts of an evaluation that it includes.

All counts of a client add up to at most a public number of examples, which therefore bounds their L2 norm. They are part of the
same release as the update, and the noise of everything else grows so that the release costs the same as without them.

Under DP-SGD they are further coordinates of its steps. Each step adds up the cells of the test records that join it, with the
rate of a batch and the noise of a gradient. A record has either a gradient, of norm at most the clip, or a cell, of norm at most
1, and joins each step independently, so the price of the steps is that of the gradients alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from fedveil.accounting.types import Event
from fedveil.errors import ConfigError, UpdateRefused
from fedveil.ledger.ledger import Entry
from fedveil.mechanism.cost import active_layers, per_layer, plan_mu
from fedveil.mechanism.grid import Group, exponent_for
from fedveil.mechanism.plan import COUNTS, Extra, LocalDpSgd, Plan, Raw, reason_of

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import Layout


_DEVIATIONS = 14.0
"""Number of standard deviations that a normal variable exceeds with a probability below 2e-44."""


@dataclass(frozen=True)
class ReleaseLayout:
    """Layout of update [d] and extras, in order, in one flat vector [D].

    Args:
        model: layout of the update. extras: shape of each extra by name; `()` is one number.
        bits: grid steps in one noise std, as a power of two; None for those of each plan's mechanism.
    """

    model: Layout
    extras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    bits: int | None = None

    @cached_property
    def dimension(self) -> int:
        """Return D, the number of coordinates of update and extras."""
        return self.model.dimension + sum(math.prod(shape) for shape in self.extras.values())

    @cached_property
    def places(self) -> dict[str, slice]:
        """Return the position of each extra in the flat vector."""
        positions, start = {}, self.model.dimension
        for name, shape in self.extras.items():
            positions[name] = slice(start, start + math.prod(shape))
            start += math.prod(shape)
        return positions

    def flat(self, update: Tensor, extras: Mapping[str, Tensor]) -> Tensor:
        """Return update and extras as one vector [D].

        Raises:
            UpdateRefused: an extra is missing, unknown, of wrong shape or not float32.
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
        """Return update [d] and extras, as views of the flat vector [D]."""
        extras = {name: vector[place].reshape(self.extras[name]) for name, place in self.places.items()}
        return vector[: self.model.dimension], extras

    def groups(self, plan: Plan) -> list[tuple[slice, float, float]]:
        """Return consecutive groups of coordinates with their noise std and clip (inf if only the whole clip bounds them).

        Layers that send nothing have std 0. The whole clip of the update is not included.
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
        """Return the exponent of the release's grid step for each group, from the public noise alone.

        If the clip is so much larger than the noise that it would not fit into 2^52 steps, the step is 2^-52 of the clip.
        """
        parts, bits = self.groups(plan), plan.mechanism.bits if self.bits is None else self.bits
        exponents = [_exponent(std, min(clip, plan.clip), bits) if std else None for _, std, clip in parts]
        exponents_sent = [k for k in exponents if k is not None]
        unsent = max(exponents_sent, default=0)  # nothing is sent in these groups
        return [(part, unsent if k is None else k) for (part, _, _), k in zip(parts, exponents, strict=True)]

    def bounds(self, plan: Plan) -> list[tuple[int, int]]:
        """Return the end of each group and the largest absolute integer that one client may release in it.

        The bounds, like the grid, follow from the plan alone, so anything derived from them, such as the length of a message,
        reveals nothing about the data. Noise is within 14 standard deviations except for one coordinate in 10^43.
        """
        limits, d = [], self.model.dimension
        for (part, std, clip), (_, k) in zip(self.groups(plan), self.grid(plan), strict=True):
            most = min(clip, plan.clip if part.stop <= d else math.inf)
            data = math.floor(math.ldexp(most, -k - plan.mechanism.shift)) if std else 0
            noise = math.ceil(math.ldexp(_DEVIATIONS * std, -k)) + 1 if std and plan.place == "upload" else 0
            limits.append((part.stop, data + noise))
        return limits


def _exponent(std: float, clip: float, bits: int) -> int:
    return max(exponent_for(std, bits), math.frexp(clip)[1] - 52 if math.isfinite(clip) else -(2**31))


def _described(value: object) -> str:
    return f"{getattr(value, 'dtype', type(value).__name__)} of shape {tuple(getattr(value, 'shape', ()))}"


class Charger(Protocol):
    """Part of a ledger that the door needs."""

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """Write and sync the releases of a round in one transaction, if the budget allows each of them.

        Raise BudgetExhausted, with nothing written, otherwise.
        """
        ...

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """Charge a release that happens once in its round: SHA-256 identifies its bits, and the same bits again cost nothing."""
        ...

    def admits(self, client: int, event: Event) -> bool:
        """Return whether the client's budget has room for a release of this cost."""
        ...


class NullLedger:
    """Charger without a budget and without a file."""

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """Accept the releases."""

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """Accept the release."""

    def admits(self, client: int, event: Event) -> bool:
        """Accept any cost."""
        return True


def row_of(plan: Plan, parts: ReleaseLayout, *, exact: bool) -> dict[str, Any]:
    """Return the columns of a ledger's row that follow from the plan alone. exact: whether releases are integers."""
    d = parts.model.dimension
    clip, std = _as_charged(plan, parts.model)
    extras = [plan.extras[name] for name in parts.extras] if plan.extras else []
    noised = not isinstance(plan, LocalDpSgd) and any((*std, *(extra.noise_std for extra in extras)))
    return {
        "clip": (*clip, *(extra.clip for extra in extras)),
        "noise_std": (*std, *(extra.noise_std for extra in extras)),
        "coordinates": (d if plan.support is None else int(plan.support.sum())) + parts.dimension - d,
        "dimension": parts.dimension,
        "note": "" if not isinstance(plan, LocalDpSgd) else "DP-SGD inside local training",
        "grid": _exponents(plan, parts) if exact else None,
        "mechanism": type(plan.mechanism).__name__.lower() if noised else "none",
        "extras": tuple(parts.extras) if extras else (),
        "whole_clip": plan.step.clip if isinstance(plan, LocalDpSgd) else plan.clip,
    }


def _exponents(plan: Plan, parts: ReleaseLayout) -> tuple[int, ...]:
    """Return the exponents of the release's grid for each layer and each extra."""
    exponents = [k for _, k in parts.grid(plan)]
    layers = len(exponents) - len(plan.extras)
    return (*(exponents[:layers] if layers > 1 else exponents[:1] * len(parts.model)), *exponents[layers:])


def _as_charged(plan: Plan, layout: Layout) -> tuple[list[float], list[float]]:
    """Return clip and noise std per layer for the ledger; layers that send nothing have clip 0."""
    if isinstance(plan, LocalDpSgd):
        step = plan.step
        return [step.clip] * len(layout), [step.noise_multiplier * step.clip] * len(layout)
    sent = set(active_layers(plan, layout))
    clips = per_layer(plan.clip if plan.layer_clip is None else plan.layer_clip.clamp_max(plan.clip), layout)
    return [c if i in sent else 0.0 for i, c in enumerate(clips)], per_layer(plan.noise_std, layout)


@dataclass(frozen=True)
class EvaluationCounts:
    """Counts of right and wrong answers, or of scores in bins, as part of each release.

    Args:
        share: of the release's mu^2, in (0, 1); 0 under DP-SGD, whose counts take nothing from the update. examples: most
            examples of a client that count.
    """

    share: float
    examples: int

    def added_to(self, plan: Plan | Raw, layout: Layout) -> Plan:
        """Return the plan extended by the counts, at the same mu.

        With noise s on an update and extras of mu m, s / sqrt(1 - share) leaves them sqrt(1 - share) m, and noise
        examples / (sqrt(share) m) leaves the counts sqrt(share) m.

        Under DP-SGD the counts have the noise multiplier of the gradients, and nothing else changes.

        Raises:
            ConfigError: the plan promises nothing, or sends nothing, so no noise can be shared with the counts.
        """
        if isinstance(plan, LocalDpSgd) and plan.step.noise_multiplier:
            return replace(plan, extras={**plan.extras, COUNTS: Extra(1.0, plan.step.noise_multiplier)})
        mu = reason_of(plan) or ("" if isinstance(plan, Raw) else plan_mu(plan, layout, 1))
        if isinstance(plan, Raw) or isinstance(mu, str) or not mu or isinstance(plan, LocalDpSgd) or plan.mechanism.stateful:
            reason = mu if isinstance(mu, str) else "nothing is sent, or its noise is drawn elsewhere"
            raise ConfigError(
                f"privacy.evaluation: counts can be released only together with an update that has noise ({reason})"
            )
        noisier = self._with_noise_times(plan, 1 / math.sqrt(1 - self.share))
        counts = Extra(float(self.examples), self.examples / (math.sqrt(self.share) * mu))
        return replace(noisier, extras={**noisier.extras, COUNTS: counts})

    def removed_from(self, plan: Plan) -> Plan:
        """Return the plan of the same price without counts, the inverse of `beside` up to rounding."""
        return self._with_noise_times(plan, math.sqrt(1 - self.share))

    @staticmethod
    def _with_noise_times(plan: Plan, factor: float) -> Plan:
        extras = {name: Extra(e.clip, e.noise_std * factor) for name, e in plan.extras.items() if name != COUNTS}
        return replace(plan, noise_std=plan.noise_std * factor, extras=extras)
