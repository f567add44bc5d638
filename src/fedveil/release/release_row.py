"""The row of a release in the ledger, and what the door needs of a ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from fedveil.accounting.types import Event
from fedveil.ledger.ledger import Entry
from fedveil.mechanism.cost import active_layers, per_layer
from fedveil.mechanism.plan import LocalDpSgd, Plan
from fedveil.release.release_layout import ReleaseLayout

if TYPE_CHECKING:
    from fedveil.training.params import Layout


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
