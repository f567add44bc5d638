"""ALDP-FL: sliding-window clipping and bounded noise."""
