"""A plan read once: what the door executes under it and what it charges, for all clients that have the same plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from fedveil.ledger.entry import Entry
from fedveil.mechanism.cost import on_grid
from fedveil.mechanism.grid import Clipping
from fedveil.mechanism.plan import Plan
from fedveil.release.release_layout import ReleaseLayout


@dataclass(frozen=True)
class Terms:
    """What follows from a plan alone, before any data are looked at.

    source: the plan as its policy made it. plan: the same, as the door executes and charges it.
    reason: why nothing can be proven from it, or empty. reads: the private quantities that it was made from.
    exact: integers leave. clippings: how the update and each extra are clipped, where integers leave.
    rows: by round, the ledger's row of the first client that released under them; those of others differ in the client alone.
    """

    source: Plan
    plan: Plan
    reason: str
    reads: tuple[str, ...]
    exact: bool
    clippings: Sequence[tuple[slice, Clipping]]
    rows: dict[int, Entry] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Plan, plan: Plan, parts: ReleaseLayout, reason: str, reads: tuple[str, ...] = ()) -> Terms:
        """The terms of a plan for releases of this layout."""
        exact = on_grid(plan, reason, parts.model)
        return cls(source, plan, reason, reads, exact, clippings(plan, parts) if exact else ())


def clippings(plan: Plan, parts: ReleaseLayout) -> list[tuple[slice, Clipping]]:
    """How update and extras become integers: slices of the flat vector [D], each with its groups and clips."""
    d = parts.model.dimension
    grid = [(part, k + plan.mechanism.shift) for part, k in parts.grid(plan)]
    clips = [clip for _, _, clip in parts.groups(plan)]
    layers = sum(part.stop <= d for part, _ in grid)
    found = [(slice(0, d), Clipping.of(grid[:layers], plan.clip, clips[:layers], d))]
    for (part, k), clip in zip(grid[layers:], clips[layers:], strict=True):
        n = part.stop - part.start
        found.append((part, Clipping.of([(slice(0, n), k)], clip, [math.inf], n)))
    return found
