"""Shows attacks and audits what a run lets out."""
