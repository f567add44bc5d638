"""Grids of runs: cells side by side, one process a core, resumable."""

from fedveil.experiment.grid.grid import run_grid

__all__ = ["run_grid"]
