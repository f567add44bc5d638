"""Experiments of many runs: comparisons, recipes, twins."""
