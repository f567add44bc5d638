"""What is learned: losses, metrics, and what targets look like; one file per task."""
