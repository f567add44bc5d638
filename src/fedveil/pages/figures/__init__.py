"""Pictures of a run, a comparison, a reproduction, a partition."""
