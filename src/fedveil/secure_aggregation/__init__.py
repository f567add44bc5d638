"""Secure aggregation: pairwise masks, so that the server learns the noisy sum of a round and nothing else; no network."""
