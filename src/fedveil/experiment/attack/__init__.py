"""`fedveil attack`: what an adversary reads off what a configuration or a run lets out."""

from fedveil.experiment.attack.kinds import attack
from fedveil.experiment.attack.types import Options

__all__ = ["Options", "attack"]
