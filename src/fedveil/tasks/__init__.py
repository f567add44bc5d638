"""Learning tasks: losses, metrics and the form of targets; one file per task."""
