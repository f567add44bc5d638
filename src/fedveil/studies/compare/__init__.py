"""Methods at equal guarantee."""
