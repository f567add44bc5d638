"""Grids of runs: cells side by side, one process a core, resumable."""
