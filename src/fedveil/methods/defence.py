"""What defences without a guarantee share: they change what a client sends by a rule that reads its raw gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fedveil.errors import ConfigError
from fedveil.methods.adaptive import refuse_dp_sgd
from fedveil.methods.base import MethodConfig, Setting, Variant, Weighting, sum_noise

if TYPE_CHECKING:
    from fedveil.training.params import Layout


class Defence(MethodConfig):
    """FedAvg whose clients alter what they send so that images are harder to reconstruct; nothing can be proven of it."""

    variant: ClassVar[Variant] = "published"
    reason: ClassVar[str]
    weighting: Weighting = "examples"

    def calibrate(self, s: Setting) -> Setting:
        """There is no noise to calibrate; the defences are about single uploads."""
        refuse_dp_sgd(s, self.name)
        if s.epsilon is not None or s.noise_multiplier is not None:
            raise ConfigError(
                f"{self.name} has no guarantee and no noise to set: remove privacy.epsilon and privacy.noise_multiplier"
            )
        if sum_noise(s):
            raise ConfigError(f"{self.name} alters what the server sees of a single client: set privacy.view = 'server'")
        return s


def last_matrix(layout: Layout) -> int | None:
    """The layer whose weight [outputs, inputs] is the last matrix of the model, or None."""
    matrices = [i for i, (name, shape) in enumerate(zip(layout.names, layout.shapes, strict=True)) if _is_matrix(name, shape)]
    return matrices[-1] if matrices else None


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    return name.endswith("weight") and len(shape) == 2
