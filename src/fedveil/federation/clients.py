"""All clients' examples as tensors, prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedveil.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True)
class Clients:
    """The training examples of N clients, each client's in one contiguous block of one tensor.

    Args:
        x: examples [total, ...], float32 or int64 tokens, client after client. y: targets [total, ...], int64 or float32.
        offsets: client i holds x[offsets[i] : offsets[i + 1]]; length N + 1.
    """

    x: Tensor
    y: Tensor
    offsets: NDArray[np.int64]

    @classmethod
    def of(cls, x: NDArray[Any], y: NDArray[Any], parts: Sequence[NDArray[np.int64]]) -> Clients:
        """Gather the parts (index arrays into x and y) once, in client order; clients may be empty."""
        if not np.isfinite(x).all():
            raise DataError("the examples contain NaN or infinite values: clean the data set before training on it")
        order = np.concatenate([np.asarray(p, dtype=np.int64) for p in parts]) if len(parts) else np.empty(0, np.int64)
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in parts])]).astype(np.int64)
        return cls(torch.from_numpy(x[order]), torch.from_numpy(y[order]), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def examples(self, client: int) -> tuple[Tensor, Tensor]:
        """Return copies of one client's examples and targets.

        A view would leak: a block's address depends on the sizes of earlier clients, and matrix products may round differently by
        address, so one client's number of examples would change another's results.
        """
        lo, hi = int(self.offsets[client]), int(self.offsets[client + 1])
        return self.x[lo:hi].clone(), self.y[lo:hi].clone()

    def size(self, client: int) -> int:
        """Return the number of examples of one client."""
        return int(self.offsets[client + 1] - self.offsets[client])

    def alone(self, client: int) -> Clients:
        """Return the same clients with the examples of all others removed."""
        x, y = self.examples(client)
        return Clients(x, y, len(y) * (np.arange(len(self) + 1) > client))

    @cached_property
    def largest(self) -> int:
        """Return the number of examples of the largest client, at least 1."""
        return max(int(self.sizes().max(initial=0)), 1)

    def sizes(self) -> NDArray[np.int64]:
        """Return the number of examples of each client [N]."""
        return np.diff(self.offsets)
