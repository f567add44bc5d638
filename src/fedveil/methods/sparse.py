"""What methods share whose clients send different coordinates: the release of what is not zero, and the growth of masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.release.plan import Plan, Raw, Released, Upload
from fedveil.training.local import State

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import Layout


@dataclass(frozen=True)
class NonZero:
    """Published policy of methods that clip, noise and restrict inside training: what they left at zero is not sent."""

    reads: tuple[str, ...]
    reason: str

    def start(self) -> State:
        return {}

    def plan(self, released: Released, state: State) -> Raw:
        """Send the update as training made it."""
        return Raw(self.reads, lambda update: Plan(support=update != 0), self.reason)

    def observe(self, state: State, upload: Upload) -> State:
        return state


def grown(mask: Tensor, size: Tensor, layout: Layout, share: float) -> Tensor:
    """`mask` [d] with the largest of the other coordinates by `size` [d] added, until it holds `share` of each layer.

    A layer that already holds that share stays as it is; the number of coordinates is rounded down.
    """
    new = mask.clone()
    for part, values, n in zip(layout.split(new), layout.split(size), layout.sizes, strict=True):
        missing = int(share * n + 1e-9) - int(part.sum())
        if missing > 0:
            part[values.masked_fill(part, -1.0).topk(missing).indices] = True
    return new
