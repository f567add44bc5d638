"""`fedveil compare`: methods at equal guarantee over seeds."""

from fedveil.experiment.compare.comparison import Comparison, compare

__all__ = ["Comparison", "compare"]
