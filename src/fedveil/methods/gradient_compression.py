"""Gradient compression, and the base of defences without a guarantee."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from fedveil.errors import ConfigError
from fedveil.methods.base import MethodConfig, Release, Setting, Unproven, Variant, Weighting, sum_noise, what_is_not_zero
from fedveil.methods.shared import refuse_dp_sgd
from fedveil.training.local import Client, Local, Plain

if TYPE_CHECKING:
    from torch import Tensor

    from fedveil.training.params import Layout


class Defence(MethodConfig):
    """FedAvg whose clients alter their updates to make images harder to reconstruct, without a provable guarantee."""

    variant: ClassVar[Variant] = "published"
    reason: ClassVar[str]
    weighting: Weighting = "examples"

    def calibrate(self, s: Setting) -> Setting:
        """Refuse settings of noise, since the defences add none and concern single uploads."""
        refuse_dp_sgd(s, self.name)
        if s.epsilon is not None or s.noise_multiplier is not None:
            raise ConfigError(
                f"{self.name} has no guarantee and no noise to set: remove privacy.epsilon and privacy.noise_multiplier"
            )
        if sum_noise(s):
            raise ConfigError(f"{self.name} alters what the server sees of a single client: set privacy.view = 'server'")
        return s


def last_matrix(layout: Layout) -> int | None:
    """Return the index of the layer whose weight [outputs, inputs] is the last matrix of the model, or None."""
    matrices = [i for i, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)) if _is_matrix(name, shape)]
    return matrices[-1] if matrices else None


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith("weight") and len(shape) == 2


_REASON = "gradient compression adds no noise: the largest entries leave as they are, and which ones leave tells the others' size"


class GradientCompression(Defence):
    """Sends only the entries of largest magnitude of each layer of the update.

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
        """Send only coordinates that are not zero."""
        return Unproven(("update",), self.reason, what_is_not_zero)

    def client(self, s: Setting) -> Client:
        """Return plain training with pruning at the end."""
        return Pruned(rate=self.pruning_rate)


@dataclass(frozen=True)
class Pruned(Plain):
    """Plain training that sets small entries of its update to zero, layer by layer."""

    rate: float = 0.0

    def finish(self, local: Local) -> Tensor:
        update = super().finish(local)
        for part in local.model.layout.split(update):
            part.masked_fill_(part.abs() < quantile(part.abs(), self.rate), 0.0)
        return update


def quantile(values: Tensor, share: float) -> Tensor:
    """Return the quantile of the values at `share`, interpolated linearly as in numpy."""
    ordered, position = values.sort().values, share * (len(values) - 1)
    below = int(position)
    above = min(below + 1, len(values) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
