"""Pictures drawn with matplotlib: a run, a comparison, a reproduction, a partition."""
