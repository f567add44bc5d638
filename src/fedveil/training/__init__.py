"""Local training: the training loop, optimisers, and models as flat vectors."""
