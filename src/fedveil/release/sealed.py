"""What is sealed on its way out: clipped contributions to a sum, and noisy uploads; only the door reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedveil.ledger.ledger import Entry
from fedveil.mechanism.plan import Plan, Upload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

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
