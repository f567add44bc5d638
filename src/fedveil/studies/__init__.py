"""Experiments with several runs: comparisons, recipes, twin runs, tuning."""
