"""The parts of a method. What may be proven of a run follows from the types of its parts, which see what their types allow."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from fedveil.methods.setting import Setting
from fedveil.release.plan import Upload
from fedveil.training.local import State

if TYPE_CHECKING:
    from torch import Tensor

# --- servers -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summed:
    """What a server sees that sees a sum: the weighted mean of a round's uploads, and the global model.

    Args:
        vector: [d], of the updates. start: the global model [d] that they are relative to. extras: the means of the extras.
    """

    round: int
    vector: Tensor
    start: Tensor
    extras: Mapping[str, Tensor]

    @classmethod
    def of(cls, uploads: Sequence[Upload], model: Tensor) -> Summed:
        """Return the mean of these uploads."""
        weights = [u.weight for u in uploads]
        extras = {name: weighted_mean([u.extras[name] for u in uploads], weights) for name in uploads[0].extras}
        return cls(uploads[0].round, mean(uploads), model, extras)


class SumServer(ABC):
    """A server that is given the mean of a round's uploads and nothing else of them, so that their sum may be credited."""

    @abstractmethod
    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        """Return its next state, empty at first, and the step [d] of the global model."""


class UploadServer(ABC):
    """A server that sees single uploads, where the run has them; no sum of their noise is credited."""

    @abstractmethod
    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, Tensor]:
        """Return its next state, empty at first, and the step [d]; `start` of each upload is the global model [d]."""


@final
class Mean(SumServer):
    """The mean."""

    def step(self, s: Setting, state: State, total: Summed) -> tuple[State, Tensor]:
        return state, total.vector


@final
class CoverageMean(UploadServer):
    """For each coordinate, the weighted mean over the clients that sent it; the others keep the global model's value."""

    def step(self, s: Setting, state: State, uploads: Sequence[Upload]) -> tuple[State, Tensor]:
        import torch

        total = torch.zeros_like(uploads[0].vector)
        weight = torch.zeros_like(total)
        for u in uploads:
            total.add_(u.vector, alpha=u.weight)
            weight.add_(1.0 if u.support is None else u.support, alpha=u.weight)
        return state, total / weight.where(weight > 0, torch.ones_like(weight))


def mean(uploads: Sequence[Upload]) -> Tensor:
    """The weighted mean of what was released."""
    return weighted_mean([u.vector for u in uploads], [u.weight for u in uploads])


def weighted_mean(vectors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of vectors of one shape."""
    total = sum(weights)
    found = vectors[0] * (weights[0] / total)
    for vector, weight in zip(vectors[1:], weights[1:], strict=True):
        found.add_(vector, alpha=weight / total)
    return found
