"""Engines run the clients of a round: inline, pool, batched, cuda."""
