"""`fedveil attack`: what an adversary reads off what a configuration or a run lets out."""
