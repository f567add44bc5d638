"""Comparison of methods at equal guarantee."""
