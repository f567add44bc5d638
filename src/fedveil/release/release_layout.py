"""The layout of a release, its row in the ledger, and the counts of an evaluation that leave with it.

Both counts of a client add up to at most a public number of examples, which therefore bounds their L2 norm. They leave in the
same release as the update, and the noise of everything else grows so that the release costs what it cost without them.
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
from fedveil.mechanism.plan import Extra, LocalDpSgd, Plan, Raw, reason_of

if TYPE_CHECKING:
    from torch import Tensor

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


class Charger(Protocol):
    """The part of a ledger that the door needs."""

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """Write and sync releases that are handed over together, in one transaction, if the budget allows each of them.

        Raises BudgetExhausted, with nothing written, otherwise.
        """
        ...

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """Charge what may leave once in its round: SHA-256 tells which bits, and the same bits again cost nothing."""
        ...

    def admits(self, client: int, event: Event) -> bool:
        """Whether the client's budget has room for a release of this cost."""
        ...


class NullLedger:
    """A charger without a budget and without a file."""

    def charge_all(self, entries: Sequence[Entry]) -> None:
        """Accept the releases."""

    def charge_once(self, entry: Entry, *, digest: str) -> None:
        """Accept the release."""

    def admits(self, client: int, event: Event) -> bool:
        """Whatever it costs."""
        return True


def row_of(plan: Plan, parts: ReleaseLayout, *, exact: bool) -> dict[str, Any]:
    """The columns of a ledger's row that follow from the plan alone. exact: integers leave."""
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
    """The exponent of the grid of what leaves, for each layer and each extra."""
    exponents = [k for _, k in parts.grid(plan)]
    layers = len(exponents) - len(plan.extras)
    return (*(exponents[:layers] if layers > 1 else exponents[:1] * len(parts.model)), *exponents[layers:])


def _as_charged(plan: Plan, layout: Layout) -> tuple[list[float], list[float]]:
    """Clip and noise std per layer for the ledger; layers of which nothing is sent have clip 0."""
    if isinstance(plan, LocalDpSgd):
        step = plan.step
        return [step.clip] * len(layout), [step.noise_multiplier * step.clip] * len(layout)
    sent = set(active_layers(plan, layout))
    clips = per_layer(plan.clip if plan.layer_clip is None else plan.layer_clip.clamp_max(plan.clip), layout)
    return [c if i in sent else 0.0 for i, c in enumerate(clips)], per_layer(plan.noise_std, layout)


COUNTS = "evaluation"
"""The name of this extra: [right, wrong]."""


@dataclass(frozen=True)
class EvaluationCounts:
    """What of each release goes to the counts.

    Args:
        share: of the release's mu^2, in (0, 1). examples: most examples of a client that count.
    """

    share: float
    examples: int

    def beside(self, plan: Plan | Raw, layout: Layout) -> Plan:
        """The plan with the counts beside its update, at the same mu.

        With noise s on an update and extras of mu m, s / sqrt(1 - share) leaves them sqrt(1 - share) m, and noise
        examples / (sqrt(share) m) leaves the counts sqrt(share) m.

        Raises:
            ConfigError: it promises nothing, or sends nothing: there is no noise that the counts could share.
        """
        mu = reason_of(plan) or ("" if isinstance(plan, Raw) else plan_mu(plan, layout, 1))
        if isinstance(plan, Raw) or isinstance(mu, str) or not mu or isinstance(plan, LocalDpSgd) or plan.mechanism.stateful:
            reason = mu if isinstance(mu, str) else "nothing is sent, or its noise is drawn elsewhere"
            raise ConfigError(f"privacy.evaluation: counts can leave only beside an update with noise of its own ({reason})")
        noisier = self._with_noise_times(plan, 1 / math.sqrt(1 - self.share))
        counts = Extra(float(self.examples), self.examples / (math.sqrt(self.share) * mu))
        return replace(noisier, extras={**noisier.extras, COUNTS: counts})

    def alone(self, plan: Plan) -> Plan:
        """The plan of the same price without counts, up to rounding: what `beside` was called with."""
        return self._with_noise_times(plan, math.sqrt(1 - self.share))

    @staticmethod
    def _with_noise_times(plan: Plan, factor: float) -> Plan:
        extras = {name: Extra(e.clip, e.noise_std * factor) for name, e in plan.extras.items() if name != COUNTS}
        return replace(plan, noise_std=plan.noise_std * factor, extras=extras)
