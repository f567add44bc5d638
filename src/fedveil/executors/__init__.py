"""Engines that run the clients of a round: inline, pool, stacked, batched, cuda."""
