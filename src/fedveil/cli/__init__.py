"""Commands and progress, nothing else."""
