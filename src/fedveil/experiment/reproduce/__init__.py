"""`fedveil reproduce`: the papers' tables and figures as recipes, ours beside theirs."""

from fedveil.experiment.reproduce.reproduction import reproduce

__all__ = ["reproduce"]
