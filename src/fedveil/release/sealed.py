"""What is sealed on its way out: clipped contributions to a sum, and noisy uploads; only the door reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedveil.ledger.ledger import Entry
from fedveil.release.plan import Plan, Upload

if TYPE_CHECKING:
    from torch import Tensor

AGGREGATE = -1
"""The client number of a release that is a whole round's sum."""


@dataclass(frozen=True)
class Contribution:
    """One client's clipped vector on its way into a sum. Sealed: nothing but `Door.release_sum` reads it.

    `sealed`: int64 [D] on the plan's grid, or float32 [D] under a plan that promises nothing.
    """

    client: int
    reads: tuple[str, ...]
    reason: str
    weight: float
    sealed: Tensor
    plan: Plan | None = None
    buffers: Tensor | None = None


@dataclass(frozen=True)
class SealedUpload:
    """One client's noisy upload before it leaves, and the ledger row that it leaves by.

    Sealed: `Door.release_uploads` hands it over, and until then only the client's own policy reads it.
    """

    upload: Upload
    entry: Entry

    @property
    def weight(self) -> float:
        """Public weight in the mean."""
        return self.upload.weight
