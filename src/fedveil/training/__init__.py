"""Local training: one loop, optimisers, and a model as one flat vector."""
