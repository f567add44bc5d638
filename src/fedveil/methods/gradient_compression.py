"""Gradient compression as a defence: small entries are not sent (proposed against DLG by Zhu et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.methods.base import Release, Setting, Unproven, what_is_not_zero
from fedveil.methods.defence import Defence
from fedveil.training.local import Client, Local, Plain

if TYPE_CHECKING:
    from torch import Tensor

_REASON = "gradient compression adds no noise: the largest entries leave as they are, and which ones leave tells the others' size"


class GradientCompression(Defence):
    """Of each layer of the update only the entries of largest magnitude are sent.

    Args:
        pruning_rate: share of a layer's entries that are set to zero: those below this quantile of its magnitudes.
        weighting: clients count by their number of examples, or all the same.
    """

    name: Literal["gradient-compression"] = "gradient-compression"
    reason: ClassVar[str] = _REASON
    reconstructed: ClassVar[str] = (
        "sources prune one gradient, here the update of a round: the same for one local step of plain SGD but for rounding"
    )
    pruning_rate: float = Field(0.9, ge=0, lt=1)

    def release(self, s: Setting) -> Release:
        """What is zero is not sent."""
        return Unproven(("update",), self.reason, what_is_not_zero)

    def client(self, s: Setting) -> Client:
        """Plain training, then pruning."""
        return Pruned(rate=self.pruning_rate)


@dataclass(frozen=True)
class Pruned(Plain):
    """Plain training whose update loses its small entries, layer by layer."""

    rate: float = 0.0

    def finish(self, local: Local) -> Tensor:
        update = super().finish(local)
        for part in local.model.layout.split(update):
            part.masked_fill_(part.abs() < quantile(part.abs(), self.rate), 0.0)
        return update


def quantile(values: Tensor, share: float) -> Tensor:
    """The value below which a share of the values lies, interpolated linearly, as numpy's percentile is."""
    ordered, position = values.sort().values, share * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
